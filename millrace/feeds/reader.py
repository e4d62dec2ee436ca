"""The thread that reads a dataset ahead and stages it on the devices in chunks."""

import atexit
import collections
import logging
import threading
import time
import weakref
from typing import Any, NamedTuple

from millrace.feeds.elements import Entry, Pass, cut
from millrace.feeds.stager import Chunk, GradientResult, Rows, Stager

_log = logging.getLogger("millrace")

_POLL_SECONDS = 0.05
_JOIN_SECONDS = 2.0
_PATIENCE_SECONDS = 0.005
"""How long a loop waits for a full chunk before it takes what there is."""

ENDED = "ended"
"""What a reader has for a loop when the dataset has no more elements."""


class Staged(NamedTuple):
    """A chunk, and its elements on the host: unused ones may be staged differently."""

    chunk: Chunk
    gathered: GradientResult


class Reader:
    """Gathers elements of a pass into chunks of some sizes, on a thread of its own.

    Args:
        elements: Where the elements come from.
        pattern: The sizes of successive chunks, over and over; None to choose one.
        sharding: Where chunks are placed.
        only_full: Whether a last chunk that is not full stays unused.
        rows: The samples of each element that are placed by this process.
        depth: Chunks staged ahead.
    """

    def __init__(
        self,
        elements: Pass,
        pattern: tuple[int, ...] | None,
        sharding: Any,
        only_full: bool,
        rows: Rows | None,
        depth: int,
    ) -> None:
        self.key = (pattern, sharding, only_full)
        self.rows = rows
        self._pass = elements
        self._depth = depth
        self._stager: Stager | None = None
        self._ready: collections.deque[Staged] = collections.deque()
        self._placing: GradientResult | None = None
        self._outcome: Any = None
        """ENDED, or the error that was raised, once there is nothing more to read."""
        self._changed = threading.Condition(threading.Lock())
        self.stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="millrace-infeed", daemon=True
        )
        _readers.add(self)
        self._thread.start()

    def get(self) -> Staged | BaseException | None:
        """Wait for the next chunk; None or the error when there are no more."""
        patience_ends = time.monotonic() + _PATIENCE_SECONDS
        with self._changed:
            while not self._ready:
                if self._outcome is not None:
                    return None if self._outcome is ENDED else self._outcome
                if self.stop.is_set():
                    raise RuntimeError("The infeed was closed while in use.")
                stager = self._stager
                if time.monotonic() > patience_ends and self._may_be_partial(stager):
                    assert stager is not None
                    gathered = stager.take()
                    break
                self._changed.wait(_PATIENCE_SECONDS)
            else:
                self._changed.notify_all()
                return self._ready.popleft()
        return Staged(stager.placed(gathered), gathered)

    def _may_be_partial(self, stager: Stager | None) -> bool:
        """Whether a chunk of any size serves, and something has been gathered for it."""
        pattern, _, _ = self.key
        idle = pattern is None and self._placing is None
        return idle and stager is not None and stager.count > 0

    def retire(self) -> list[Entry]:
        """Stop, without waiting for the dataset, and return what has not been used."""
        with self._changed:
            self.stop.set()
            gathered = [staged.gathered for staged in self._ready]
            gathered += [self._placing] if self._placing is not None else []
            gathered += [self._stager.take()] if self._stager is not None else []
            self._ready.clear()
            self._placing = self._stager = None
            self._changed.notify_all()
        return [entry for part in gathered for entry in unused(part, 0, self.rows)]

    def join(self) -> None:
        """Wait for the thread to end, but not for ever."""
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            _log.warning("The infeed's dataset does not answer; its reader is left behind.")

    @property
    def is_alive(self) -> bool:
        """Whether the thread still waits for the dataset."""
        return self._thread.is_alive()

    def _run(self) -> None:
        outcome: Any = ENDED
        try:
            try:
                while self._gather_one():
                    self._stage_full()
            finally:
                self._stage_rest()
        except BaseException as error:
            outcome = error
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()

    def _gather_one(self) -> bool:
        """Add the next element to the chunk; False when there is none, or to stop."""
        if self._pass.has_returned and self._add_returned():
            return True
        with self._pass.reading:
            # Whoever held it before may have put an element back.
            if self._pass.has_returned and self._add_returned():
                return True
            entry = None if self.stop.is_set() else self._pass.read()
            if entry is None:
                return False
            with self._changed:
                if not self.stop.is_set():
                    return self._add(entry)
            self._pass.keep(entry)
            return False

    def _add_returned(self) -> bool:
        # Under one lock, so that no element is out of sight of `retire`.
        with self._changed:
            entry = None if self.stop.is_set() else self._pass.returned()
            return entry is not None and self._add(entry)

    def _add(self, entry: Entry) -> bool:
        pattern, sharding, _ = self.key
        try:
            element = entry.element if entry.rows is self.rows else cut(entry, self.rows)
            if self._stager is None:
                self._stager = Stager(element, pattern, sharding, self.rows)
            self._stager.add(element, entry.number)
        except BaseException:
            self._pass.give_back([entry])
            raise
        return True

    def _stage_full(self) -> None:
        stager = self._stager
        if stager is not None and stager.full:
            self._stage(stager)

    def _stage_rest(self) -> None:
        """Hand over the good elements before the end, unless only full chunks serve."""
        stager, (_, _, only_full) = self._stager, self.key
        if stager is not None and not only_full:
            self._stage(stager)

    def _stage(self, stager: Stager) -> None:
        with self._changed:
            while len(self._ready) >= self._depth and not self.stop.is_set():
                self._changed.wait(_POLL_SECONDS)
            if self.stop.is_set() or not stager.count:
                return
            gathered = self._placing = stager.take()
        # Not under the lock: meanwhile the loop may take a chunk that is ready.
        chunk = stager.placed(gathered)
        with self._changed:
            if not self.stop.is_set():
                self._placing = None
                self._ready.append(Staged(chunk, gathered))
                self._changed.notify_all()


def unused(gathered: GradientResult, start: int, rows: Rows | None) -> list[Entry]:
    """Return the elements of a chunk from place `start` on, as they were gathered."""
    return [
        Entry(gathered.first + place, gathered.element(place), rows)
        for place in range(start, gathered.size)
    ]


_readers: "weakref.WeakSet[Reader]" = weakref.WeakSet()


@atexit.register
def _close_readers() -> None:
    """Stop what an infeed that was never closed still reads.

    Python would end the thread in the middle of a copy to the device, and that, with an
    exception through code that allows for none, ends the process with an abort.
    """
    for reader in list(_readers):
        if reader.is_alive:
            reader.retire()
            reader.join()
