"""The queue in: batches read ahead on a thread and staged on the devices in chunks."""

import atexit
import collections
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from millrace.feeds.stager import Chunk, Rows, Stager

_log = logging.getLogger("millrace")

_POLL_SECONDS = 0.05
_JOIN_SECONDS = 2.0
_PATIENCE_SECONDS = 0.005
"""How long a loop waits for a full chunk before it takes what there is."""


class DatasetEnded(RuntimeError):
    """The dataset had fewer elements than the loop asked for."""


@runtime_checkable
class Seekable(Protocol):
    """A dataset that can go straight to its n-th element."""

    def seek(self, position: int) -> None:
        """Make the next iteration start with element `position`."""


class Infeed:
    """Feeds a compiled loop from any iterable of pytrees of NumPy arrays.

    A thread of its own reads the dataset and moves the next chunk of elements to the
    devices while the current one is processed. An exception raised by the dataset is
    raised again where the loop runs, with its own traceback, after the good elements
    before it have been used.

    Args:
        dataset: Every element has the same structure, shapes and types.
        prefetch_depth: Chunks staged ahead of the one in use.
        on_end: What a loop does when the dataset has too few elements: "error", or
            "stop" to end the loop there.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        prefetch_depth: int = 2,
        on_end: Literal["error", "stop"] = "error",
    ) -> None:
        if prefetch_depth < 1:
            raise ValueError(f"prefetch_depth must be at least 1, got {prefetch_depth}.")
        if on_end not in ("error", "stop"):
            raise ValueError(f"on_end must be 'error' or 'stop', got {on_end!r}.")
        if not isinstance(dataset, Iterable):
            raise TypeError(
                "Infeed takes an iterable of pytrees of NumPy arrays, got "
                f"{type(dataset).__name__}."
            )
        self.dataset = dataset
        self.prefetch_depth = prefetch_depth
        self.on_end = on_end
        self._position = 0
        self._reader: _Reader | None = None
        self._chunk: Chunk | None = None
        self._peeked: Any = None
        self._unused: _ReadOnce | None = None
        if not isinstance(dataset, Seekable) and iter(dataset) is (again := iter(dataset)):
            self._unused = _ReadOnce(again)

    @property
    def position(self) -> int:
        """Elements that loops have taken so far; what a checkpoint saves."""
        return self._position

    @property
    def elements_read(self) -> int:
        """Elements that have come from the dataset, used or not."""
        return self._position if self._reader is None else self._reader.elements_read

    def peek(self) -> Any:
        """Return an element like those to come, without taking it."""
        if self._peeked is None:
            try:
                if self._unused is None:
                    self._peeked = next(iter(self.dataset))
                else:
                    self._peeked = self._unused.first()
            except StopIteration:
                raise DatasetEnded("The dataset has no elements.") from None
        return self._peeked

    def seek(self, position: int) -> None:
        """Go to an element, before or between loops.

        A dataset without a ``seek`` of its own is read from its start up to there; one
        that can be read only once cannot go back.
        """
        if position < 0:
            raise ValueError(f"position must not be negative, got {position}.")
        self.close()
        if self._unused is not None:
            if position < self._position:
                raise ValueError(
                    f"This infeed's dataset can be read only once and is past element "
                    f"{position}. Give Infeed an iterable, or a dataset with a seek method."
                )
            self._unused.skip(position - self._position)
        self._position = position

    def chunk(
        self,
        capacity: int | tuple[int, ...] | None = None,
        sharding: Any = None,
        *,
        only_full: bool = False,
    ) -> Chunk | None:
        """Return the chunk to take elements from, waiting for it if need be.

        Args:
            capacity: Elements per chunk, or the capacities of successive chunks, over
                and over. If not given, it is chosen from the elements' size, and a
                chunk that is not full may come when the loop would otherwise wait.
            sharding: Where the chunk is placed; the default device if not given.
            only_full: Leave out the last chunk of a dataset that ends within it.

        None says that the dataset has ended.
        """
        pattern = (capacity,) if isinstance(capacity, int) else capacity
        key = (pattern, sharding, only_full)
        if self._reader is None or self._reader.key != key or self._reader.failed:
            self.close()
            self._reader = _Reader(self, *key)
        if self._chunk is None or self._chunk.start == self._chunk.stop:
            self._chunk = self._reader.get()
        return self._chunk

    def took(self, count: int) -> None:
        """Note that a loop has used `count` more elements of the current chunk."""
        assert self._chunk is not None and count <= self._chunk.stop - self._chunk.start
        self._chunk = self._chunk._replace(start=self._chunk.start + count)
        self._position += count
        if self._unused is not None:
            self._unused.skip(count)

    def close(self) -> None:
        """Stop reading ahead. What was staged but not used is read again later."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            self._chunk = None

    def __enter__(self) -> "Infeed":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        reader = getattr(self, "_reader", None)
        if reader is not None:
            reader.stop.set()


