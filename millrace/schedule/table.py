"""The schedule table: what each device does at each tick.

One table drives the program that runs the pipeline, the simulation of its time and
memory, and the drawings.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from millrace.config import ConfigurationError, one_of
from millrace.schedule.orders import Action, grouped, interleaved, sequential
from millrace.schedule.stages import Stages

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
    """For each tick, the action of each device that has one."""


def build_table(
    schedule: str, stages: Stages, num_micro_batches: int, *, training: bool = True
) -> Table:
    """Return the schedule table of one weight update, or of one inference pass."""
    name = schedule.lower()
    order = one_of("schedule", name, SCHEDULES)
    check_count(name, stages.num_positions, num_micro_batches, training=training)
    ticks = order(stages, num_micro_batches, training)
    return Table(name, stages, num_micro_batches, training, tuple(ticks))


def check_count(
    schedule: str, num_positions: int, num_micro_batches: int, *, training: bool
) -> None:
    """Reject a number of micro-batches that would leave the last group incomplete.

    Positions count, not stages or devices: concurrent stages process the same
    micro-batch, and stages that share a device still run one after another.
    """
    in_pass = 2 * num_positions if training else num_positions
    multiple = {"grouped": in_pass, "interleaved": num_positions, "sequential": 1}[schedule]
    if num_micro_batches > 0 and num_micro_batches % multiple == 0:
        return
    below = num_micro_batches // multiple * multiple
    nearest = f"{below} or {below + multiple}" if below > 0 else f"{multiple}"
    name = "gradient_accumulation_count" if training else "num_micro_batches"
    raise ConfigurationError(
        f"{name} ({num_micro_batches}) must be a positive multiple of {multiple} for the "
        f"{schedule} schedule with {num_positions} stages in a row. Use {nearest}."
    )


def peak_live(table: Table) -> list[int]:
    """Return the most micro-batches that each stage holds between forward and backward."""
    live = [0] * table.stages.num_stages
    peak = list(live)
    if not table.training:
        return peak
    for tick in table.ticks:
        for kind, stage, _ in tick.values():
            live[stage] += 1 if kind == "forward" else -1
            peak[stage] = max(peak[stage], live[stage])
    return peak
