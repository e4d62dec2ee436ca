"""Simulate a schedule table: how long it takes and how much memory it holds."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from millrace.config import ConfigurationError
from millrace.schedule.stages import Stages
from millrace.schedule.table import Action, Table
from millrace.schedule.timeline import Span


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
    weight_gradient: tuple[float, ...] | None = None
    """Seconds of the backward pass that compute gradients of weights, where the schedule
    separates them; None for half of it."""
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
        for stage in range(len(self.forward)):
            of_input, of_weights = self.get_split_backward(stage)
            if of_input < 0:
                raise ConfigurationError(
                    f"weight_gradient ({of_weights:g}) is a part of backward "
                    f"({of_input + of_weights:g}) and cannot take longer."
                )

    def get_split_backward(self, stage: int) -> tuple[float, float]:
        """Return the seconds of the gradients of a stage's input and of its weights."""
        whole = self.get("backward", stage)
        weights = whole / 2
        if self.weight_gradient is not None:
            weights = self.get("weight_gradient", stage)
        return whole - weights, weights

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


Execution = Literal["ticks", "free"]


class Simulation(NamedTuple):
    """The predicted time and memory of a weight update, or of an inference pass."""

    timeline: list[Span]
    seconds: float
    busy_seconds: list[float]
    """The busy time of each device, without waiting and sending."""
    peak_bytes: list[float]
    """The most bytes that each device holds for backward passes."""

    @property
    def idle_seconds(self) -> list[float]:
        """The time without work of each device."""
        return [max(0.0, self.seconds - busy) for busy in self.busy_seconds]

    @property
    def bubble_fraction(self) -> float:
        """The share of the time of all devices without work."""
        if not self.seconds:
            return 0.0
        return sum(self.idle_seconds) / (self.seconds * len(self.busy_seconds))


def simulate(
    table: Table, costs: Costs, link: Link | None = None, *, execution: Execution = "ticks"
) -> Simulation:
    """Predict how devices work through `table`.

    Args:
        table: What each device does, in order.
        costs: The costs of each stage.
        link: The links between devices; if None, results arrive instantly.
        execution: "ticks" if all devices wait for the slowest at each tick and then
            exchange their results, as one program with collectives does; "free" if each
            starts as soon as its inputs have arrived, and sends while it works.
    """
    if len(costs.forward) != table.stages.num_stages:
        raise ConfigurationError(
            f"There are costs for {len(costs.forward)} stages; "
            f"the pipeline has {table.stages.num_stages}."
        )
    traffic = _Traffic(table, costs)
    run = _run_in_ticks if execution == "ticks" else _run_freely
    spans = list(run(table, traffic, link or Link()))
    if table.training:
        spans += _run_updates(spans, table.stages, costs, execution)
    busy = [0.0] * table.stages.num_devices
    for span in spans:
        busy[span.device] += span.end - span.start
    seconds = max(span.end for span in spans)
    return Simulation(spans, seconds, busy, peak_bytes(table, costs))


class _Traffic:
    """The duration of actions, what they need, and what they send to which devices."""

    def __init__(self, table: Table, costs: Costs) -> None:
        self._stages, self._training, self._costs = table.stages, table.training, costs
        self._splits_backward = table.splits_backward
        self._positions = table.stages.positions
        # An empty group before the first position and one after the last.
        self._groups = ((), *table.stages.groups, ())

    def seconds(self, action: Action) -> float:
        if action.kind == "forward":
            return self._costs.get("forward", action.stage)
        of_input, of_weights = self._costs.get_split_backward(action.stage)
        if action.kind == "weights":
            return of_weights
        own = of_input if self._splits_backward else of_input + of_weights
        return self._costs.get("recompute", action.stage) + own

    def needs(self, action: Action) -> list[Action]:
        before, own, after = self._neighbors(action.stage)
        if action.kind == "weights":
            return [action._replace(kind="backward")]
        if action.kind == "forward":
            return [Action("forward", stage, action.micro_batch) for stage in before]
        if after:
            return [Action("backward", stage, action.micro_batch) for stage in after]
        # The loss needs the outputs of all stages at the last position.
        return [Action("forward", stage, action.micro_batch) for stage in own]

    def sends(self, action: Action) -> dict[int, float]:
        """Return the bytes for each device, including the device itself."""
        before, own, after = self._neighbors(action.stage)
        device_bytes: dict[int, float] = defaultdict(float)
        if action.kind == "weights":
            return device_bytes
        if action.kind == "backward":
            for stage in before:  # each gets the gradient of its own output
                output = self._costs.get("output_bytes", stage)
                device_bytes[self._stages.device_of[stage]] += output
            return device_bytes
        output = self._costs.get("output_bytes", action.stage)
        for stage in after or (own if self._training else ()):
            device_bytes[self._stages.device_of[stage]] = output  # once to each device
        return device_bytes

    def _neighbors(self, stage: int) -> tuple[tuple[int, ...], ...]:
        position = self._positions[stage]
        return self._groups[position : position + 3]


