"""The stages of a pipeline: their order, and the device of each."""

from collections.abc import Sequence
from typing import NamedTuple

from millrace.config import ConfigurationError

DeviceMapping = Sequence[int | Sequence[int]]
"""A device for each position; a list of devices where stages are concurrent."""


class Stages(NamedTuple):
    """Stages, numbered in order, and the device of each."""

    groups: tuple[tuple[int, ...], ...]
    """The stages at each position; several at one position are concurrent."""
    device_of: tuple[int, ...]
    """The device of each stage."""

    @property
    def num_stages(self) -> int:
        """The number of stages; concurrent ones count individually."""
        return len(self.device_of)

    @property
    def num_positions(self) -> int:
        """The number of steps of a micro-batch from the first stage to the last."""
        return len(self.groups)

    @property
    def num_devices(self) -> int:
        """The number of devices that the stages use."""
        return max(self.device_of) + 1

    def position_of(self, stage: int) -> int:
        """Return the position of a stage."""
        return next(p for p, group in enumerate(self.groups) if stage in group)

    @property
    def positions(self) -> tuple[int, ...]:
        """The position of each stage."""
        return tuple(p for p, group in enumerate(self.groups) for _ in group)


def place_stages(shape: Sequence[int], device_mapping: DeviceMapping | None) -> Stages:
    """Number the stages and assign their devices.

    Args:
        shape: The number of stages at each position: ``[1, 2, 1]`` has two concurrent
            stages in the middle.
        device_mapping: The device of each position, a list where stages are concurrent:
            ``[0, [1, 2], 0]``. If None, each stage has its own device.
    """
    if not shape or min(shape) < 1:
        raise ConfigurationError(
            "A pipeline needs at least one stage, and at least one at each position; "
            f"got {' '.join(map(str, shape)) or 'none'}."
        )
    groups, num_stages = [], 0
    for count in shape:
        groups.append(tuple(range(num_stages, num_stages + count)))
        num_stages += count
    if device_mapping is None:
        return Stages(tuple(groups), tuple(range(num_stages)))
    devices = _flatten(shape, device_mapping)
    _check_devices(devices)
    return Stages(tuple(groups), tuple(devices))


def _flatten(shape: Sequence[int], device_mapping: DeviceMapping) -> list[int]:
    if len(device_mapping) != len(shape):
        raise ConfigurationError(
            f"device_mapping has {len(device_mapping)} entries for {len(shape)} "
            f"positions; got {list(device_mapping)}. Give one entry per position."
        )
    devices: list[int] = []
    for position, (count, entry) in enumerate(zip(shape, device_mapping, strict=True)):
        # A list for one stage, or a number for several, is probably an entry that slipped
        # by one position.
        if count == 1 and isinstance(entry, Sequence):
            raise ConfigurationError(
                f"device_mapping has {list(entry)} at position {position}, which has a "
                "single stage. Give one device there."
            )
        if count > 1 and not (isinstance(entry, Sequence) and len(entry) == count):
            raise ConfigurationError(
                f"device_mapping has {entry} at position {position}, which has {count} "
                f"concurrent stages. Give a list of {count} devices there."
            )
        devices.extend(entry if isinstance(entry, Sequence) else [entry])
    return devices


def _check_devices(devices: Sequence[int]) -> None:
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, int) or device < 0:
            raise ConfigurationError(
                f"device_mapping must have devices 0, 1, 2, …; got {device!r}."
            )
    used = set(devices)
    missing = [device for device in range(len(used)) if device not in used]
    if missing:
        raise ConfigurationError(
            f"device_mapping skips device {missing[0]}: {len(used)} devices must be "
            f"numbered 0 to {len(used) - 1}. Got {list(devices)}."
        )
