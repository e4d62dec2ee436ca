"""Read a dataset once, on a thread, and stage its elements on the devices in chunks."""

import atexit
import collections
import copy
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.feeds.stager import Chunk, HostChunk, SampleSlice, Stager
from millrace.feeds.threads import with_settings

_log = logging.getLogger("millrace")

_POLL_SECONDS = 0.05
_JOIN_SECONDS = 2.0
_PARTIAL_CHUNK_SECONDS = 0.005
"""How long a loop waits for a full chunk before it accepts a partial one."""
_PADDED_CHUNK_SECONDS = 0.1
"""The same for a partial chunk that takes as much memory as a full one."""

_ENDED = "ended"


class GaveUp(Exception):
    """A loop stopped waiting for data."""


class Request(NamedTuple):
    """The chunks that a loop asks for."""

    capacities: tuple[int, ...] | None
    """Sizes of successive chunks, repeated forever; None accepts any size."""
    sharding: Any
    only_full: bool
    """Whether to drop the last chunk of the dataset if it is not full."""
    partial: int | None = None
    """Accept a chunk that is not full, of a multiple of this size, instead of waiting."""

    @property
    def patience(self) -> float:
        """Seconds to wait for a full chunk before a partial one is accepted."""
        is_any_size = self.capacities is None
        return _PARTIAL_CHUNK_SECONDS if is_any_size else _PADDED_CHUNK_SECONDS


class Staged(NamedTuple):
    """A chunk on the devices, and its elements on the host."""

    chunk: Chunk
    on_host: HostChunk | None
    """Kept so that unused elements can be staged again for another request."""


class Element(NamedTuple):
    """An element of the dataset and its number there."""

    number: int
    value: Any
    samples: SampleSlice | None = None
    """The samples that `value` holds; None for all of them."""


class Pass:
    """One pass over a dataset, in which every element is returned once.

    Readers may take turns with chunks of different sizes: elements that one has read ahead
    but not used come back through ``give_back``, and the next reader gets them first.

    Args:
        open_iterator: Called when the first element is read.
        index: Number of the iterator's first element.
        start: First element to return; earlier ones are skipped.
        samples: The samples that the iterator's elements hold.
        get_state: Returns a getter of the iterator's state, if it has one.
        reading: Held while the dataset produces an element. A reader that was stopped may
            still be inside the dataset, and a generator cannot be entered twice.
    """

    def __init__(
        self,
        open_iterator: Callable[[], Iterator[Any]],
        index: int,
        *,
        start: int,
        samples: SampleSlice | None,
        reading: threading.Lock,
        get_state: Callable[[Any], Callable[[], Any] | None] = lambda iterator: None,
    ) -> None:
        self._open = open_iterator
        self._find_getter = get_state
        self._get_state: Callable[[], Any] | None = None
        # States of the iterator, each with the number of the element that comes next.
        # The reader appends, and the loop drops those of elements that it has used.
        self._states: collections.deque[tuple[int, Any]] = collections.deque()
        self.iterator: Iterator[Any] | None = None
        self.index = index
        """Elements read from the dataset, including skipped ones."""
        self.start = start
        self.samples = samples
        self.reading = reading
        self.example: Any = None
        """A copy of the first element."""
        # Several threads use the deque; each of its operations is atomic.
        self._returned: collections.deque[Element] = collections.deque()
        self._error: BaseException | None = None
        self._ended = False

    @property
    def has_returned(self) -> bool:
        """Whether elements have been given back."""
        return bool(self._returned)

    def take_returned(self) -> Element | None:
        """Return the next element that was given back, if there is one."""
        while self._returned:
            element = self._returned.popleft()
            if element.number >= self.start:
                return element
        return None

    def read(self) -> Element | None:
        """Read the next element of the dataset; None at its end.

        The caller holds `reading`. An exception of the dataset is raised again by every
        call until ``forget_error``.
        """
        if self._error is not None:
            raise self._error
        try:
            if self.iterator is None:
                self.iterator = self._open()
                self._get_state = self._find_getter(self.iterator)
                self._keep_state()
            while not self._ended:
                value = next(self.iterator, self)
                if value is self:
                    self._ended = True
                    break
                if self.example is None:
                    self.example = _copy(value)
                self.index += 1
                self._keep_state()
                if self.index > self.start:
                    return Element(self.index - 1, value, self.samples)
        except BaseException as error:
            self._error = error
            raise
        return None

    def _keep_state(self) -> None:
        # Skipped elements may be many, and nothing continues from them.
        if self._get_state is not None and self.index >= self.start:
            self._states.append((self.index, copy.deepcopy(self._get_state())))

    def state_at(self, position: int) -> Any:
        """Return the state of the iterator before an element; forget those before it."""
        while self._states and self._states[0][0] < position:
            self._states.popleft()
        if self._states and self._states[0][0] == position:
            return self._states[0][1]
        return None

    def keep(self, element: Element) -> None:
        """Put back the newest element, copied: its producer may reuse the memory."""
        self._returned.append(element._replace(value=_copy(element.value)))

    def give_back(self, elements: Iterable[Element]) -> None:
        """Put back elements that are older than all that were given back before."""
        self._returned.extendleft(reversed(list(elements)))

    def peek(self) -> Any:
        """Return an element like those to come; None if there is none."""
        if self.example is None:
            with self.reading:
                # Another thread may have read one while this one waited.
                element = self.read() if self.example is None else None
                if element is not None:
                    self.keep(element)
        return self.example

    @property
    def oldest(self) -> int:
        """Number of the oldest element that can still be returned."""
        return self._returned[0].number if self._returned else self.index

    def forget_error(self) -> None:
        """Try the dataset again after an error."""
        self._error = None

    def contains(self, samples: SampleSlice | None) -> bool:
        """Whether everything read so far contains these samples."""
        held = [self.samples, *(element.samples for element in self._returned.copy())]
        return all(own is None or own == samples for own in held)


