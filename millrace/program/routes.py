"""From a timetable to the numbers that steer each device, tick by tick.

What a device finishes at a tick (activations of a forward, gradients of a backward) is
sent at the end of the tick into a numbered slot of the receiver. All of that is known
before the program runs, so slots are shared out here, as registers are by a compiler.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from millrace.schedule.orders import Action
from millrace.schedule.stages import Stages
from millrace.schedule.table import Table

IDLE = 0
Edge = tuple[int, int]
"""From one device to another, or to itself."""


class Routes(NamedTuple):
    """What each device does and receives: arrays (ticks, devices) and more."""

    branch: np.ndarray
    """IDLE, 1 + stage for its forward, 1 + stages + stage for its backward."""
    micro_batch: np.ndarray
    input_slot: np.ndarray
    """Where the stage's input lies."""
    gradient_slot: np.ndarray
    """Where the gradient of the stage's output lies, for a backward."""
    residual_slot: np.ndarray
    """Where a forward leaves what its backward needs; the last slot holds nothing."""
    mail_slot: np.ndarray
    """(ticks, devices, channels): where to put what comes; the last slot is for nothing."""
    mail_add: np.ndarray
    """Whether to add it to what is there: the second part of one value."""
    channels: tuple[tuple[Edge, ...], ...]
    """Permutations of the devices, over which values travel."""
    num_mail_slots: int
    num_residual_slots: int

    @property
    def any_added(self) -> bool:
        """Whether any value is put together from parts."""
        return bool(self.mail_add.any())


class _Slots:
    """Numbers that are handed out and taken back."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.count = 0

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self.count += 1
        return self.count - 1

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


class _Value(NamedTuple):
    """Activations entering a position, or gradients of what leaves it, on a device."""

    kind: str
    position: int
    device: int
    micro_batch: int


def plan_routes(table: Table) -> Routes:
    """Work out slots and channels for a timetable."""
    stages = table.stages
    channels = _channels(table)
    shape = (len(table.ticks), stages.num_devices)
    arrays = {
        name: np.zeros(shape, np.int32)
        for name in ("branch", "micro_batch", "input_slot", "gradient_slot")
    }
    residual_slot = np.full(shape, -1, np.int32)
    mail_slot = np.full((*shape, len(channels)), -1, np.int32)
    mail_add = np.zeros((*shape, len(channels)), np.int32)
    channel_of = {edge: i for i, edges in enumerate(channels) for edge in edges}
    mail = [_Slots() for _ in range(stages.num_devices)]
    residuals = [_Slots() for _ in range(stages.num_devices)]
    where: dict[_Value, int] = {}
    kept: dict[tuple[int, int], int] = {}
    uses = _count_uses(stages)

    def read(value: _Value) -> int:
        """Use a value; its slot is free after the last use."""
        if value not in where:
            return 0  # the first stage reads the batch, the last has no gradient
        slot = where[value]
        left[value] = left.get(value, uses(value)) - 1
        if not left[value]:
            mail[value.device].give_back(slot)
            del where[value]
        return slot

    left: dict[_Value, int] = {}
    for tick, row in enumerate(table.ticks):
        for device, (kind, stage, micro) in row.items():
            position = stages.position_of(stage)
            forward = kind == "forward"
            first = 1 if forward else 1 + stages.num_stages
            arrays["branch"][tick, device] = first + stage
            arrays["micro_batch"][tick, device] = micro
            given = _Value("activation", position, device, micro)
            arrays["input_slot"][tick, device] = read(given)
            if forward:
                kept[stage, micro] = residuals[device].take()
                residual_slot[tick, device] = kept[stage, micro]
            else:
                wanted = _Value("gradient", position, device, micro)
                arrays["gradient_slot"][tick, device] = read(wanted)
                residual_slot[tick, device] = kept[stage, micro]
                residuals[device].give_back(kept.pop((stage, micro)))
        sent = [
            (channel_of[device, value.device], value)
            for device, action in row.items()
            for value in _sent(stages, action)
        ]
        # In the order the channels are emptied: the first part of a value replaces
        # what was in its slot, the others are added.
        for channel, value in sorted(sent):
            if value in where:
                mail_add[tick, value.device, channel] = 1
            else:
                where[value] = mail[value.device].take()
            mail_slot[tick, value.device, channel] = where[value]
    num_mail = max(slots.count for slots in mail)
    num_residuals = max(slots.count for slots in residuals)
    return Routes(
        **arrays,
        residual_slot=residual_slot,
        mail_slot=np.where(mail_slot < 0, num_mail, mail_slot),
        mail_add=mail_add,
        channels=channels,
        num_mail_slots=num_mail,
        num_residual_slots=num_residuals,
    )


def _sent(stages: Stages, action: Action) -> Iterator[_Value]:
    """What an action's result becomes, on every device that needs it."""
    position = stages.position_of(action.stage)
    forward = action.kind == "forward"
    to = position + 1 if forward else position - 1
    if not 0 <= to < len(stages.groups):
        return
    kind = "activation" if forward else "gradient"
    for device in sorted({stages.device_of[stage] for stage in stages.groups[to]}):
        yield _Value(kind, to, device, action.micro_batch)


def _count_uses(stages: Stages):
    """Tell how often a value is read: activations by forward and backward."""

    def uses(value: _Value) -> int:
        readers = sum(
            stages.device_of[stage] == value.device
            for stage in stages.groups[value.position]
        )
        return readers * (2 if value.kind == "activation" else 1)

    return uses


def _channels(table: Table) -> tuple[tuple[Edge, ...], ...]:
    """Color the edges so that within a channel no device sends or receives twice."""
    stages = table.stages
    edges = {
        (device, value.device)
        for row in table.ticks
        for device, action in row.items()
        for value in _sent(stages, action)
    }
    channels: list[list[Edge]] = []
    for edge in sorted(edges, key=lambda e: ((e[1] - e[0]) % stages.num_devices, e)):
        for channel in channels:
            # What stays on a device needs no exchange, so it has a channel of its own.
            same = (edge[0] == edge[1]) == (channel[0][0] == channel[0][1])
            if same and all(edge[0] != a and edge[1] != b for a, b in channel):
                channel.append(edge)
                break
        else:
            channels.append([edge])
    return tuple(tuple(channel) for channel in channels)