def _run_in_ticks(table: Table, traffic: _Traffic, link: Link) -> Iterator[Span]:
    now = 0.0
    for tick in table.ticks:
        end, exchange = now, 0.0
        for device, action in tick.items():
            span = Span(device, now, now + traffic.seconds(action), *action)
            end = max(end, span.end)
            yield span
            for other, num_bytes in traffic.sends(action).items():
                if other != device:
                    exchange = max(exchange, link.seconds(num_bytes))
        now = end + exchange


def _run_freely(table: Table, traffic: _Traffic, link: Link) -> Iterator[Span]:
    device_free = [0.0] * table.stages.num_devices
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    arrivals: dict[tuple[Action, int], float] = {}
    # In the table, every action comes after those it needs, so one pass gives the times.
    # Results queue on a link in the order in which they were sent.
    for tick in table.ticks:
        for device, action in tick.items():
            inputs = [arrivals[needed, device] for needed in traffic.needs(action)]
            start = max([device_free[device], *inputs])
            end = device_free[device] = start + traffic.seconds(action)
            yield Span(device, start, end, *action)
            arrivals[action, device] = end
            for other, num_bytes in traffic.sends(action).items():
                if other != device:
                    sent = max(end, link_free[device, other])
                    arrivals[action, other] = sent + link.seconds(num_bytes)
                    link_free[device, other] = sent + num_bytes / link.bytes_per_second


def _run_updates(
    spans: Sequence[Span], stages: Stages, costs: Costs, execution: Execution
) -> Iterator[Span]:
    """Yield the all-reduce and update of each stage, one after another per device."""
    ends = [0.0] * stages.num_devices
    for span in spans:
        ends[span.device] = max(ends[span.device], span.end)
    if execution == "ticks":
        ends = [max(ends)] * stages.num_devices
    for kind in ("all_reduce", "update"):
        for stage, device in enumerate(stages.device_of):
            seconds = costs.get(kind, stage)
            if seconds:
                start = ends[device]
                ends[device] += seconds
                yield Span(device, start, ends[device], kind, stage)


def peak_bytes(table: Table, costs: Costs) -> list[float]:
    """Return the most bytes that each device holds for backward passes.

    A stage with recomputation holds only its inputs, and during its backward pass also
    what it recomputes. From there to the gradients of its weights, where those are apart,
    it holds what these need: the results of the forward pass, and a gradient of each.
    """
    stages = range(table.stages.num_stages)
    held = [_held_bytes(table.stages, costs, stage) for stage in stages]
    stored = [costs.get("stored_bytes", stage) for stage in stages]
    again = stored if costs.recompute is not None else [0.0] * len(stored)
    deferred = [a + b for a, b in zip(stored, again, strict=True)]
    now = [0.0] * table.stages.num_devices
    peak = list(now)
    if not table.training:
        return peak
    for tick in table.ticks:
        for device, (kind, stage, _) in tick.items():
            now[device] += held[stage] if kind == "forward" else 0
            starts_deferral = table.splits_backward and kind == "backward"
            now[device] += deferred[stage] if starts_deferral else 0
            working = again[stage] if kind == "backward" and not starts_deferral else 0
            peak[device] = max(peak[device], now[device] + working)
            now[device] -= deferred[stage] if kind == "weights" else 0
            now[device] -= held[stage] if kind == table.last_kind else 0
    return peak


def _held_bytes(stages: Stages, costs: Costs, stage: int) -> float:
    if costs.recompute is None:
        return costs.get("stored_bytes", stage)
    position = stages.position_of(stage)
    if position == 0:
        return costs.input_bytes
    return sum(costs.get("output_bytes", before) for before in stages.groups[position - 1])
