"""The queue in: batches read ahead on a thread and staged on the devices in chunks."""

import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from millrace.feeds.elements import Pass
from millrace.feeds.reader import Reader, unused
from millrace.feeds.stager import Chunk, GradientResult, Rows


class DatasetEnded(RuntimeError):
    """The dataset had fewer elements than the loop asked for."""

    state: Any = None
    """What ``train`` had reached: the state after the last update that was made."""


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

    All loops that use an infeed share one pass over its dataset: each takes the elements
    that follow those of the last one, whatever it takes at a time.

    Args:
        dataset: Every element has the same structure, shapes and types.
        prefetch_depth: Chunks staged ahead of the one in use. Until it is used, a chunk
            is also kept on the host: a loop with chunks of another size may need it.
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
        self._pass: Pass | None = None
        self._failed = False
        """Whether the dataset raised an error: whoever asks again starts a new pass."""
        self._example: Any = None
        self._reading = threading.Lock()
        self._reader: Reader | None = None
        self._left: list[Reader] = []
        """Readers that were stopped while they waited for the dataset."""
        self._chunk: Chunk | None = None
        self._on_host: GradientResult | None = None
        """The current chunk's elements on the host."""

    @property
    def position(self) -> int:
        """Elements that loops have taken so far; what a checkpoint saves."""
        return self._position

    @property
    def elements_read(self) -> int:
        """Elements that have come from the dataset, used or not."""
        return self._position if self._pass is None else self._pass.index

    def peek(self) -> Any:
        """Return an element like those to come, without taking it."""
        if self._example is None:
            try:
                self._example = self._current_pass().peek()
            except BaseException:
                self._failed = True
                raise
            if self._example is None:
                raise DatasetEnded("The dataset has no elements.")
        return self._example

    def seek(self, position: int) -> None:
        """Go to an element, before or between loops.

        A dataset without a ``seek`` of its own is read up to there, from its start when
        going back; one that can be read only once cannot go back.
        """
        if position < 0:
            raise ValueError(f"position must not be negative, got {position}.")
        self.close()
        if self._pass is not None and position < self._pass.first:
            self._pass = self._pass_from(position, None)
        elif self._pass is not None:
            self._pass.start = position
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
        if self._reader is None or self._reader.key != key:
            self._stop_reading()
            rows = _own_rows(sharding, self)
            elements = self._current_pass(rows)
            self._reader = Reader(elements, *key, rows, self.prefetch_depth)
        if self._chunk is None or self._chunk.start == self._chunk.stop:
            self._next_chunk(self._reader)
        return self._chunk

    def _next_chunk(self, reader: Reader) -> None:
        self._chunk = self._on_host = None
        found = reader.get()
        if isinstance(found, BaseException):
            self._stop_reading()
            self._failed = True
            raise found
        if found is not None:
            self._chunk, self._on_host = found

    def _current_pass(self, rows: Rows | None = None) -> Pass:
        """Return the pass that is being made over the dataset, or begin one."""
        elements = self._pass
        # A dataset that can share its elements reads only the samples of this process.
        shares = rows is not None and hasattr(self.dataset, "share")
        fits = elements is not None and elements.serves(rows)
        if elements is None or self._failed or not fits or (shares and not elements.rows):
            elements = self._pass = self._pass_from(self._position, rows)
            self._failed = False
        return elements

    def _pass_from(self, position: int, rows: Rows | None) -> Pass:
        """Begin a pass over the dataset, or continue one that cannot be begun again."""
        dataset, before = self.dataset, self._pass
        share = getattr(dataset, "share", None) if rows is not None else None
        if share is not None and rows is not None:
            dataset = share(rows.places)
        own = rows if share is not None else None
        begin = functools.partial(Pass, start=position, rows=own, reading=self._reading)
        if isinstance(dataset, Seekable):
            return begin(lambda: _iterator_at(dataset, position), index=position)
        if before is not None and isinstance(dataset, Iterator):
            return self._continued(before, position, rows)
        iterator = iter(dataset)
        if before is not None and iterator is before.iterator:
            return self._continued(before, position, rows)
        return begin(lambda: iterator, index=0)

    def _continued(self, elements: Pass, position: int, rows: Rows | None) -> Pass:
        if position < elements.first or not elements.serves(rows):
            raise ValueError(
                f"This infeed's dataset can be read only once and is past element "
                f"{position}. Give Infeed an iterable, or a dataset with a seek method."
            )
        elements.start = position
        elements.forget_error()
        return elements

    def took(self, count: int) -> None:
        """Note that a loop has used `count` more elements of the current chunk."""
        assert self._chunk is not None and count <= self._chunk.stop - self._chunk.start
        self._chunk = self._chunk._replace(start=self._chunk.start + count)
        self._position += count
        if self._chunk.start == self._chunk.stop:
            self._on_host = None

    def close(self) -> None:
        """Stop reading ahead.

        What was read but not used is kept for later, or read again by a dataset that can
        seek.
        """
        self._stop_reading()
        for reader in self._left:
            reader.join()
        self._left.clear()
        if isinstance(self.dataset, Seekable):
            self._pass = None

    def _stop_reading(self) -> None:
        """Stop the reader and put back what nobody has used, without waiting for it."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        entries = reader.retire()
        if self._chunk is not None and self._on_host is not None:
            entries = unused(self._on_host, self._chunk.start, reader.rows) + entries
        self._chunk = self._on_host = None
        assert self._pass is not None
        self._pass.give_back(entries)
        self._left = [left for left in [*self._left, reader] if left.is_alive]

    def __enter__(self) -> "Infeed":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        reader = getattr(self, "_reader", None)
        if reader is not None:
            reader.stop.set()


def _iterator_at(dataset: Any, position: int) -> Iterator[Any]:
    dataset.seek(position)
    return iter(dataset)


def _own_rows(sharding: Any, infeed: Infeed) -> Rows | None:
    """Return which samples of an element belong on devices of this process.

    None where all of them do, as in a process alone.
    """
    if sharding is None or sharding.is_fully_addressable or sharding.is_fully_replicated:
        return None
    count = np.shape(jax.tree.leaves(infeed.peek())[0])[0]
    indices = sharding.addressable_devices_indices_map((1, count)).values()
    bounds = [index[1].indices(count) for index in indices]
    start, stop = min(b[0] for b in bounds), max(b[1] for b in bounds)
    return None if (start, stop) == (0, count) else Rows(slice(start, stop), count)
