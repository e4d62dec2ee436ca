"""A pipeline's timetable: what each device does at each tick.

One table drives the program that runs the pipeline, the simulation of its time and
memory, the picture and the tests.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from millrace.config import ConfigurationError, did_you_mean
from millrace.schedule.orders import Action, Kind, grouped, interleaved, sequential
from millrace.schedule.stages import DeviceMapping, Stages, place_stages

__all__ = [
    "SCHEDULES",
    "Action",
    "DeviceMapping",
    "Kind",
    "ScheduleName",
    "Stages",
    "Table",
    "build_table",
    "check_count",
    "check_schedule",
    "idle_fraction",
    "peak_live",
    "place_stages",
]

ScheduleName = Literal["grouped", "interleaved", "sequential"]

SCHEDULES = {
    "grouped": grouped,
    "interleaved": interleaved,
    "sequential": sequential,
}


class Table(NamedTuple):
    """What each device does at each tick of one weight update."""

    schedule: str
    stages: Stages
    num_micro_batches: int
    training: bool
    ticks: tuple[Mapping[int, Action], ...]
    """At each tick, the action of each device that has one."""


def build_table(
    schedule: str, stages: Stages, num_micro_batches: int, *, training: bool = True
) -> Table:
    """Lay out one weight update, or one inference pass, over the devices."""
    name = check_schedule(schedule)
    check_count(name, stages.num_positions, num_micro_batches, training=training)
    ticks = SCHEDULES[name](stages, num_micro_batches, training)
    return Table(name, stages, num_micro_batches, training, tuple(ticks))


def check_schedule(schedule: str) -> ScheduleName:
    """Return the name of a schedule as we spell it."""
    name = schedule.lower()
    for known in ("grouped", "interleaved", "sequential"):
        if name == known:
            return known
    raise ConfigurationError(
        f"schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}."
        + did_you_mean(name, SCHEDULES)
    )


def check_count(
    schedule: ScheduleName, num_positions: int, num_micro_batches: int, *, training: bool
) -> None:
    """Refuse a number of micro-batches that would leave a schedule's last group short.

    Positions count, not stages or devices: concurrent stages work on the same
    micro-batch, and stages that share a device still stand one behind another.
    """
    in_pass = 2 * num_positions if training else num_positions
    multiple = {"grouped": in_pass, "interleaved": num_positions, "sequential": 1}[schedule]
    if num_micro_batches > 0 and num_micro_batches % multiple == 0:
        return
    below = num_micro_batches // multiple * multiple
    nearest = f"{below} or {below + multiple}" if below > 0 else f"{multiple}"
    what = "gradient_accumulation_count" if training else "num_micro_batches"
    raise ConfigurationError(
        f"{what} ({num_micro_batches}) must be a positive multiple of {multiple} for the "
        f"{schedule} schedule with {num_positions} stages one behind another. "
        f"The nearest: {nearest}."
    )


def peak_live(table: Table) -> list[int]:
    """Count, for each stage, the most micro-batches held between forward and backward."""
    live = [0] * table.stages.num_stages
    peak = list(live)
    if not table.training:
        return peak
    for tick in table.ticks:
        for kind, stage, _ in tick.values():
            live[stage] += 1 if kind == "forward" else -1
            peak[stage] = max(peak[stage], live[stage])
    return peak


def idle_fraction(table: Table) -> float:
    """Return the share of device ticks without an action."""
    slots = len(table.ticks) * table.stages.num_devices
    return 1 - sum(map(len, table.ticks)) / slots
