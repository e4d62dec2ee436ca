"""What the stages of a pipeline cost: time, bytes, and the links between devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from millrace.config import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Link:
    """How fast results travel from one device to another."""

    bytes_per_second: float = math.inf
    """In one direction, between any two devices."""
    latency_seconds: float = 0.0
    """Until the first byte arrives."""

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise ConfigurationError(
                f"A link's bytes per second must be positive, got {self.bytes_per_second}."
            )
        if not 0 <= self.latency_seconds < math.inf:
            raise ConfigurationError(
                "A link's latency in seconds must be 0 or more, "
                f"got {self.latency_seconds}."
            )

    def seconds(self, num_bytes: float) -> float:
        """Return the time `num_bytes` take."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What each stage costs for one micro-batch; a value for each, or () for nothing."""

    forward: tuple[float, ...]
    """Seconds of a forward pass."""
    backward: tuple[float, ...] = ()
    """Seconds of a backward pass, without recomputation."""
    recompute: tuple[float, ...] | None = None
    """Seconds to compute again, before the backward pass, what was not kept; None if
    all is kept."""
    all_reduce: tuple[float, ...] = ()
    """Seconds to sum the gradients over replicas, once per weight update."""
    update: tuple[float, ...] = ()
    """Seconds of the weight update."""
    input_bytes: float = 0
    """Bytes of a micro-batch as the first stages take it."""
    output_bytes: tuple[float, ...] = ()
    """Bytes handed to the next stages; as many come back as gradient."""
    stored_bytes: tuple[float, ...] = ()
    """Bytes kept from the forward to the backward pass, if not recomputed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            values = value if isinstance(value, tuple) else (value or 0,)
            if isinstance(value, tuple) and len(value) not in (0, len(self.forward)):
                raise ConfigurationError(
                    f"{field.name} has {len(value)} values for {len(self.forward)} "
                    "stages. Give one for each."
                )
            if not all(0 <= cost < math.inf for cost in values):
                raise ConfigurationError(
                    f"{field.name} must be 0 or more, got {list(values)}."
                )

    def of(self, name: str, stage: int) -> float:
        """Return one stage's cost by its field's name; 0 if none were given."""
        values: Sequence[float] = getattr(self, name) or ()
        return values[stage] if values else 0.0


def ring_all_reduce_seconds(num_bytes: float, num_replicas: int, link: Link) -> float:
    """Return the time of an all-reduce around a ring.

    Each replica passes on 1/n of the bytes 2 (n - 1) times.
    """
    num_steps = 2 * (num_replicas - 1)
    return num_steps * link.seconds(num_bytes / num_replicas) if num_steps else 0.0
