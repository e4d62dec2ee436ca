"""The blocks of an EfficientNet: how many, how wide, in how many groups.

Imports nothing heavy.
"""

import math
import string
from typing import NamedTuple

from millrace.apps.cnn.families import Scaled

_DROP_CONNECT = 0.2
"""How often the last block is left out; the others in proportion to their depth."""


class _Stage(NamedTuple):
    kernel: int
    strides: int
    repeats: int
    features: int


STEM, TOP = 32, 1280
_STAGES = (
    _Stage(3, 1, 1, 16),
    _Stage(3, 2, 2, 24),
    _Stage(5, 2, 2, 40),
    _Stage(3, 2, 3, 80),
    _Stage(5, 1, 3, 112),
    _Stage(5, 2, 4, 192),
    _Stage(3, 1, 1, 320),
)


class Block(NamedTuple):
    """One inverted residual block."""

    name: str
    kernel: int
    strides: int
    channels: int
    features: int
    expand_ratio: int
    group_dim: int
    drop_rate: float

    @property
    def is_residual(self) -> bool:
        """Whether what comes in is added to what comes out."""
        return self.strides == 1 and self.channels == self.features

    @property
    def wide(self) -> int:
        """Channels inside."""
        return self.channels * self.expand_ratio

    @property
    def num_groups(self) -> int:
        """Groups of its convolution; one where it is no wider than a group."""
        return max(self.wide // self.group_dim, 1)


def blocks_of(
    shape: Scaled, group_dim: int | None = None, expand_ratio: int | None = None
) -> list[Block]:
    """Return B0's blocks, made wider and more as `shape` says."""
    channels = round_channels(STEM, shape.width)
    repeats = [math.ceil(shape.depth * stage.repeats) for stage in _STAGES]
    blocks = []
    for number, (stage, count) in enumerate(zip(_STAGES, repeats, strict=True), 1):
        features = round_channels(stage.features, shape.width)
        for letter in string.ascii_lowercase[:count]:
            block = Block(
                f"block{number}{letter}",
                stage.kernel,
                stage.strides if letter == "a" else 1,
                channels,
                features,
                1 if number == 1 else expand_ratio or 6,
                group_dim or 1,
                _DROP_CONNECT * len(blocks) / sum(repeats),
            )
            blocks.append(block)
            channels = features
    return blocks


def round_channels(channels: int, width: float) -> int:
    """To a multiple of 8, and never below 90 % of what is asked for."""
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * wanted else rounded + 8