class Reader:
    """A thread that gathers the elements of a pass into chunks and stages them.

    Args:
        elements: The pass to read.
        request: The chunks to make.
        samples: The samples of each element that this process stages.
        depth: Chunks staged ahead.
    """

    def __init__(
        self, elements: Pass, request: Request, samples: SampleSlice | None, depth: int
    ) -> None:
        self._pass = elements
        self._request = request
        self._samples = samples
        self._depth = depth
        self._stager: Stager | None = None
        self._ready: collections.deque[Staged] = collections.deque()
        self._placing: HostChunk | None = None
        self._outcome: Any = None
        """_ENDED or the exception, once there is nothing more to read."""
        # Guards all of the above; never held while the dataset produces an element.
        self._changed = threading.Condition(threading.Lock())
        self.stop = threading.Event()
        self._thread = threading.Thread(
            target=with_settings(self._run), name="millrace-infeed", daemon=True
        )
        _readers.add(self)
        self._thread.start()

    def get(
        self, give_up: Callable[[], bool] | None = None
    ) -> Staged | BaseException | None:
        """Wait for the next chunk; the exception or None when there are no more.

        Args:
            give_up: Returns whether to stop waiting and raise ``GaveUp``.
        """
        deadline = time.monotonic() + self._request.patience
        with self._changed:
            while not self._ready:
                if self._outcome is not None:
                    return None if self._outcome is _ENDED else self._outcome
                if give_up is not None and give_up():
                    raise GaveUp
                if self.stop.is_set():
                    raise RuntimeError("The infeed was closed while a loop was using it.")
                stager = self._stager
                if time.monotonic() > deadline and self._has_partial_chunk():
                    assert stager is not None
                    on_host = stager.take()
                    break
                self._changed.wait(_PARTIAL_CHUNK_SECONDS)
            else:
                self._changed.notify_all()
                return self._ready.popleft()
        return Staged(stager.place(on_host), on_host)

    def _has_partial_chunk(self) -> bool:
        multiple = 1 if self._request.capacities is None else self._request.partial
        if multiple is None or self._placing is not None or self._stager is None:
            return False
        return self._stager.count > 0 and self._stager.count % multiple == 0

    def retire(self) -> list[Element]:
        """Stop without waiting for the dataset; return the unused elements."""
        with self._changed:
            self.stop.set()
            chunks = [staged.on_host for staged in self._ready]
            chunks += [self._placing, self._stager and self._stager.take()]
            self._ready.clear()
            self._placing = self._stager = None
            self._changed.notify_all()
        return [e for chunk in chunks if chunk is not None for e in self.unused(chunk)]

    def unused(self, chunk: HostChunk, start: int = 0) -> list[Element]:
        """Return the elements of a chunk from `start` on."""
        return [
            Element(chunk.first + index, chunk.element(index), self._samples)
            for index in range(start, chunk.size)
        ]

    def join(self) -> None:
        """Wait a few seconds for the thread to end."""
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            _log.warning("The dataset does not answer; its reader thread is abandoned.")

    @property
    def is_alive(self) -> bool:
        """Whether the thread is still running."""
        return self._thread.is_alive()

    def _run(self) -> None:
        outcome: Any = _ENDED
        try:
            try:
                while self._gather_one():
                    stager = self._stager  # `retire` may clear it at any time
                    if stager is not None and stager.is_full:
                        self._stage()
            finally:
                # Good elements before an error or the end are still used.
                if not self._request.only_full:
                    self._stage()
        except BaseException as error:
            outcome = error
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()

    def _gather_one(self) -> bool:
        """Add the next element to the chunk; False at the end, or when stopped."""
        if self._pass.has_returned and self._add_returned():
            return True
        with self._pass.reading:
            # A stopped reader that held the lock until now may have put an element back.
            if self._pass.has_returned and self._add_returned():
                return True
            element = None if self.stop.is_set() else self._pass.read()
            if element is None:
                return False
            with self._changed:
                if not self.stop.is_set():
                    return self._add(element)
            self._pass.keep(element)
            return False

    def _add_returned(self) -> bool:
        # Taken and added under one lock, so that `retire` misses no element in between.
        with self._changed:
            element = None if self.stop.is_set() else self._pass.take_returned()
            return element is not None and self._add(element)

    def _add(self, element: Element) -> bool:
        try:
            value = _cut(element, self._samples)
            if self._stager is None:
                capacities, sharding = self._request[:2]
                self._stager = Stager(value, capacities, sharding, self._samples)
            self._stager.add(value, element.number)
        except BaseException:
            self._pass.give_back([element])
            raise
        return True

    def _stage(self) -> None:
        """Copy the gathered elements to the devices, once there is room for a chunk."""
        with self._changed:
            # Polls, because an infeed that is garbage-collected sets `stop` without
            # notifying: the collector may run in a thread that holds the lock.
            while len(self._ready) >= self._depth and not self.stop.is_set():
                self._changed.wait(_POLL_SECONDS)
            stager = self._stager
            if self.stop.is_set() or stager is None or not stager.count:
                return
            on_host = self._placing = stager.take()
        # Outside the lock: the loop may take a finished chunk during the copy.
        chunk = stager.place(on_host)
        with self._changed:
            if not self.stop.is_set():
                self._placing = None
                self._ready.append(Staged(chunk, on_host))
                self._changed.notify_all()


def _cut(element: Element, samples: SampleSlice | None) -> Any:
    """Return these samples of an element that contains them."""
    if samples is None or element.samples is not None:
        assert element.samples == samples, "checked by Pass.contains"
        return element.value
    return jax.tree.map(lambda leaf: np.asarray(leaf)[samples.own], element.value)


def _copy(value: Any) -> Any:
    return jax.tree.map(np.array, jax.device_get(value))


_readers: "weakref.WeakSet[Reader]" = weakref.WeakSet()


@atexit.register
def _stop_readers() -> None:
    """Stop the threads of infeeds that were never closed.

    Python would kill a thread in the middle of a copy to the device by raising through C++
    code that allows no exceptions, and the process would abort.
    """
    for reader in list(_readers):
        if reader.is_alive:
            reader.retire()
            reader.join()
