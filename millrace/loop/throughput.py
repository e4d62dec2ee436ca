"""Throughput in the steady state, without warm-up and pauses of the host."""

import contextlib
import time
from collections.abc import Iterator


class Throughput:
    """Measures samples per second in the steady state.

    The first execution is dropped because it fills queues and caches, and so is the time
    that validation and checkpoints take between executions.
    """

    def __init__(self) -> None:
        # Marks are (seconds, samples so far), at the end of calls and of executions.
        self._marks: list[tuple[float, int]] = []
        self._ends: list[tuple[float, int]] = []
        self._paused = 0.0

    def start(self) -> None:
        """Start the clock, right before the first execution."""
        self._marks.append((self._now(), 0))
        self._ends.append(self._marks[-1])

    def add(self, samples: int, *, execution_ends: bool) -> None:
        """Record that a call of the program has ended."""
        total = self._marks[-1][1] + samples
        mark = self._now(), total
        _keep(self._marks, mark)
        if execution_ends:
            _keep(self._ends, mark)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the measurement."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - started

    def per_second(self) -> float:
        """Return samples per second, 0 if nothing has been measured."""
        # The start counts as an end, so a third one means a second execution. With only
        # one execution, its first call is dropped; with only one call, nothing is.
        if len(self._ends) > 2:
            first, last = self._ends[1], self._ends[-1]
        elif len(self._marks) > 2:
            first, last = self._marks[1], self._marks[-1]
        elif len(self._marks) == 2:
            first, last = self._marks
        else:
            return 0.0
        seconds = last[0] - first[0]
        return (last[1] - first[1]) / seconds if seconds > 0 else 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._paused


def _keep(marks: list[tuple[float, int]], mark: tuple[float, int]) -> None:
    """Append a mark; after the second one, only the newest is ever used."""
    del marks[2:]
    marks.append(mark)
