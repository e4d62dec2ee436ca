"""The schedule table: what each device does at each tick.

One table drives the program that runs the pipeline, the simulation of its time and
memory, and the drawings.
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from millrace.config import ConfigurationError, one_of
from millrace.schedule.stages import Stages

Kind = Literal["forward", "backward", "weights"]
"""What a stage does with a micro-batch. Where a schedule has "weights", these are the
gradients of its weights, and "backward" computes only that of its input."""
Tick = dict[int, "Action"]
"""The action of each device that has one."""


class Action(NamedTuple):
    """One pass of one stage for one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int


def sequential(stages: Stages, num_micro_batches: int, training: bool) -> list[Tick]:
    """Send one micro-batch after another through all stages and back."""
    path: list[tuple[Kind, tuple[int, ...]]] = []
    for group in stages.groups:
        path.append(("forward", group))
    for group in reversed(stages.groups) if training else ():
        path.append(("backward", group))
    ticks = []
    for micro_batch in range(num_micro_batches):
        for kind, group in path:
            waiting = [Action(kind, stage, micro_batch) for stage in group]
            while waiting:  # concurrent stages on one device take turns
                tick: Tick = {}
                for action in waiting:
                    tick.setdefault(stages.device_of[action.stage], action)
                ticks.append(tick)
                waiting = [a for a in waiting if a not in tick.values()]
    return ticks


def grouped(stages: Stages, num_micro_batches: int, training: bool) -> list[Tick]:
    """Alternate ticks of only forward passes with ticks of only backward passes."""
    # Between the forward and the backward pass of a stage lie 2 * distance pairs of ticks,
    # and each pair brings one new micro-batch.
    limits = [2 * distance + 1 for distance in _distances(stages)]
    progress = _Progress(stages, num_micro_batches, training, limits)
    ticks: list[Tick] = []
    kind: Kind = "backward"
    while not progress.finished:
        kind = "forward" if kind == "backward" else "backward"
        if not progress.is_ready(kind):  # only while the pipeline fills or drains
            kind = "forward" if kind == "backward" else "backward"
        ticks.append(progress.take((kind,)))
    return ticks


def interleaved(stages: Stages, num_micro_batches: int, training: bool) -> list[Tick]:
    """Let every device go backward as soon as it can, and forward otherwise (1F1B)."""
    limits = [distance + 1 for distance in _distances(stages)]
    progress = _Progress(stages, num_micro_batches, training, limits)
    ticks = []
    while not progress.finished:
        ticks.append(progress.take(("backward", "forward")))
    return ticks


