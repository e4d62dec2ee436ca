"""Which of the processes of an elastic run take part: decided after each failure.

Pure bookkeeping, without processes and clocks of its own. A *slot* is a process and the
devices it would use; a process is started in each slot that takes part.
"""

import math
from dataclasses import dataclass, field

_FAILURES_IN_A_ROW = 2
"""Failures without progress of the run after which the process that fails is lost."""


@dataclass
class Membership:
    """The slots of an elastic run.

    Args:
        least: Number of processes below which the run fails.
        most: Number of processes if none is lost.
        return_after: Seconds after which lost slots are tried again; each time in vain
            doubles them.
    """

    least: int
    most: int
    return_after: float
    slots: list[int] = field(init=False)
    """The slots that take part, in order."""
    _failures: int = 0
    _tried: tuple[int, ...] = ()
    """Slots that were lost and are being tried again."""
    _wait: float = field(init=False)
    _next_try: float = math.inf

    def __post_init__(self) -> None:
        self.slots = list(range(self.most))
        self._wait = self.return_after

    @property
    def absent(self) -> tuple[int, ...]:
        """The slots that do not take part."""
        return tuple(slot for slot in range(self.most) if slot not in self.slots)

    def record_failure(self, slot: int, *, made_progress: bool, now: float) -> bool:
        """Record that the process of a slot has failed; return whether it is lost.

        Otherwise all processes start again. They are lost if they fail repeatedly, or when
        they were tried again after having been lost.
        """
        if made_progress:
            self.record_progress()
        self._failures += 1
        if self._tried:
            self._wait *= 2
            self._leave(self._tried, now)
            self._tried = ()
            return True
        if self._failures < _FAILURES_IN_A_ROW:
            return False
        self._leave((slot,), now)
        return True

    def rest(self, now: float) -> None:
        """Take out one more slot, because the batch cannot be divided otherwise."""
        self._leave((self.slots[-1],), now)

    def record_progress(self) -> None:
        """Record that the run has advanced with the slots that take part."""
        self._failures = 0
        if self._tried:
            self._tried, self._wait = (), self.return_after

    def is_return_due(self, now: float) -> bool:
        """Whether to try the absent slots again."""
        return bool(self.absent) and now >= self._next_try

    def return_absent(self) -> tuple[int, ...]:
        """Let the absent slots take part again; return them."""
        self._tried = self.absent
        self._failures = 0
        self._next_try = math.inf
        self.slots = list(range(self.most))
        return self._tried

    @property
    def has_enough(self) -> bool:
        """Whether enough processes are left."""
        return len(self.slots) >= self.least

    def _leave(self, slots: tuple[int, ...], now: float) -> None:
        self.slots = [slot for slot in self.slots if slot not in slots]
        self._failures = 0
        self._next_try = now + self._wait
