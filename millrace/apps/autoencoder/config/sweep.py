"""What ``millrace autoencoder sweep`` can be told. Imports nothing heavy."""

import functools
import re
import struct
from dataclasses import dataclass, field
from typing import ClassVar

from millrace.apps.autoencoder.config import LARGEST_EXPONENT, TrainingOptions
from millrace.apps.autoencoder.config.training import numbers

_DEFAULT = "12.5,13,13.5,14,14.5,15,15.5,16,16.5,17,17.5,18,18.5,19,19.5,20"
_RANGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*\.{2,3}\s*(\d+(?:\.\d+)?)\s*")
"""Two numbers with two dots between, or three; neither begins or ends with a dot."""
_MOST_MODELS = 1000
"""A range is never meant to have more."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig(TrainingOptions):
    """Train one recommender for each of several learning rates, all together."""

    named_without: ClassVar = ("base_learning_rate", "learning_rate")
    """What a named configuration of ``autoencoder train`` says and a sweep goes through."""

    base_learning_rates: str = _DEFAULT
    """Exponents of the learning rates, without their signs: 16,17,18 or 16..20 stands for
    2^-16 and so on, times batch_size. A range is in whole steps, or has num_ipus values."""
    num_ipus: int | None = field(default=None, metadata={"aliases": ("--num-trials",)})
    """Learning rates, for each of which the reference has a device; there must be as
    many."""
    num_devices: int | None = None
    """Devices that the models are spread over (default: all there are; on CPU one)."""
    steps_per_log: int = field(default=40, metadata={"may_change": True})
    """Steps between two reports."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_ipus", "num_devices", "steps_per_log"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        count = len(self.exponents)
        if self.num_ipus is not None and count != self.num_ipus:
            raise ValueError(
                f"base_learning_rates has {count} values, but num_ipus is {self.num_ipus}: "
                "there must be one for each."
            )
        if self.num_devices is not None and self.num_devices > count:
            raise ValueError(
                f"num_devices is {self.num_devices}, more than the {count} learning rates."
            )

    @functools.cached_property
    def exponents(self) -> list[float]:
        """Of the learning rates, signs and all."""
        text = self.base_learning_rates
        found = self._spread(text) if ".." in text else numbers("base_learning_rates", text)
        if not found or not all(0 < value <= LARGEST_EXPONENT for value in found):
            raise ValueError(
                "base_learning_rates are given without their signs, 16 for 2^-16, above 0 "
                f"and at most {LARGEST_EXPONENT}; got {text!r}."
            )
        if len({_in_32_bits(2.0**-value) for value in found}) < len(found):
            raise ValueError(
                f"base_learning_rates has a rate more than once, in 32 bits: {text!r}."
            )
        return [-value for value in found]

    def _spread(self, text: str) -> list[float]:
        if (ends := _RANGE.fullmatch(text)) is None:
            raise ValueError(f"base_learning_rates must be like 16..20, got {text!r}.")
        low, high = map(float, ends.groups())
        count = self.num_ipus or abs(high - low) + 1
        if count > _MOST_MODELS:
            raise ValueError(
                f"base_learning_rates {text} stands for {count:,.10g} models, more than "
                f"{_MOST_MODELS:,}: choose a smaller range."
            )
        if count % 1:
            raise ValueError(
                f"base_learning_rates {text} is not in whole steps: say how many "
                "values there should be with num_ipus."
            )
        count = int(count)
        steps = max(1, count - 1)
        return [low + (high - low) * place / steps for place in range(count)]

    @property
    def first_learning_rates(self) -> list[float]:
        """The learning rates that the models start with."""
        return [2.0**exponent * self.resolved_batch_size for exponent in self.exponents]


def _in_32_bits(value: float) -> bytes:
    """Return a number as models are trained with it."""
    return struct.pack("f", value)
