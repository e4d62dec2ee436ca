"""What ``millrace schedule`` can be told. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from millrace.config import ConfigurationError
from millrace.drawing.timelines import check_picture_path
from millrace.schedule.costs import Costs, Link, ring_all_reduce_seconds
from millrace.schedule.stages import Stages, place_stages
from millrace.schedule.table import ScheduleName, check_count

_NEEDS = (  # an option, and those of which it needs one
    ("micro_batch_size", ["stage_times"]),
    ("devices", ["micro_batch_size"]),
    ("parameter_bytes", ["devices"]),
    ("parameter_bytes", ["link_gbytes_per_second"]),
    ("link_gbytes_per_second", ["stage_times"]),
    ("link_gbytes_per_second", ["activation_bytes", "parameter_bytes"]),
    ("link_latency_microseconds", ["stage_times"]),
    ("activation_bytes", ["link_gbytes_per_second", "recomputation"]),
    ("input_bytes", ["recomputation"]),
)
_MOST_STAGES = 512
_MOST_PASSES = 2**19  # as many as 512 stages have by default
"""Forward passes of all stages, which take some seconds to arrange."""
_NOT_NEGATIVE = (
    "stage_times",
    "backward_ratio",
    "update_times",
    "activation_bytes",
    "input_bytes",
    "stored_bytes",
    "link_latency_microseconds",
    "parameter_bytes",
)
_TRAINING_ONLY = ("recomputation", "update_times", "stored_bytes", "parameter_bytes")


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """What stages and links cost; a list has a value for each stage, or one for all."""

    stage_times: list[float] = field(default_factory=list)
    """Milliseconds of a forward pass (default: 1 for all, and times are shown in forward
    passes)."""
    backward_ratio: float = 2.0
    """How much longer a backward pass takes than a forward pass."""
    recomputation: bool = False
    """Keep only what enters a stage, and compute the forward pass again before the
    backward pass."""
    update_times: list[float] = field(default_factory=list)
    """Milliseconds of the weight update (default: 0)."""
    activation_bytes: list[float] = field(default_factory=list)
    """Bytes of a micro-batch that leave a stage for the next (default: 0)."""
    input_bytes: float = 0.0
    """Bytes of a micro-batch that enter the first stage."""
    stored_bytes: list[float] = field(default_factory=list)
    """Bytes of a micro-batch that a stage keeps for its backward pass (default: 0)."""
    link_gbytes_per_second: float | None = None
    """Speed of a link between two devices, in 10^9 bytes (default: results arrive at
    once)."""
    link_latency_microseconds: float = 0.0
    """Time before the first byte arrives."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The machine for which samples per second are predicted."""

    micro_batch_size: int | None = None
    """Samples in a micro-batch."""
    devices: int | None = None
    """Devices in all: as many replicas of the pipeline as fit (default: one)."""
    parameter_bytes: list[float] = field(default_factory=list)
    """Bytes of a stage's gradients, summed over replicas around a ring of links at each
    weight update (default: 0)."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(CostOptions, MachineOptions):
    """Show what the devices of a pipeline do when, how long it takes and what it holds."""

    schedule: ScheduleName = "grouped"
    """In which order the stages work."""
    stages: list[int] = field(default_factory=lambda: [4])
    """How many stages there are, one behind another; or how many at each position, side
    by side: 1 2 1."""
    gradient_accumulation_count: int | None = field(
        default=None, metadata={"aliases": ("--gradient-accumulation",)}
    )
    """Micro-batches in a weight update, or in a pass of inference (default: 2 for each
    stage in a row)."""
    device_mapping: list[int | list[int]] | None = None
    """The device of each stage: 0 1 1 0, or 0 [1,2] 0 with stages side by side (default:
    one each)."""
    inference: bool = False
    """Only forward passes."""
    execution: Literal["ticks", "free"] = "ticks"
    """ticks: at each tick devices wait for the slowest and then exchange results, as in
    one program; free: each begins as soon as its inputs have arrived."""
    out: Path | None = None
    """Draw a picture into this file: .svg, .png or .html."""

    def __post_init__(self) -> None:
        self._check_size()
        check_count(
            self.schedule,
            self.layout.num_positions,
            self.num_micro_batches,
            training=not self.inference,
        )
        self._check_numbers()
        self._check_needs()
        self._check_devices()
        _ = self.costs, self.link  # each raises on what does not fit
        if self.out is not None:
            check_picture_path(self.out)

    @property
    def layout(self) -> Stages:
        """Where the stages stand."""
        single = len(self.stages) == 1 and self.stages[0] > 0
        shape = [1] * self.stages[0] if single else self.stages
        return place_stages(shape, self.device_mapping)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in a weight update."""
        given = self.gradient_accumulation_count
        return 2 * self.layout.num_positions if given is None else given

    @property
    def num_replicas(self) -> int:
        """Copies of the pipeline on the machine."""
        return (self.devices or self.layout.num_devices) // self.layout.num_devices

    @property
    def link(self) -> Link:
        """The links between devices."""
        speed = self.link_gbytes_per_second
        return Link(
            bytes_per_second=math.inf if speed is None else speed * 1e9,
            latency_seconds=self.link_latency_microseconds / 1e6,
        )

    @property
    def costs(self) -> Costs:
        """What the stages cost, in seconds, or in forward passes without stage times."""
        unit = 1e-3 if self.stage_times else 1.0
        forward = tuple(unit * time for time in self._each("stage_times") or self._ones())
        backward = () if self.inference else tuple(self.backward_ratio * t for t in forward)
        summed = self._each("parameter_bytes")
        return Costs(
            forward=forward,
            backward=backward,
            recompute=forward if self.recomputation else None,
            all_reduce=tuple(
                ring_all_reduce_seconds(size, self.num_replicas, self.link)
                for size in summed
            ),
            update=tuple(unit * time for time in self._each("update_times")),
            input_bytes=self.input_bytes,
            output_bytes=self._each("activation_bytes"),
            stored_bytes=self._each("stored_bytes"),
        )

    def _ones(self) -> tuple[float, ...]:
        return (1.0,) * self.layout.num_stages

    def _each(self, name: str) -> tuple[float, ...]:
        """A list's value for each stage; one value stands for all."""
        values, num_stages = getattr(self, name), self.layout.num_stages
        if len(values) == 1:
            return tuple(values * num_stages)
        if len(values) not in (0, num_stages):
            raise ConfigurationError(
                f"{name} has {len(values)} values for {num_stages} stages. Give one for "
                "each, or one for all."
            )
        return tuple(values)

    def _check_size(self) -> None:
        """Refuse a timetable that would take minutes to work out and nobody could read."""
        num_stages = sum(count for count in self.stages if count > 0)
        if num_stages > _MOST_STAGES:
            raise ConfigurationError(
                f"stages may be up to {_MOST_STAGES:,}, got {num_stages:,}."
            )
        if num_stages * (self.gradient_accumulation_count or 1) > _MOST_PASSES:
            raise ConfigurationError(
                f"gradient_accumulation_count may be up to {_MOST_PASSES // num_stages:,} "
                f"with {num_stages:,} stages, got {self.gradient_accumulation_count:,}."
            )

    def _check_numbers(self) -> None:
        for name in ("micro_batch_size", "devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}.")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            values = value if isinstance(value, list) else [value]
            if not all(0 <= number < math.inf for number in values):
                raise ConfigurationError(f"{name} must be 0 or more, got {value}.")
        if not all(self.stage_times):
            raise ConfigurationError(
                f"stage_times must be more than 0, got {self.stage_times}."
            )

    def _check_needs(self) -> None:
        """Refuse what would be ignored."""
        for name, one_of in _NEEDS:
            if getattr(self, name) and not any(getattr(self, other) for other in one_of):
                raise ConfigurationError(f"{name} needs {' or '.join(one_of)} too.")
        for name in _TRAINING_ONLY:
            if self.inference and getattr(self, name):
                raise ConfigurationError(
                    f"{name} has no meaning in inference. Leave it out."
                )

    def _check_devices(self) -> None:
        per_replica = self.layout.num_devices
        if self.devices is not None and self.devices % per_replica:
            below = self.devices // per_replica * per_replica
            nearest = f"{below} or {below + per_replica}" if below else f"{per_replica}"
            raise ConfigurationError(
                f"devices ({self.devices}) must be a multiple of the {per_replica} devices "
                f"of one pipeline. The nearest: {nearest}."
            )