class _ReadOnce:
    """An iterator whose elements are kept until a loop has used them.

    Reading runs ahead of use. When reading starts anew, with chunks of another size
    say, what was read but not used comes first.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._kept: collections.deque[Any] = collections.deque()

    def first(self) -> Any:
        if not self._kept:
            self._keep(next(self._iterator))
        return self._kept[0]

    def _keep(self, element: Any) -> None:
        # A copy: whoever makes the elements may fill the same arrays again.
        self._kept.append(jax.tree.map(np.array, element))

    def skip(self, count: int) -> None:
        for _ in range(count):
            if self._kept:
                self._kept.popleft()
            elif next(self._iterator, self) is self:
                return

    def __iter__(self) -> Iterator[Any]:
        yield from list(self._kept)
        for element in self._iterator:
            self._keep(element)
            yield element


_readers: "weakref.WeakSet[_Reader]" = weakref.WeakSet()


@atexit.register
def _close_readers() -> None:
    """Stop what an infeed that was never closed still reads.

    Python would end the thread in the middle of a copy to the device, and that, with an
    exception through code that allows for none, ends the process with an abort.
    """
    for reader in list(_readers):
        reader.close()


class _Reader:
    """The thread that reads a dataset from a position and stages it."""

    def __init__(
        self,
        infeed: Infeed,
        pattern: tuple[int, ...] | None,
        sharding: Any,
        only_full: bool,
    ) -> None:
        self.key = (pattern, sharding, only_full)
        self.stop = threading.Event()
        self._rows = _own_rows(sharding, infeed)
        self._dataset = _share(infeed.dataset, self._rows)
        self._unused = infeed._unused
        self._stager: Stager | None = None
        self._lock = threading.Lock()
        self._start = self.elements_read = infeed.position
        self._pattern = pattern
        self._only_full = only_full
        self._sharding = sharding
        self._ready: queue.Queue[Any] = queue.Queue(infeed.prefetch_depth)
        self._ended = False
        self.failed = False
        """Whether the dataset raised an error: who asks again reads it anew."""
        self._thread = threading.Thread(
            target=self._run, name="millrace-infeed", daemon=True
        )
        _readers.add(self)
        self._thread.start()

    def get(self) -> Chunk | None:
        if self._ended:
            return None
        patience_ends = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                item = self._ready.get(timeout=_PATIENCE_SECONDS)
                break
            except queue.Empty:
                if self._pattern is None and time.monotonic() > patience_ends:
                    # Nothing is ready: take what has been gathered, however little.
                    chunk = self._take_partial()
                    if chunk is not None:
                        return chunk
                if not self._thread.is_alive() and self._ready.empty():
                    raise RuntimeError("The infeed was closed while in use.") from None
        if isinstance(item, BaseException):
            self.failed = True
            raise item
        self._ended = item is None
        return item

    def _take_partial(self) -> Chunk | None:
        with self._lock:
            # What is ready comes first; the reader may have put it there just now.
            if self._ready.empty() and self._stager is not None and self._stager.count:
                return self._stager.take()
        return None

    def close(self) -> None:
        self.stop.set()
        with contextlib.suppress(queue.Empty):
            while True:  # lets a reader go that waits for room
                self._ready.get_nowait()
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            _log.warning("The infeed's dataset does not answer; its reader is left behind.")

    def _offer(self, item: Any) -> None:
        while not self.stop.is_set():
            try:
                return self._ready.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    def _run(self) -> None:
        try:
            for index, element in self._elements():
                if self.stop.is_set():
                    return
                with self._lock:
                    self._stager = self._stager or Stager(
                        element, self._pattern, self._sharding, self._rows
                    )
                    self._stager.add(element, index)
                    self.elements_read = index + 1
                    chunk = self._stager.take() if self._stager.full else None
                if chunk is not None:
                    self._offer(chunk)
            self._offer_rest()
            self._offer(None)
        except BaseException as error:
            self._offer_rest()
            self._offer(error)

    def _offer_rest(self) -> None:
        """Hand over the good elements before the end, unless only full chunks serve."""
        with self._lock:
            rest = None
            if self._stager is not None and self._stager.count and not self._only_full:
                rest = self._stager.take()
        if rest is not None:
            self._offer(rest)

    def _elements(self) -> Iterator[tuple[int, Any]]:
        if isinstance(self._dataset, Seekable):
            self._dataset.seek(self._start)
            yield from enumerate(self._dataset, self._start)
            return
        if self._unused is not None:
            yield from enumerate(_share(self._unused, self._rows), self._start)
            return
        for index, element in enumerate(self._dataset):
            if index >= self._start:
                yield index, element


def _own_rows(sharding: Any, infeed: Infeed) -> Rows | None:
    """Return which samples of an element belong on devices of this process.

    None where all of them do, as in a process alone.
    """
    if sharding is None or sharding.is_fully_addressable:
        return None
    count = np.shape(jax.tree.leaves(infeed.peek())[0])[0]
    indices = sharding.addressable_devices_indices_map((1, count)).values()
    bounds = [index[1].indices(count) for index in indices]
    start, stop = min(b[0] for b in bounds), max(b[1] for b in bounds)
    return None if (start, stop) == (0, count) else Rows(slice(start, stop), count)


def _share(dataset: Iterable[Any], rows: Rows | None) -> Iterable[Any]:
    """Return a dataset of only these samples; one that cannot share is cut here."""
    if rows is None:
        return dataset
    share = getattr(dataset, "share", None)
    return share(rows.places) if share is not None else _Cut(dataset, rows.places)


class _Cut:
    """A part of every element of a dataset that only gives whole ones."""

    def __init__(self, dataset: Iterable[Any], rows: slice) -> None:
        self._dataset = dataset
        self._rows = rows
        if isinstance(dataset, Seekable):
            self.seek = dataset.seek

    def __iter__(self) -> Iterator[Any]:
        for element in self._dataset:
            yield jax.tree.map(lambda leaf: np.asarray(leaf)[self._rows], element)
