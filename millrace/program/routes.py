"""Turn a schedule table into the numbers that steer each device, tick by tick.

What a device finishes at a tick (activations of a forward pass, gradients of a backward
pass) is sent at the end of the tick into a numbered slot of the receiver. All of this is
known before the program runs, so slots are assigned here, as a compiler assigns registers:
a slot is reused as soon as its value has been read for the last time.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from millrace.schedule.stages import Stages
from millrace.schedule.table import Action, Table

IDLE = 0
Edge = tuple[int, int]
"""From one device to another, or to itself."""

_PerDevice = Int32[np.ndarray, "ticks devices"]
_PerChannel = Int32[np.ndarray, "ticks devices channels"]


class Routes(NamedTuple):
    """What each device does and receives at each tick."""

    branch: _PerDevice
    """IDLE, or 1 + stage for a forward pass; num_stages more for a backward pass, and twice
    as many for gradients of weights that are computed apart."""
    micro_batch: _PerDevice
    input_slot: _PerDevice
    """Receive slot with the input of the stage."""
    gradient_slot: _PerDevice
    """Receive slot with the gradient of the stage's output, for a backward pass."""
    residual_slot: _PerDevice
    """Where a forward pass stores the residuals that its backward pass reads."""
    deferred_slot: _PerDevice
    """Where a backward pass stores what the weight gradients need, if they are apart."""
    receive_slot: _PerChannel
    """Where to put what arrives; the extra last slot takes what is not for this device."""
    receive_add: _PerChannel
    """Whether to add it to what is there, as the second part of one value."""
    channels: tuple[tuple[Edge, ...], ...]
    """Permutations of the devices over which values travel."""
    num_receive_slots: int
    num_residual_slots: int
    num_deferred_slots: int

    @property
    def any_added(self) -> bool:
        """Whether any value is the sum of several parts."""
        return bool(self.receive_add.any())


