"""Format numbers for people: sizes, times, shares and metrics; choose round axis ticks."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple


def format_number(value: float) -> str:
    """Format a metric with four digits, or as a whole number if that is longer."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def format_value(value: Any) -> str:
    """Format any JSON value for a table."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def format_percent(share: float) -> str:
    """Format a fraction of 1 as a percentage."""
    return f"{100 * share:.1f}%"


def format_bytes(num_bytes: float, digits: int = 1) -> str:
    """Format an amount of memory in the largest unit that fits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.{digits}f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def format_duration(seconds: float) -> str:
    """Format a time in milliseconds, seconds, minutes or hours."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{seconds / 60:.1f} minutes"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def pluralize(count: int, noun: str) -> str:
    """Return a count and its noun: ``1 stage``, ``8 micro-batches``."""
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count} {noun}{ending if count != 1 else ''}"


class TimeUnit(NamedTuple):
    """A unit of time that all times of one timeline share."""

    name: str
    per_second: float

    def format(self, seconds: float) -> str:
        """Format a time in this unit."""
        return f"{seconds * self.per_second:.4g} {self.name}"


FORWARD_PASSES = TimeUnit("forward passes", 1.0)
"""The unit of timelines whose stages have no measured times."""


def choose_time_unit(seconds: float) -> TimeUnit:
    """Return the unit in which `seconds` is a number from 1 to 1000."""
    if seconds >= 1:
        return TimeUnit("s", 1.0)
    # "us": not every font has a µ.
    return TimeUnit("ms", 1e3) if seconds >= 1e-3 else TimeUnit("us", 1e6)


def linear_ticks(low: float, high: float, at_most: int = 5) -> list[float]:
    """Return up to `at_most` evenly spaced round numbers between `low` and `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, at_most - 1)
    size = 10.0 ** math.floor(math.log10(rough))
    # The 1e-9 forgive rounding: 0.3 / 0.1 is slightly less than 3.
    step = next(size * f for f in (1, 2, 2.5, 5, 10) if size * f >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten between two positive numbers, or 1, 2 and 5 times those."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, -(-(last - first) // 5))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [f * 10.0**power for power in range(first, last + 1, step) for f in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def format_tick(value: float) -> str:
    """Format a tick label: 12k, 0.05, 1e-06."""
    size = abs(value)
    if size >= 1e15 or (0 < size < 1e-3):
        return f"{value:.3g}"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= unit:
            return f"{value / unit:.6g}{letter}"
    return f"{value / 1e3:.6g}k" if size >= 1e4 else f"{value:.6g}"


def format_ticks(values: Sequence[float]) -> list[str]:
    """Format the labels of an axis: thousands as 5k if another one is 10k."""
    in_thousands = any(1e4 <= abs(value) < 1e6 for value in values)
    return [
        f"{value / 1e3:.6g}k" if in_thousands and 1e3 <= abs(value) < 1e4 else text
        for value, text in zip(values, map(format_tick, values), strict=True)
    ]
