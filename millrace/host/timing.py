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
        self._marks: list[tuple[float, int, bool]] = []
        self._paused = 0.0

    def start(self) -> None:
        """Begin the first execution."""
        self._marks.append((self._now(), 0, True))

    def add(self, samples: int, *, execution_ends: bool) -> None:
        """Note that a call of the program has ended."""
        total = self._marks[-1][1] + samples
        self._marks.append((self._now(), total, execution_ends))

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
        ends = [mark for mark in self._marks if mark[2]]
        # The run's start counts as an end; with one execution only, its first call is
        # dropped; with one call only, nothing is.
        marks = ends[1:] if len(ends) > 2 else self._marks[1:]
        if len(marks) < 2:
            marks = self._marks
        if len(marks) < 2:
            return 0.0
        seconds = marks[-1][0] - marks[0][0]
        return (marks[-1][1] - marks[0][1]) / seconds if seconds > 0 else 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._paused
