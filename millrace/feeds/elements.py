"""One pass over a dataset, in which nothing that was read is lost or read twice."""

import collections
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.feeds.stager import Rows


class Entry(NamedTuple):
    """An element of the dataset, or this process's part of it."""

    number: int
    element: Any
    rows: Rows | None = None
    """Which samples of the whole element these are; None for all of them."""


class Pass:
    """The elements of a dataset from a position on, each handed out once.

    Readers with chunks of different sizes may take turns: what one has read ahead and
    nobody has used comes back through ``give_back``, and the next one gets it first.

    Args:
        open_: Returns the iterator; called when the first element is read.
        index: The number of the iterator's first element.
        start: The first element to hand out; those before it are skipped.
        rows: Which samples the iterator's elements consist of.
        reading: Held while the dataset is asked for an element. A reader that was
            stopped may still be waiting for one, and a generator cannot be entered twice.
    """

    def __init__(
        self,
        open_: Callable[[], Iterator[Any]],
        *,
        index: int,
        start: int,
        rows: Rows | None,
        reading: threading.Lock,
    ) -> None:
        self._open = open_
        self.iterator: Iterator[Any] | None = None
        self.index = index
        """Elements that have come from the dataset, skipped ones included."""
        self.start = start
        self.rows = rows
        self.reading = reading
        self.example: Any = None
        """A copy of the first element."""
        self._kept: collections.deque[Entry] = collections.deque()
        self._error: BaseException | None = None
        self._ended = False

    @property
    def has_returned(self) -> bool:
        """Whether elements have come back."""
        return bool(self._kept)

    def returned(self) -> Entry | None:
        """Return the next element that came back, if there is one."""
        while self._kept:
            entry = self._kept.popleft()
            if entry.number >= self.start:
                return entry
        return None

    def read(self) -> Entry | None:
        """Read the next element from the dataset; None at its end.

        Whoever calls this holds `reading`. What the dataset raises is raised again each
        time, until ``forget_error``.
        """
        if self._error is not None:
            raise self._error
        try:
            if self.iterator is None:
                self.iterator = self._open()
            while not self._ended:
                element = next(self.iterator, self)
                if element is self:
                    self._ended = True
                    break
                if self.example is None:
                    self.example = _copied(element)
                self.index += 1
                if self.index > self.start:
                    return Entry(self.index - 1, element, self.rows)
        except BaseException as error:
            self._error = error
            raise
        return None

    def keep(self, entry: Entry) -> None:
        """Put back an element that was just read; whoever made it may change it."""
        self._kept.append(entry._replace(element=_copied(entry.element)))

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Put back elements that were taken before all that are kept now."""
        self._kept.extendleft(reversed(list(entries)))

    def peek(self) -> Any:
        """Return an element like those to come; None if there is none."""
        if self.example is None:
            with self.reading:
                # A reader may have read one while this waited.
                entry = self.read() if self.example is None else None
                if entry is not None:
                    self.keep(entry)
        return self.example

    @property
    def first(self) -> int:
        """The oldest element that can still be handed out."""
        return self._kept[0].number if self._kept else self.index

    def forget_error(self) -> None:
        """Ask the dataset again after an error."""
        self._error = None

    def serves(self, rows: Rows | None) -> bool:
        """Tell whether all that was read contains these samples."""
        held = [self.rows, *(entry.rows for entry in self._kept.copy())]
        return all(own is None or own == rows for own in held)


def cut(entry: Entry, rows: Rows | None) -> Any:
    """Return these samples of an element that holds them."""
    if rows is None or entry.rows is not None:
        assert entry.rows == rows, "see Pass.serves"
        return entry.element
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows.places], entry.element)


def _copied(element: Any) -> Any:
    return jax.tree.map(np.array, jax.device_get(element))
