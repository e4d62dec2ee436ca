"""When a run logs, validates and saves checkpoints, in whole weight updates.

Events are requested per epoch, but they can only happen between two weight updates, and
all executions of the compiled program have the same length. So each period is moved to
the nearest one that divides the run evenly, with a warning if that changes the rate.
"""

import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import NamedTuple

from millrace.config import ConfigurationError

_KINDS = ("log", "checkpoint", "validate")
_MAX_UPDATES = 2**31 - 1
"""The training state counts updates in an int32."""


class EventSchedule(NamedTuple):
    """The updates of a run, and the updates after which its events happen."""

    updates_per_epoch: int
    total_updates: int
    updates_per_execution: int
    """Updates between two points at which there may be events. It divides every period and
    the run."""
    periods: dict[str, int]
    """Updates between two events of a kind; 0 for events only at the end."""
    warnings: list[str]
    first: Mapping[str, int] = {}
    """The update of the first event, for kinds that do not start after one period."""
    is_fixed: bool = False
    """Whether the host acts only at the end of executions, as the plan asks. Otherwise it
    acts several times per second."""

    def due(self, event: str, update: int) -> bool:
        """Whether an event follows update number `update`; all follow the last one."""
        period, first = self.periods.get(event, 0), self.first.get(event, 0)
        if update == self.total_updates:
            return True
        return period > 0 and update >= first and (update - first) % period == 0

    @property
    def updates_between_stops(self) -> int:
        """Updates between two points at which a call may have to end."""
        if self.is_fixed:
            return self.updates_per_execution
        stops = [period for event, period in self.periods.items() if event != "log"]
        return math.gcd(self.total_updates, *stops, *self.first.values())

    def next_stop(self, update: int) -> int:
        """Return the first update after `update` at which a call has to end.

        Log events need none, because a call returns the metrics of all its updates.
        """
        stops = [self.total_updates]
        for event, period in self.periods.items():
            if period and event != "log":
                first = self.first.get(event, period)
                periods = max(0, (update - first) // period + 1)
                stops.append(first + periods * period)
        return min(stops)


def check_update_count(total_updates: int) -> int:
    """Return the number of updates, or raise an error if it is too large to count."""
    if total_updates > _MAX_UPDATES:
        raise ConfigurationError(
            f"The run would have {total_updates:,} updates, and at most "
            f"{_MAX_UPDATES:,} can be counted. Ask for fewer epochs."
        )
    return total_updates


def schedule_events(
    *,
    updates_per_epoch: int,
    num_epochs: int,
    events_per_epoch: Mapping[str, float],
    updates_per_execution: int | None = None,
    first_epochs: Mapping[str, float] | None = None,
    uneven: Collection[str] = (),
) -> EventSchedule:
    """Compute when events happen.

    Args:
        updates_per_epoch: Whole weight updates in one pass over the data.
        num_epochs: Number of passes.
        events_per_epoch: Rate of each kind of event ("log", "checkpoint", "validate"):
            2 is twice per epoch, 0.5 every other epoch, 0 only at the end of the run.
        updates_per_execution: Use this length instead of the longest that fits.
        first_epochs: For some kinds, the epoch after which the first event happens; the
            others follow at their rate.
        uneven: Kinds whose period need not divide the run. It is rounded down to whole
            updates, and the last event comes at the end of the run.
    """
    if updates_per_epoch < 1:
        raise ConfigurationError(
            f"updates_per_epoch must be at least 1, got {updates_per_epoch}."
        )
    if num_epochs < 1:
        raise ConfigurationError(f"num_epochs must be at least 1, got {num_epochs}.")
    for event in (*events_per_epoch, *(first_epochs or {}), *uneven):
        if event not in _KINDS:
            raise ConfigurationError(f"Events are {', '.join(_KINDS)}, got {event!r}.")
    total = check_update_count(updates_per_epoch * num_epochs)
    first_epochs = {event: n for event, n in (first_epochs or {}).items() if n}
    periods: dict[str, int] = {}
    warnings: list[str] = []
    for event, rate in events_per_epoch.items():
        first_epoch = first_epochs.get(event, 0.0)
        if first_epoch >= num_epochs:
            raise ConfigurationError(
                f"The first {event} cannot come after {first_epoch:g} epochs: the run has "
                f"{num_epochs}."
            )
        if event in uneven and rate > 0:
            periods[event] = max(1, int(updates_per_epoch / rate))
            continue
        epochs_left = max(1, int(num_epochs - first_epoch))
        periods[event], warning = _find_period(event, rate, updates_per_epoch, epochs_left)
        if warning:
            warnings.append(warning)
    if not any(periods.values()):
        warnings.append(
            f"No event is requested before the end: all {total} updates run on the "
            "device without returning to the host."
        )
    # The total counts too: with a first event of its own, or uneven, a period need not
    # divide the run. gcd(0, n) is n, so kinds without a period do not matter.
    execution = math.gcd(*periods.values(), total)
    if updates_per_execution is not None:
        _check_execution(updates_per_execution, execution)
        execution = updates_per_execution
    first = {}
    for event, epochs in first_epochs.items():
        # Moved to the nearest end of an execution.
        first[event] = max(1, round(epochs * updates_per_epoch / execution)) * execution
        if first[event] != epochs * updates_per_epoch:
            warnings.append(
                f"The first {event} comes after {first[event] / updates_per_epoch:g} "
                f"epochs instead of {epochs:g}, between two executions."
            )
    is_fixed = updates_per_execution is not None
    return EventSchedule(
        updates_per_epoch, total, execution, periods, warnings, first, is_fixed
    )


def _check_execution(requested: int, longest: int) -> None:
    if longest % requested:
        raise ConfigurationError(
            f"updates_per_execution ({requested}) must divide the {longest} updates "
            f"between two events of this run. The nearest that does is "
            f"{closest_divisor(longest, requested)}."
        )


def _find_period(
    event: str, rate: float, updates_per_epoch: int, num_epochs: int
) -> tuple[int, str | None]:
    """Return the updates between two events, and a warning if the rate changes."""
    if not (math.isfinite(rate) and rate >= 0):
        raise ConfigurationError(f"{event}s per epoch must be 0 or more, got {rate}.")
    if rate == 0:
        return 0, None
    # 0.333... means a third, although the float is a little less.
    wanted = Fraction(rate).limit_denominator(1_000_000)
    span = updates_per_epoch
    if wanted < 1:
        # An event in more than a million epochs rounds to 0.
        if not wanted or (num_epochs * wanted).denominator != 1:
            advice = (
                f"a number of epochs that is a multiple of {wanted.denominator}, or "
                if wanted
                else ""
            )
            each = float(1 / wanted) if wanted else 1 / rate
            raise ConfigurationError(
                f"It is not possible to {event} {each} epochs at a time for {num_epochs} "
                f"epochs. Choose {advice}another rate (0: only at the end)."
            )
        # Rarer than once per epoch: the period divides the whole run, not one epoch.
        wanted *= num_epochs
        span *= num_epochs
    chosen = closest_divisor(span, float(wanted))
    if chosen == wanted:
        return span // chosen, None
    reached = Fraction(chosen, span // updates_per_epoch)
    return span // chosen, (
        f"{event}s per epoch: {rate:g} does not fall on whole weight updates "
        f"({updates_per_epoch} per epoch); the nearest that does is {float(reached):g}, "
        "which is used instead."
    )


def closest_divisor(number: int, target: float) -> int:
    """Return the divisor of `number` nearest to `target`, the smaller one of a tie.

    >>> closest_divisor(781, 10)
    11
    >>> closest_divisor(100, 10)
    10
    """
    divisors = set()
    for candidate in range(1, math.isqrt(number) + 1):
        if number % candidate == 0:
            divisors |= {candidate, number // candidate}
    return min(sorted(divisors), key=lambda divisor: abs(divisor - target))
