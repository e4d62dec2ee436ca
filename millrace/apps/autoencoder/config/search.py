"""The search space of ``--search``: which settings are tried. Imports nothing heavy."""

import math
import random
from typing import Literal

from millrace.apps.autoencoder.config.training import Hyperparameters

Searched = Literal["learning_rate", "weight_decay", "dropout_rate", "input_dropout_rate"]
"""An option that a search can vary."""

SEARCHED: tuple[Searched, ...] = (
    *("learning_rate", "weight_decay"),
    *("dropout_rate", "input_dropout_rate"),
)

_FACTORS = {"learning_rate": (1 / 3, 3.0), "weight_decay": (1 / 5, 5.0)}
"""Range around the value of the first trial, uniform in the logarithm."""
_RANGES = {"dropout_rate": (0.2, 0.8), "input_dropout_rate": (0.2, 0.8)}
"""Range of values, uniform."""
_BASES = dict(zip(SEARCHED, (2, 3, 5, 7), strict=True))
_DECAYS_WITHOUT_CENTER = (1e-5, 1e-2)
"""Range of weight decays if the first trial has none."""


def draw_trials(
    first: Hyperparameters, count: int, seed: int, over: tuple[Searched, ...] = SEARCHED
) -> list[Hyperparameters]:
    """Return `count` trials; the first one is given, and the others vary around it.

    They are points of a Halton sequence, shifted by the seed: any number of them covers the
    space more evenly than independent random points.

    Args:
        first: The settings without a search.
        count: The number of trials.
        seed: Selects the points.
        over: The settings to vary.
    """
    generator = random.Random(seed)
    shifts = {name: generator.random() for name in SEARCHED}
    trials = [first]
    for number in range(1, count):
        values: dict[str, float] = {}
        for name in over:
            share = (_halton(number, _BASES[name]) + shifts[name]) % 1
            values[name] = _place(name, getattr(first, name), share)
        trials.append(first._replace(**values))
    return trials


def _halton(number: int, base: int) -> float:
    """Return the digits of a number in a base, mirrored at the point."""
    value, unit = 0.0, 1.0
    while number:
        number, digit = divmod(number, base)
        unit /= base
        value += digit * unit
    return value


def _place(name: Searched, center: float, share: float) -> float:
    """Return the value at this share of the range of a setting, to four digits."""
    if name in _RANGES:
        low, high = _RANGES[name]
        value = low + share * (high - low)
    else:
        low, high = (factor * center for factor in _FACTORS[name])
        if not center:
            low, high = _DECAYS_WITHOUT_CENTER
        value = math.exp(math.log(low) + share * math.log(high / low))
    return float(f"{value:.4g}")