class _Slots:
    """Numbers that are handed out and reused."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.count = 0

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self.count += 1
        return self.count - 1

    def release(self, slot: int) -> None:
        self._free.append(slot)


class _OwnSlots:
    """The slots of values that a stage stores for a later pass on the same micro-batch."""

    def __init__(self, stages: Stages) -> None:
        self._slots = [_Slots() for _ in range(stages.num_devices)]
        self._slot_of: dict[tuple[int, int], int] = {}

    @property
    def count(self) -> int:
        return max(slots.count for slots in self._slots)

    def write(self, device: int, stage: int, micro_batch: int) -> int:
        slot = self._slots[device].take()
        self._slot_of[stage, micro_batch] = slot
        return slot

    def read(self, device: int, stage: int, micro_batch: int, *, last: bool) -> int:
        slot = self._slot_of[stage, micro_batch]
        if last:
            self._slots[device].release(slot)
            del self._slot_of[stage, micro_batch]
        return slot


class _Value(NamedTuple):
    """The input of a position, or the gradient of its output, on one device."""

    kind: str
    position: int
    device: int
    micro_batch: int


class _ReceiveSlots:
    """The slots of values that devices have received and not yet read for the last time."""

    def __init__(self, table: Table) -> None:
        stages = self._stages = table.stages
        # A forward pass and the one or two passes after it read the input of a stage.
        self._activation_reads = 3 if table.splits_backward else 2
        self._slots = [_Slots() for _ in range(stages.num_devices)]
        self._slot_of: dict[_Value, int] = {}
        self._reads_left: dict[_Value, int] = {}

    @property
    def count(self) -> int:
        return max(slots.count for slots in self._slots)

    def write(self, value: _Value) -> tuple[int, bool]:
        """Return the slot of a value and whether an earlier part of it is there."""
        has_part = value in self._slot_of
        if not has_part:
            self._slot_of[value] = self._slots[value.device].take()
            self._reads_left[value] = self._count_reads(value)
        return self._slot_of[value], has_part

    def read(self, value: _Value) -> int:
        """Return the slot of a value; release it after the last read."""
        if value not in self._slot_of:
            return 0  # the first stage reads the batch, the last has no gradient
        slot = self._slot_of[value]
        self._reads_left[value] -= 1
        if not self._reads_left[value]:
            self._slots[value.device].release(slot)
            del self._slot_of[value]
        return slot

    def _count_reads(self, value: _Value) -> int:
        readers = sum(
            self._stages.device_of[stage] == value.device
            for stage in self._stages.groups[value.position]
        )
        return readers * (self._activation_reads if value.kind == "activation" else 1)


def plan_routes(table: Table) -> Routes:
    """Assign slots and channels for a schedule table."""
    stages = table.stages
    channels = _color_channels(table)
    channel_of = {edge: i for i, edges in enumerate(channels) for edge in edges}
    shape = (len(table.ticks), stages.num_devices)
    arrays = {
        name: np.zeros(shape, np.int32)
        for name in ("branch", "micro_batch", "input_slot", "gradient_slot")
    }
    arrays |= {
        name: np.full(shape, -1, np.int32) for name in ("residual_slot", "deferred_slot")
    }
    receive_slot = np.full((*shape, len(channels)), -1, np.int32)
    receive_add = np.zeros((*shape, len(channels)), np.int32)
    received, residuals, deferred = (
        _ReceiveSlots(table),
        _OwnSlots(stages),
        _OwnSlots(stages),
    )
    first_branch = {
        kind: 1 + n * stages.num_stages
        for n, kind in enumerate(("forward", "backward", "weights"))
    }
    for tick, row in enumerate(table.ticks):
        for device, (kind, stage, micro) in row.items():
            position, own = stages.position_of(stage), (device, stage, micro)
            values = {
                "branch": first_branch[kind] + stage,
                "micro_batch": micro,
                "input_slot": received.read(_Value("activation", position, device, micro)),
            }
            if kind == "forward":
                values["residual_slot"] = residuals.write(*own)
            else:
                last = kind == table.last_kind
                values["residual_slot"] = residuals.read(*own, last=last)
            if kind == "backward":
                gradient = _Value("gradient", position, device, micro)
                values["gradient_slot"] = received.read(gradient)
                if table.splits_backward:
                    values["deferred_slot"] = deferred.write(*own)
            elif kind == "weights":
                values["deferred_slot"] = deferred.read(*own, last=True)
            for name, value in values.items():
                arrays[name][tick, device] = value
        sent = [
            (channel_of[device, value.device], value)
            for device, action in row.items()
            for value in _sent_values(stages, action)
        ]
        # In the order in which the program handles the channels: the first part of a
        # value overwrites its slot, and the others are added.
        for channel, value in sorted(sent):
            slot, has_part = received.write(value)
            receive_slot[tick, value.device, channel] = slot
            receive_add[tick, value.device, channel] = has_part
    return Routes(
        **arrays,
        receive_slot=np.where(receive_slot < 0, received.count, receive_slot),
        receive_add=receive_add,
        channels=channels,
        num_receive_slots=received.count,
        num_residual_slots=residuals.count,
        num_deferred_slots=deferred.count,
    )


def _sent_values(stages: Stages, action: Action) -> Iterator[_Value]:
    """Yield what the result of an action becomes on every device that needs it."""
    if action.kind == "weights":
        return
    position = stages.position_of(action.stage)
    is_forward = action.kind == "forward"
    target = position + 1 if is_forward else position - 1
    if not 0 <= target < len(stages.groups):
        return
    kind = "activation" if is_forward else "gradient"
    for device in sorted({stages.device_of[stage] for stage in stages.groups[target]}):
        yield _Value(kind, target, device, action.micro_batch)


def _color_channels(table: Table) -> tuple[tuple[Edge, ...], ...]:
    """Group the edges into channels in which no device sends or receives twice.

    A channel is one ``ppermute`` per tick, which must be a permutation. Greedy coloring
    by distance puts the edges of a plain chain into two channels, one per direction.
    """
    stages = table.stages
    edges = {
        (device, value.device)
        for row in table.ticks
        for device, action in row.items()
        for value in _sent_values(stages, action)
    }
    channels: list[list[Edge]] = []
    for edge in sorted(edges, key=lambda e: ((e[1] - e[0]) % stages.num_devices, e)):
        for channel in channels:
            # What stays on its device needs no exchange: give it channels of its own.
            same = (edge[0] == edge[1]) == (channel[0][0] == channel[0][1])
            if same and all(edge[0] != a and edge[1] != b for a, b in channel):
                channel.append(edge)
                break
        else:
            channels.append([edge])
    return tuple(tuple(channel) for channel in channels)
