"""``millrace schedule``: show the schedule of a pipeline, its time and its memory."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from millrace.config import ConfigurationError, writing
from millrace.drawing.timelines import check_drawing_path, draw_timelines
from millrace.numbers import (
    FORWARD_PASSES,
    choose_time_unit,
    format_bytes,
    format_percent,
    pluralize,
)
from millrace.plan import PipelineSchedule
from millrace.schedule.simulate import (
    Costs,
    Link,
    Simulation,
    ring_all_reduce_seconds,
    simulate,
)
from millrace.schedule.stages import Stages, place_stages
from millrace.schedule.table import (
    Table,
    build_table,
    check_count,
    peak_deferred,
    peak_live,
)

_NEEDS = (
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
"""Options that have no effect without at least one of the options after them."""
_MOST_STAGES = 512
_MOST_PASSES = 2**19
"""The most forward passes of all stages: 512 stages have this number by default, and
simulating them takes some seconds."""
_NOT_NEGATIVE = (
    *("stage_times", "backward_ratio", "update_times", "activation_bytes", "input_bytes"),
    *("stored_bytes", "link_latency_microseconds", "parameter_bytes"),
)
_TRAINING_ONLY = (
    *("recomputation", "update_times", "stored_bytes", "parameter_bytes"),
    "weight_gradient_share",
)


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """The costs of stages and links. A list has one value per stage, or one for all."""

    stage_times: list[float] = field(default_factory=list)
    """Milliseconds of a forward pass (default: 1 for all stages, and times are shown in
    forward passes)."""
    backward_ratio: float = 2.0
    """Time of a backward pass, as a multiple of a forward pass."""
    weight_gradient_share: float | None = None
    """Share of a backward pass that computes gradients of weights, which zero-bubble
    separates (default: 0.5)."""
    recomputation: bool = False
    """Keep only the inputs of a stage and recompute the forward pass before the backward
    pass."""
    update_times: list[float] = field(default_factory=list)
    """Milliseconds of the weight update (default: 0)."""
    activation_bytes: list[float] = field(default_factory=list)
    """Bytes per micro-batch from a stage to the next (default: 0)."""
    input_bytes: float = 0.0
    """Bytes per micro-batch at the input of the first stage."""
    stored_bytes: list[float] = field(default_factory=list)
    """Bytes per micro-batch that a stage keeps for its backward pass (default: 0)."""
    link_gbytes_per_second: float | None = None
    """Bandwidth of a link between two devices, in 10^9 bytes per second (default: results
    arrive instantly)."""
    link_latency_microseconds: float = 0.0
    """Time until the first byte arrives."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The machine for which samples per second are predicted."""

    micro_batch_size: int | None = None
    """Samples per micro-batch."""
    devices: int | None = None
    """Devices for all replicas of the pipeline together (default: one replica)."""
    parameter_bytes: list[float] = field(default_factory=list)
    """Bytes of the gradients of a stage, summed over replicas around a ring at each weight
    update (default: 0)."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(CostOptions, MachineOptions):
    """Show the timeline of a pipeline, its duration and its memory."""

    schedule: PipelineSchedule = "grouped"
    """Order in which the stages run."""
    stages: list[int] = field(default_factory=lambda: [4])
    """Number of stages in a row; or, with concurrent stages, the number at each position:
    1 2 1."""
    gradient_accumulation_count: int | None = field(
        default=None, metadata={"aliases": ("--gradient-accumulation",)}
    )
    """Micro-batches per weight update, or per inference pass (default: 2 per position)."""
    device_mapping: list[int | list[int]] | None = None
    """Device of each stage: 0 1 1 0, or 0 [1,2] 0 with concurrent stages (default: one
    device per stage)."""
    inference: bool = False
    """Schedule inference, which has only forward passes."""
    execution: Literal["ticks", "free"] = "ticks"
    """ticks: at each tick devices wait for the slowest and then exchange results, as in
    one program; free: each starts as soon as its inputs have arrived."""
    out: Path | None = None
    """File for a drawing: .svg, .png or .html."""

    def __post_init__(self) -> None:
        self._check_size()
        check_count(
            self.schedule,
            self.placement.num_positions,
            self.num_micro_batches,
            training=not self.inference,
        )
        self._check_numbers()
        self._check_needs()
        self._check_devices()
        _ = self.costs, self.link  # both check their values
        if self.out is not None:
            check_drawing_path(self.out)

    @property
    def placement(self) -> Stages:
        """The stages and their devices."""
        in_a_row = len(self.stages) == 1 and self.stages[0] > 0
        shape = [1] * self.stages[0] if in_a_row else self.stages
        return place_stages(shape, self.device_mapping)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per weight update."""
        count = self.gradient_accumulation_count
        return 2 * self.placement.num_positions if count is None else count

    @property
    def num_replicas(self) -> int:
        """Copies of the pipeline on the machine."""
        per_replica = self.placement.num_devices
        return (self.devices or per_replica) // per_replica

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
        """The costs of the stages, in seconds, or in forward passes without stage times."""
        unit = 1e-3 if self.stage_times else 1.0
        times = self._per_stage("stage_times") or (1.0,) * self.placement.num_stages
        forward = tuple(unit * time for time in times)
        backward = () if self.inference else tuple(self.backward_ratio * t for t in forward)
        share = self.weight_gradient_share
        return Costs(
            forward=forward,
            backward=backward,
            weight_gradient=None if share is None else tuple(share * t for t in backward),
            recompute=forward if self.recomputation else None,
            all_reduce=tuple(
                ring_all_reduce_seconds(size, self.num_replicas, self.link)
                for size in self._per_stage("parameter_bytes")
            ),
            update=tuple(unit * time for time in self._per_stage("update_times")),
            input_bytes=self.input_bytes,
            output_bytes=self._per_stage("activation_bytes"),
            stored_bytes=self._per_stage("stored_bytes"),
        )

    def _per_stage(self, name: str) -> tuple[float, ...]:
        """Return the value of an option for each stage, repeating a single one."""
        values, num_stages = getattr(self, name), self.placement.num_stages
        if len(values) == 1:
            return tuple(values * num_stages)
        if len(values) not in (0, num_stages):
            raise ConfigurationError(
                f"{name} has {len(values)} values for {num_stages} stages. Give one per "
                "stage, or one for all."
            )
        return tuple(values)

    def _check_size(self) -> None:
        """Reject a pipeline that would take minutes to simulate and nobody could read."""
        num_stages = sum(count for count in self.stages if count > 0)
        if num_stages > _MOST_STAGES:
            raise ConfigurationError(
                f"stages must be at most {_MOST_STAGES:,}, got {num_stages:,}."
            )
        if num_stages * (self.gradient_accumulation_count or 1) > _MOST_PASSES:
            raise ConfigurationError(
                "gradient_accumulation_count must be at most "
                f"{_MOST_PASSES // num_stages:,} with {num_stages:,} stages, got "
                f"{self.gradient_accumulation_count:,}."
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
                raise ConfigurationError(f"{name} must be at least 0, got {value}.")
        if not all(self.stage_times):
            raise ConfigurationError(
                f"stage_times must be positive, got {self.stage_times}."
            )

    def _check_needs(self) -> None:
        """Reject options that would have no effect."""
        for name, needed in _NEEDS:
            if getattr(self, name) and not any(getattr(self, other) for other in needed):
                raise ConfigurationError(
                    f"{name} has no effect without {' or '.join(needed)}."
                )
        for name in _TRAINING_ONLY:
            if self.inference and getattr(self, name):
                raise ConfigurationError(f"{name} has no effect in inference. Remove it.")
        share = self.weight_gradient_share
        if share is not None and self.schedule != "zero-bubble":
            raise ConfigurationError(
                "weight_gradient_share has no effect without schedule zero-bubble."
            )
        if share is not None and not 0 <= share <= 1:
            raise ConfigurationError(
                f"weight_gradient_share must be from 0 to 1, got {share:g}."
            )

    def _check_devices(self) -> None:
        per_replica = self.placement.num_devices
        if self.devices is not None and self.devices % per_replica:
            below = self.devices // per_replica * per_replica
            nearest = f"{below} or {below + per_replica}" if below else f"{per_replica}"
            raise ConfigurationError(
                f"devices ({self.devices}) must be a multiple of the {per_replica} devices "
                f"of one pipeline. Use {nearest}."
            )


def show_schedule(config: ScheduleConfig) -> None:
    """Print the timeline of a pipeline, and draw it if there is a file for it."""
    table = build_table(
        config.schedule,
        config.placement,
        config.num_micro_batches,
        training=not config.inference,
    )
    simulation = simulate(table, config.costs, config.link, execution=config.execution)
    title, subtitle = _title(config, table), _subtitle(config)
    facts = _facts(config, table, simulation)
    if config.out is not None:
        with writing(config.out):
            draw_timelines(
                [("", simulation.timeline)],
                config.out,
                title=title,
                subtitle=f"{subtitle}; {facts['time']}",
                facts=facts,
                unit=None if config.stage_times else FORWARD_PASSES,
            )
        facts["drawing"] = str(config.out)
    # Imported here: ``--help`` does not print a timeline.
    from rich.console import Console

    from millrace.drawing.timeline_text import print_timeline

    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(title)
    console.print(subtitle)
    print_timeline(simulation.timeline, console, width=console.width)
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"{name:<{width}}  {value}")


