"""Times, sizes and shares as a person reads them."""

import math
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of time, and how many of it there are in a second."""

    name: str
    per_second: float

    def show(self, seconds: float) -> str:
        """Write a time in this unit."""
        return f"{seconds * self.per_second:.4g} {self.name}"


FORWARD_PASSES = Unit("forward passes", 1.0)
"""For timelines whose time has no unit but a stage's forward pass."""


def unit_for(seconds: float) -> Unit:
    """Return the unit in which `seconds` is a number from 1 to 1000."""
    if seconds >= 1:
        return Unit("s", 1.0)
    return (
        Unit("ms", 1e3) if seconds >= 1e-3 else Unit("us", 1e6)
    )  # "us": not every font has a µ


def count(number: int, thing: str) -> str:
    """Write a number of things."""
    ending = "es" if thing.endswith("ch") else "s"
    return f"{number} {thing}{ending if number != 1 else ''}"


def percent(share: float) -> str:
    """Write a share of 1 in per cent."""
    return f"{100 * share:.1f} %"


def show_bytes(num_bytes: float) -> str:
    """Write a size with the unit that suits it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:g} bytes"


def round_steps(end: float, *, at_most: int) -> list[float]:
    """Return 0 and up to `at_most` more round numbers, evenly spaced, up to `end`."""
    if end <= 0:
        return [0.0]
    power = 10 ** math.floor(math.log10(end / at_most))
    step = next(power * n for n in (1, 2, 5, 10, 20) if power * n * at_most >= end)
    return [step * n for n in range(int(end / step * (1 + 1e-9)) + 1)]
