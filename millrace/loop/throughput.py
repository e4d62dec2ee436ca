"""Throughput without the first execution, and without the host's own pauses."""

import contextlib
import time
from collections.abc import Iterator


class Throughput:
    """Samples per second in the steady state.

    The first execution is dropped: it fills queues and caches. So is time the host
    spends on validation and checkpoints between executions.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[float, int]] = []
        self._ends: list[tuple[float, int]] = []
        self._paused = 0.0

    def start(self) -> None:
        """Begin the first execution."""
        self._marks.append((self._now(), 0))
        self._ends.append(self._marks[-1])

    def add(self, samples: int, *, execution_ends: bool) -> None:
        """Note that a call of the program has ended."""
        total = self._marks[-1][1] + samples
        mark = self._now(), total
        _keep(self._marks, mark)
        if execution_ends:
            _keep(self._ends, mark)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the measurement."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - started

    def per_second(self) -> float:
        """Return samples per second, 0 if nothing was measured."""
        # The run's start counts as an end; with one execution only, its first call is
        # dropped; with one call only, nothing is.
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
    """Add a mark; of all after the second, only the newest is ever looked at."""
    del marks[2:]
    marks.append(mark)
