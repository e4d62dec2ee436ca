"""The costs of pipeline stages, in time and bytes, and of the links between devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from millrace.config import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Link:
    """The speed of transfers from one device to another."""

    bytes_per_second: float = math.inf
    """Bandwidth in one direction, between any two devices."""
    latency_seconds: float = 0.0
    """Time until the first byte arrives."""

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ConfigurationError(
                "The bytes per second of a link must be positive, got "
                f"{self.bytes_per_second}."
            )
        if not 0 <= self.latency_seconds < math.inf:
            raise ConfigurationError(
                f"The latency of a link must be at least 0, got {self.latency_seconds}."
            )

    def seconds(self, num_bytes: float) -> float:
        """Return the time to transfer `num_bytes`."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of each stage per micro-batch: one value per stage, or () for 0."""

    forward: tuple[float, ...]
    """Seconds of a forward pass."""
    backward: tuple[float, ...] = ()
    """Seconds of a backward pass, without recomputation."""
    recompute: tuple[float, ...] | None = None
    """Seconds of recomputation before a backward pass; None if there is none."""
    all_reduce: tuple[float, ...] = ()
    """Seconds to sum the gradients over replicas, once per weight update."""
    update: tuple[float, ...] = ()
    """Seconds of the weight update."""
    input_bytes: float = 0
    """Bytes of a micro-batch at the input of the first stages."""
    output_bytes: tuple[float, ...] = ()
    """Bytes sent to the next stages; their gradients, sent back, have the same size."""
    stored_bytes: tuple[float, ...] = ()
    """Bytes kept from the forward to the backward pass, unless recomputed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value or 0,)
            if isinstance(value, tuple) and len(value) not in (0, len(self.forward)):
                raise ConfigurationError(
                    f"{field.name} has {len(value)} values for {len(self.forward)} "
                    "stages. Give one per stage."
                )
            if not all(0 <= cost < math.inf for cost in values):
                raise ConfigurationError(
                    f"{field.name} must be at least 0, got {list(values)}."
                )

    def get(self, name: str, stage: int) -> float:
        """Return a cost of one stage by field name; 0 if none was given."""
        values: Sequence[float] = getattr(self, name) or ()
        return values[stage] if values else 0.0


def ring_all_reduce_seconds(num_bytes: float, num_replicas: int, link: Link) -> float:
    """Return the time of an all-reduce around a ring.

    Each replica passes on 1/n of the bytes 2 (n - 1) times.
    """
    num_steps = 2 * (num_replicas - 1)
    return num_steps * link.seconds(num_bytes / num_replicas) if num_steps else 0.0