def zero_bubble(stages: Stages, num_micro_batches: int, training: bool) -> list[Tick]:
    """Fill idle ticks with the gradients of weights, which no other stage waits for."""
    # With fewer, equal stages are idle in the middle of an update; with this many, only
    # while the pipeline fills (for 1 to 64 stages, by test).
    limit = max(1, 4 * stages.num_positions // 3)
    kinds: tuple[Kind, ...] = ("backward", "forward", "weights")
    progress = _Progress(
        stages, num_micro_batches, training, [limit] * stages.num_stages, kinds=kinds
    )
    ticks = []
    while not progress.finished:
        ticks.append(progress.take(kinds))
    return ticks


def _distances(stages: Stages) -> list[int]:
    """Return the number of positions between each stage and the last."""
    return [stages.num_positions - 1 - position for position in stages.positions]


class _Progress:
    """The micro-batches that each stage has finished, and the ready actions per device.

    An action stays ready until it is taken, so each device keeps its ready actions in two
    heaps, and a tick looks only at stages affected by the previous tick. Some action is
    always ready: no limit applies to the oldest unfinished micro-batch.

    Args:
        stages: The pipeline.
        num_micro_batches: Micro-batches per weight update.
        training: Whether there are backward passes.
        limits: The most micro-batches that each stage may hold between its first and its
            last pass.
        kinds: The passes of training.
    """

    def __init__(
        self,
        stages: Stages,
        num_micro_batches: int,
        training: bool,
        limits: list[int],
        *,
        kinds: tuple[Kind, ...] = ("forward", "backward"),
    ) -> None:
        self._stages, self._training, self._limits = stages, training, limits
        self._positions = stages.positions
        self._num_micro_batches = num_micro_batches
        if not training:
            kinds = ("forward",)
        self._last: Kind = "weights" if "weights" in kinds else kinds[-1]
        # By kind and stage: what is finished, and what has been ready.
        self._done: dict[Kind, list[int]]
        self._done = {kind: [0] * stages.num_stages for kind in kinds}
        self._offered = {kind: [0] * stages.num_stages for kind in kinds}
        # By position: the number that all of its stages have finished.
        self._all_done: dict[Kind, list[int]]
        self._all_done = {kind: [0] * stages.num_positions for kind in kinds}
        self._ready: dict[Kind, list[list[tuple[int, int]]]]
        self._ready = {kind: [[] for _ in range(stages.num_devices)] for kind in kinds}
        self._num_ready = dict.fromkeys(kinds, 0)
        for stage in range(stages.num_stages):
            self._offer(stage)

    @property
    def finished(self) -> bool:
        return min(self._all_done[self._last]) == self._num_micro_batches

    def is_ready(self, kind: Kind) -> bool:
        return self._num_ready.get(kind, 0) > 0

    def take(self, kinds: tuple[Kind, ...]) -> Tick:
        """Let each device do the first of `kinds` that it can, and return the actions."""
        tick: Tick = {}
        for device in range(self._stages.num_devices):
            for kind in kinds:
                if self.is_ready(kind) and self._ready[kind][device]:
                    micro_batch, order = heappop(self._ready[kind][device])
                    self._num_ready[kind] -= 1
                    tick[device] = Action(kind, -order, micro_batch)
                    break
        for kind, stage, _ in tick.values():
            self._done[kind][stage] += 1
        for stage in self._affected(tick):
            self._offer(stage)
        return tick

    def _affected(self, tick: Tick) -> set[int]:
        """Return the stages that may have become ready through the actions of `tick`."""
        affected = {action.stage for action in tick.values()}
        for position in {self._positions[stage] for stage in affected}:
            group = self._stages.groups[position]
            for kind, all_done in self._all_done.items():
                done = self._done[kind]
                finished = min(done[stage] for stage in group)
                if finished != all_done[position]:
                    all_done[position] = finished
                    for near in range(max(position - 1, 0), position + 2):
                        affected.update(*self._stages.groups[near : near + 1])
        return affected

    def _offer(self, stage: int) -> None:
        """Add the actions that `stage` is ready for to the heaps of its device."""
        device = self._stages.device_of[stage]
        for kind, done in self._done.items():
            micro_batch = done[stage]
            if self._offered[kind][stage] == micro_batch and self._may(kind, stage):
                # The oldest micro-batch first; of two stages, the one nearer the end.
                heappush(self._ready[kind][device], (micro_batch, -stage))
                self._num_ready[kind] += 1
                self._offered[kind][stage] += 1

    def _may(self, kind: Kind, stage: int) -> bool:
        """Whether `stage` may process its next micro-batch."""
        micro_batch = self._done[kind][stage]
        if micro_batch == self._num_micro_batches:
            return False
        if kind == "forward":
            return self._may_go_forward(stage, micro_batch)
        if kind == "weights":
            return self._done["backward"][stage] > micro_batch
        return self._may_go_backward(stage, micro_batch)

    def _may_go_forward(self, stage: int, micro_batch: int) -> bool:
        position = self._positions[stage]
        if position and self._all_done["forward"][position - 1] <= micro_batch:
            return False
        if self._training:
            return micro_batch - self._done[self._last][stage] < self._limits[stage]
        # Without backward passes, only the next stage holds it up: one result in transit
        # and one in use keep both busy.
        following = self._all_done["forward"][position + 1 : position + 2]
        return not following or micro_batch - following[0] < 2

    def _may_go_backward(self, stage: int, micro_batch: int) -> bool:
        position = self._positions[stage]
        if position + 1 < self._stages.num_positions:
            return self._all_done["backward"][position + 1] > micro_batch
        return self._all_done["forward"][position] > micro_batch


SCHEDULES = {
    "grouped": grouped,
    "interleaved": interleaved,
    "sequential": sequential,
    "zero-bubble": zero_bubble,
}


class Table(NamedTuple):
    """What each device does at each tick of one weight update."""

    schedule: str
    stages: Stages
    num_micro_batches: int
    training: bool
    ticks: tuple[Mapping[int, Action], ...]
    """For each tick, the action of each device that has one."""

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are actions of their own."""
        return self.training and self.schedule == "zero-bubble"

    @property
    def last_kind(self) -> Kind:
        """The last action of a stage on a micro-batch, after which it holds nothing."""
        return "weights" if self.splits_backward else "backward"


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
    multiple = {"grouped": in_pass, "interleaved": num_positions}.get(schedule, 1)
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
    """Return the most micro-batches that each stage holds from first to last pass."""
    return _count_peaks(table, "forward", table.last_kind)


def peak_deferred(table: Table) -> list[int]:
    """Return the most micro-batches of each stage whose weight gradients are pending."""
    return _count_peaks(table, "backward", table.last_kind)


def _count_peaks(table: Table, first: Kind, last: Kind) -> list[int]:
    live = [0] * table.stages.num_stages
    peak = list(live)
    if not table.training or first == last:
        return peak
    for tick in table.ticks:
        for kind, stage, _ in tick.values():
            live[stage] += (kind == first) - (kind == last)
            peak[stage] = max(peak[stage], live[stage])
    return peak
