"""Which of several processes the others wait for.

A process whose data never comes is alive, and says so: only its progress tells. All
processes stage the same chunks in the same order, so who has staged fewer is behind.
"""

from typing import NamedTuple

STUCK_SECONDS = 120.0
"""How long a process may be behind the others at least before it is named."""
_LONGEST_STEPS = 3
"""The same, in the longest time that any step has taken so far."""


class _Counted:
    steps = 0


def count_step() -> None:
    """Note that this process has staged a chunk of batches for its devices."""
    _Counted.steps += 1


def steps_counted() -> int:
    """Return how many there have been."""
    return _Counted.steps


class _Heard(NamedTuple):
    steps: int
    since: float


class Progress:
    """How far every process is, as far as this one has heard.

    Args:
        num_processes: How many there are.
        now: What the clock shows, in seconds.
    """

    def __init__(self, num_processes: int, now: float) -> None:
        self._heard = {rank: _Heard(0, now) for rank in range(num_processes)}
        self._longest = 0.0
        self._named: _Heard | None = None

    def hear(self, rank: int, steps: int, now: float) -> None:
        """Take note of how far a process is."""
        before = self._heard[rank]
        if steps != before.steps:
            self._longest = max(self._longest, now - before.since)
            self._heard[rank] = _Heard(steps, now)

    def forgive(self, now: float) -> None:
        """Count from now: it was this process that stood still."""
        self._heard = {rank: _Heard(steps, now) for rank, (steps, _) in self._heard.items()}

    def newly_stuck(self, now: float) -> tuple[int, float] | None:
        """Return a process that the others have waited for too long, and for how long.

        Each is returned once, until it has made a step.
        """
        newest = max(heard.steps for heard in self._heard.values())
        limit = max(STUCK_SECONDS, _LONGEST_STEPS * self._longest)
        for rank, heard in self._heard.items():
            is_late = heard.steps < newest and now - heard.since > limit
            if is_late and heard != self._named:
                self._named = heard
                return rank, now - heard.since
        return None
