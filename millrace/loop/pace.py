"""How many updates a call makes: few enough to answer, enough to hide its overhead."""

import time

from millrace.distributed import coordination

_CALL_SECONDS = 0.2
"""What a call should take. Its overhead on the host, 0.1 to 0.3 ms, is then 0.1 %, a
progress bar moves five times per second, and a signal is answered at once."""
_MAX_GROWTH = 4
"""Factor by which a call may become longer than the last: the first ones say little."""
_SMOOTHING = 0.5

SLOW_CALL_SECONDS = 0.5
"""Calls longer than this are awaited one by one: the gap between them does not matter, and
a signal does not wait for a second one."""


class Pace:
    """Chooses the length of calls from the time of those before.

    Args:
        updates: Length of the first call.
    """

    def __init__(self, updates: int = 1) -> None:
        self.updates = updates
        self._per_update: float | None = None
        self._last: float | None = None

    @property
    def call_seconds(self) -> float | None:
        """The time that the next call will probably take; None before the first."""
        return None if self._per_update is None else self._per_update * self.updates

    @property
    def seconds_per_update(self) -> float | None:
        """The time of an update; None before the first call."""
        return self._per_update

    @property
    def updates_wanted(self) -> int:
        """The length of a call that takes as long as it should."""
        return max(1, int(_CALL_SECONDS / max(self._per_update or _CALL_SECONDS, 1e-9)))

    @property
    def is_slow(self) -> bool:
        """Whether calls take so long that they are better awaited one by one."""
        return (self.call_seconds or 0.0) > SLOW_CALL_SECONDS

    def start(self) -> None:
        """Start the clock: a call begins now, or the loop has done something else."""
        self._last = time.perf_counter()

    def add(self, updates: int) -> None:
        """Record that a call has ended; the next one began when this one did."""
        now = time.perf_counter()
        if self._last is not None:
            self._measure((now - self._last) / updates)
        self._last = now

    def _measure(self, seconds: float) -> None:
        before = self._per_update
        if before is None:
            self._per_update = seconds
        else:
            self._per_update = _SMOOTHING * seconds + (1 - _SMOOTHING) * before
        self.updates = min(self.updates_wanted, _MAX_GROWTH * self.updates)


class AgreedLength:
    """The lengths of calls that several processes make together.

    Each process measures times of its own, so process 0 chooses; ever more rarely, because
    the processes have to wait for it.

    Args:
        pace: Chooses the length.
        name: Matches the calls of the processes.
    """

    def __init__(self, pace: Pace, name: str) -> None:
        self._pace = pace
        self._name = name
        self._num_calls = 0
        self._agreed = 1

    def next(self) -> int:
        """Return the length of the next call; all processes must ask equally often."""
        if coordination.num_processes() == 1:
            return self._pace.updates
        self._num_calls += 1
        if self._num_calls & (self._num_calls - 1) == 0:  # 1, 2, 4, 8, ... calls
            self._agreed = coordination.broadcast(self._name, self._pace.updates)
        return self._agreed
