"""A trace of a few calls of a training program, for profilers."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import jax

_TRACED_CALLS = 3
_TRACED_SECONDS = 3.0
_WARM_UP_CALLS = 2
_WARM_UP_CALLS_IF_COMPILED_AGAIN = 6
"""A program of fixed length may be compiled again after its fourth call."""


class Trace:
    """Writes a ``jax.profiler`` trace of a few calls after warm-up.

    Args:
        folder: Where to write it.
        compiled_once: Whether the program is never compiled again for longer calls.
    """

    def __init__(self, folder: Path, *, compiled_once: bool) -> None:
        self.paused: Callable[[], contextlib.AbstractContextManager[None]]
        self.paused = contextlib.nullcontext
        """Entered while the profiler starts, and while it writes."""
        self.folder = folder
        self.updates = 0
        """Updates in the trace."""
        self.seconds = 0.0
        warm_up = _WARM_UP_CALLS if compiled_once else _WARM_UP_CALLS_IF_COMPILED_AGAIN
        self._calls_left = warm_up
        self._started: float | None = None
        self._first_update = 0

    def advance(self, done: int, wait: Callable[[], None]) -> None:
        """Start or stop before the next call, after `done` updates.

        Args:
            done: Updates made or queued.
            wait: Waits for all calls in flight.
        """
        self._calls_left -= 1
        has_time = self._elapsed() < _TRACED_SECONDS
        if self.updates or (self._calls_left >= 0 and has_time):
            return
        if self._started is None:
            wait()
            with self.paused():
                jax.profiler.start_trace(self.folder)
            self._started, self._first_update = time.perf_counter(), done
            self._calls_left = _TRACED_CALLS - 1
        else:
            self.stop(done, wait)

    def stop(self, done: int, wait: Callable[[], None]) -> None:
        """Write the trace, if one has been started: no validation must be in it."""
        if self._started is None:
            return
        wait()
        self.seconds = self._elapsed()
        self.updates = done - self._first_update
        self._started = None
        with self.paused():
            jax.profiler.stop_trace()

    def close(self) -> None:
        """Drop a trace that was not stopped, because training failed."""
        if self._started is not None:
            self._started = None
            with contextlib.suppress(RuntimeError):
                jax.profiler.stop_trace()

    def _elapsed(self) -> float:
        return 0.0 if self._started is None else time.perf_counter() - self._started
