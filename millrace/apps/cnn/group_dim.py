"""Which sizes of groups fit a network's grouped convolutions. Imports nothing heavy."""

import itertools

from millrace.apps.cnn.efficientnet_blocks import blocks_of
from millrace.apps.cnn.families import Scaled, Size
from millrace.config import ConfigurationError

RESNEXT_GROUPS = 32
_SMALL_WIDTH, _LARGE_WIDTH = 16, 64
"""ResNeXt's first stack, for small pictures and large; 64 is what group_dim is said of."""


def check_group_dim(
    size: Size, group_dim: int, expand_ratio: int | None, *, small: bool
) -> None:
    """Raise where a network's channels cannot be divided so; say which groups fit."""

    def indivisible(number: int) -> str | None:
        if isinstance(size.shape, Scaled):
            return _of_efficientnet(size.shape, number, expand_ratio)
        return _of_resnext(number, small)

    if (where := indivisible(group_dim)) is None:
        return
    lower = next((n for n in range(group_dim - 1, 0, -1) if not indivisible(n)), None)
    upper = next(n for n in itertools.count(group_dim + 1) if not indivisible(n))
    nearest = f"{upper}" if lower is None else f"{lower} or {upper}"
    raise ConfigurationError(
        f"--group-dim {group_dim} does not fit this network: {where}. The nearest that "
        f"does: {nearest}."
    )


def _of_efficientnet(shape: Scaled, group_dim: int, expand_ratio: int | None) -> str | None:
    for block in blocks_of(shape, group_dim, expand_ratio):
        if block.wide % block.num_groups:
            return f"{block.name} has {block.wide} channels, not a multiple of it"
    return None


def _of_resnext(group_dim: int, small: bool) -> str | None:
    width = _SMALL_WIDTH if small else _LARGE_WIDTH
    channels = width * RESNEXT_GROUPS * group_dim // _LARGE_WIDTH
    if channels % RESNEXT_GROUPS:
        return f"b1 would have {channels} channels in {RESNEXT_GROUPS} groups"
    return None
