"""When the host steps in: logs, validations and checkpoints, in whole updates.

Events are asked for per epoch, but can only happen between two weight updates, and the
device program is one length. So each period is moved to the nearest that divides the
run evenly, with a warning that says what became of the request.
"""

import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import NamedTuple

from millrace.config import ConfigurationError

_MOST_UPDATES = 2**31 - 1


class EventSchedule(NamedTuple):
    """A run in whole updates."""

    updates_per_epoch: int
    total_updates: int
    updates_per_execution: int
    """Updates the device makes without the host: every period is a multiple of it."""
    periods: dict[str, int]
    """Updates between two events of a kind; 0 where there are none before the end."""
    warnings: list[str]
    first: Mapping[str, int] = {}
    """The update after which a kind has its first event, where that is not a period."""

    def due(self, event: str, update: int) -> bool:
        """Tell whether an event falls right after `update` updates; the end counts."""
        period, first = self.periods.get(event, 0), self.first.get(event, 0)
        if update == self.total_updates:
            return True
        return period > 0 and update >= first and (update - first) % period == 0


def countable(total_updates: int) -> int:
    """Return the updates of a run, if the program can count that far."""
    if total_updates > _MOST_UPDATES:
        raise ConfigurationError(
            f"The run would have {total_updates:,} updates, and at most "
            f"{_MOST_UPDATES:,} can be counted. Ask for fewer epochs."
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
    """Work out when events happen.

    Args:
        updates_per_epoch: Whole weight updates in one pass over the data.
        num_epochs: Passes.
        events_per_epoch: For each kind ("log", "checkpoint", "validate"), how often per
            epoch: 2 is twice, 0.5 every other epoch, 0 only at the end of the run.
        updates_per_execution: A length to use instead of the longest that fits.
        first_epochs: For some kinds, the epoch after which the first event comes; the
            others follow it at their rate.
        uneven: Kinds whose period need not divide the run: it is rounded down to whole
            updates, and what is left at the end is an event of its own.
    """
    if updates_per_epoch < 1:
        raise ConfigurationError(
            f"updates_per_epoch must be at least 1, got {updates_per_epoch}."
        )
    if num_epochs < 1:
        raise ConfigurationError(f"num_epochs must be at least 1, got {num_epochs}.")
    periods, warnings = {}, []
    first_epochs = {event: n for event, n in (first_epochs or {}).items() if n}
    for event, rate in events_per_epoch.items():
        after = first_epochs.get(event, 0.0)
        if after >= num_epochs:
            raise ConfigurationError(
                f"The first {event} cannot come after {after:g} epochs: the run has "
                f"{num_epochs}."
            )
        epochs = max(1, int(num_epochs - after))
        if event in uneven and rate > 0:
            periods[event] = max(1, int(updates_per_epoch / rate))
            continue
        period, warning = _period(event, rate, updates_per_epoch, epochs)
        periods[event] = period
        if warning:
            warnings.append(warning)
    total = countable(updates_per_epoch * num_epochs)
    execution = math.gcd(*periods.values()) if periods else 0
    if execution:
        # With a first event of its own, or uneven, a period need not divide the run.
        execution = math.gcd(execution, total)
    else:
        execution = total
        warnings.append(
            f"No event is asked for before the end: all {total} updates run on the "
            "device without returning to the host."
        )
    if updates_per_execution is not None:
        if execution % updates_per_execution:
            raise ConfigurationError(
                f"updates_per_execution ({updates_per_execution}) must divide the "
                f"{execution} updates between two events of this run. The nearest that "
                f"does is {closest_divisor(execution, updates_per_execution)}."
            )
        execution = updates_per_execution
    first = {}
    for event, epochs in first_epochs.items():
        first[event] = max(1, round(epochs * updates_per_epoch / execution)) * execution
        if first[event] != epochs * updates_per_epoch:
            warnings.append(
                f"The first {event} comes after {first[event] / updates_per_epoch:g} "
                f"epochs instead of {epochs:g}, between two executions."
            )
    return EventSchedule(updates_per_epoch, total, execution, periods, warnings, first)


def _period(
    event: str, rate: float, updates_per_epoch: int, num_epochs: int
) -> tuple[int, str | None]:
    """Return the updates between two events and a warning if the rate had to move."""
    if not (math.isfinite(rate) and rate >= 0):
        raise ConfigurationError(f"{event}s per epoch must be 0 or more, got {rate}.")
    if rate == 0:
        return 0, None
    # 0.333... is meant as a third; floats carry it to 16 digits.
    wanted = Fraction(rate).limit_denominator(1_000_000)
    span = updates_per_epoch
    if wanted < 1:
        # Below one in a million epochs `wanted` is 0.
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
    """Return the divisor of `number` nearest to `target`; of two, the smaller.

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