def _title(config: ScheduleConfig, table: Table) -> str:
    stages = table.stages
    shape = ", ".join(str(len(group)) for group in stages.groups)
    concurrent = stages.num_positions < stages.num_stages
    per = "of inference" if config.inference else "per weight update"
    return (
        f"{table.schedule.capitalize()}: {pluralize(stages.num_stages, 'stage')}"
        f"{f' (concurrent: {shape})' if concurrent else ''} on "
        f"{pluralize(stages.num_devices, 'device')}, "
        f"{pluralize(table.num_micro_batches, 'micro-batch')} {per}"
    )


def _subtitle(config: ScheduleConfig) -> str:
    passes = "forward passes only"
    if not config.inference:
        passes = f"backward {config.backward_ratio:g} x forward"
    if config.recomputation:
        passes += " and recomputation"
    waiting = {
        "ticks": "at each tick, devices wait for the slowest",
        "free": "each device starts as soon as its inputs have arrived",
    }
    return f"{passes}; {waiting[config.execution]}"


def _facts(config: ScheduleConfig, table: Table, simulation: Simulation) -> dict[str, str]:
    unit = choose_time_unit(simulation.seconds) if config.stage_times else FORWARD_PASSES
    total, busiest = simulation.seconds, max(simulation.busy_seconds) * unit.per_second
    facts = {
        "time": f"{unit.format(total)}; the busiest device works {busiest:.4g}",
        "idle": f"{format_percent(simulation.bubble_fraction)} of device time",
    }
    if not config.inference:
        peaks = ", ".join(map(str, peak_live(table)))
        facts["held at most"] = f"{peaks} micro-batches, by stage"
        if table.splits_backward:
            deferred = ", ".join(map(str, peak_deferred(table)))
            facts["deferred at most"] = f"{deferred} weight gradients, by stage"
    if any(simulation.peak_bytes):
        sizes = ", ".join(map(format_bytes, simulation.peak_bytes))
        facts["activations"] = f"at most {sizes}, by device"
    if config.micro_batch_size is not None:
        facts["throughput"] = _throughput(config, simulation)
    return facts


def _throughput(config: ScheduleConfig, simulation: Simulation) -> str:
    samples = config.micro_batch_size or 1
    samples *= config.num_micro_batches * config.num_replicas
    num_devices = config.num_replicas * config.placement.num_devices
    replicas = pluralize(config.num_replicas, "replica")
    return (
        f"{samples / simulation.seconds:,.0f} samples/s with {replicas} on "
        f"{pluralize(num_devices, 'device')}"
    )
