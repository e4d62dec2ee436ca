"""Names, sizes and block layouts of the models. Imports nothing heavy.

A *family* is a model that comes in sizes. The families and their sizes are those of
Graphcore's TensorFlow 1 application.
"""

import itertools
import math
import string
from typing import NamedTuple

from millrace.config import ConfigurationError, did_you_mean

FAMILIES = ("resnet", "resnext", "efficientnet")

SINGLE_MODELS = (
    "digits_cnn",
    "toy_model",
    *(f"cifar_resnet{6 * blocks + 2}" for blocks in (1, 3, 5, 7, 9)),
    *("resnet9", "resnet18_small", "resnet18", "resnet34", "resnet50"),
    *("speednet", "speednet_wide"),
)
"""Models that have only one size."""

_LARGE_IMAGES = ("imagenet", "gc-imagenet", "imagefolder")
_IMAGENET_SIZE = 224


def has_small_images(dataset: str | None) -> bool:
    """Whether images of a dataset are small and keep their size, as in CIFAR-10."""
    return dataset not in _LARGE_IMAGES


class ResNetShape(NamedTuple):
    """The blocks in each stack of a residual network, and their kind."""

    blocks: tuple[int, ...]
    bottleneck: bool
    """Whether blocks have three convolutions (1 x 1, 3 x 3, 1 x 1) or two."""


class EfficientNetShape(NamedTuple):
    """How much wider and deeper than B0 an EfficientNet is, and its image size."""

    width: float
    depth: float
    dropout: float
    image_size: int


_BASIC = {
    "10": ResNetShape((1, 1, 1, 1), False),
    "18": ResNetShape((2, 2, 2, 2), False),
    "34": ResNetShape((3, 4, 6, 3), False),
}
_BOTTLENECK = {
    "14": ResNetShape((1, 1, 1, 1), True),
    "26": ResNetShape((2, 2, 2, 2), True),
    "50": ResNetShape((3, 4, 6, 3), True),
    "101": ResNetShape((3, 4, 23, 3), True),
    "152": ResNetShape((3, 8, 36, 3), True),
}
_SMALL_BASIC = {
    str(6 * n + 2): ResNetShape((n, n, n), False) for n in (1, 2, 3, 5, 7, 9, 18)
}
_SMALL_BOTTLENECK = {
    str(9 * n + 2): ResNetShape((n, n, n), True) for n in (1, 3, 4, 5, 6, 7)
}
_EFFICIENTNETS = {
    "B0": EfficientNetShape(1.0, 1.0, 0.2, 224),
    "B1": EfficientNetShape(1.0, 1.1, 0.2, 240),
    "B2": EfficientNetShape(1.1, 1.2, 0.3, 260),
    "B3": EfficientNetShape(1.2, 1.4, 0.3, 300),
    "B4": EfficientNetShape(1.4, 1.8, 0.4, 380),
    "B5": EfficientNetShape(1.6, 2.2, 0.4, 456),
    "B6": EfficientNetShape(1.8, 2.6, 0.5, 528),
    "B7": EfficientNetShape(2.0, 3.1, 0.5, 600),
    "cifar": EfficientNetShape(0.5, 1.0, 0.0, 32),
}

_SIZES: dict[str, dict[bool, dict[str, ResNetShape | EfficientNetShape]]] = {
    # By whether images are small. Depth 56 exists in both small tables: bottleneck wins.
    "resnet": {
        False: {**_BASIC, **_BOTTLENECK},
        True: {**_SMALL_BASIC, **_SMALL_BOTTLENECK},
    },
    "resnext": {False: {**_BOTTLENECK}, True: {**_SMALL_BOTTLENECK}},
    "efficientnet": {False: {**_EFFICIENTNETS}, True: {**_EFFICIENTNETS}},
}
_DEFAULT_SIZE = {
    "resnet": {False: "18", True: "20"},
    "resnext": {False: "14", True: "11"},
    "efficientnet": {False: "B0", True: "cifar"},
}


class Size(NamedTuple):
    """A size of a family."""

    name: str
    shape: ResNetShape | EfficientNetShape

    @property
    def image_size(self) -> int:
        """The height and width of the images it was designed for, if they are large."""
        if isinstance(self.shape, EfficientNetShape):
            return self.shape.image_size
        return _IMAGENET_SIZE


def check_model_name(name: str) -> None:
    """Raise an error if there is no model of this name."""
    if name not in (*SINGLE_MODELS, *FAMILIES):
        raise ConfigurationError(
            f"--model-name: there is no model {name!r}."
            f"{did_you_mean(name, (*FAMILIES, *SINGLE_MODELS))} Available: "
            f"{', '.join(SINGLE_MODELS)}; and with --model-size: {', '.join(FAMILIES)}."
        )


def find_size(family: str, given: str | None, *, small: bool) -> Size:
    """Return a size of a family by name, such as ``4`` or ``B4``, or the default one."""
    sizes = _SIZES[family][small]
    name = given or _DEFAULT_SIZE[family][small]
    known = {size.lower(): size for size in sizes}
    found = known.get(name.lower()) or known.get(f"b{name}")
    if found is None:
        for_small = " for small images" if small and family != "efficientnet" else ""
        raise ConfigurationError(
            f"model_size: there is no {family} of size {given}{for_small}. Available: "
            f"{', '.join(sizes)}.{did_you_mean(name, sizes)}"
        )
    return Size(found, sizes[found])


# Grouped convolutions

RESNEXT_GROUPS = 32


def resnext_channels(width: int, group_dim: int) -> int:
    """Return the channels of the grouped convolutions in a stack of this base width.

    `group_dim` is the number of channels per group at the base width of 64.
    """
    return width * RESNEXT_GROUPS * group_dim // 64


def check_group_dim(
    size: Size, group_dim: int, expand_ratio: int | None, *, small: bool
) -> None:
    """Raise an error if groups of this size do not divide the channels of a model."""

    def problem(number: int) -> str | None:
        return _group_problem(size.shape, number, expand_ratio, small)

    if (found := problem(group_dim)) is None:
        return
    lower = next((n for n in range(group_dim - 1, 0, -1) if not problem(n)), None)
    upper = next(n for n in itertools.count(group_dim + 1) if not problem(n))
    nearest = f"{upper}" if lower is None else f"{lower} or {upper}"
    raise ConfigurationError(
        f"--group-dim {group_dim} does not fit this model: {found}. The nearest that "
        f"fits: {nearest}."
    )


def _group_problem(
    shape: ResNetShape | EfficientNetShape,
    group_dim: int,
    expand_ratio: int | None,
    small: bool,
) -> str | None:
    if isinstance(shape, ResNetShape):
        channels = resnext_channels(16 if small else 64, group_dim)
        if channels % RESNEXT_GROUPS:
            return f"b1 would have {channels} channels in {RESNEXT_GROUPS} groups"
        return None
    for block in efficientnet_blocks(shape, group_dim, expand_ratio):
        if (channels := block.expanded_channels) % block.num_groups:
            return f"{block.name} has {channels} channels, not a multiple of {group_dim}"
    return None


# Blocks of EfficientNet


class _Stage(NamedTuple):
    kernel: int
    strides: int
    repeats: int
    channels: int


STEM_CHANNELS, TOP_CHANNELS = 32, 1280
_B0_STAGES = (
    _Stage(3, 1, 1, 16),
    _Stage(3, 2, 2, 24),
    _Stage(5, 2, 2, 40),
    _Stage(3, 2, 3, 80),
    _Stage(5, 1, 3, 112),
    _Stage(5, 2, 4, 192),
    _Stage(3, 1, 1, 320),
)
_DROP_CONNECT = 0.2
"""Drop rate that the blocks approach with depth."""


class MBConvBlock(NamedTuple):
    """One inverted residual block (MBConv) of an EfficientNet."""

    name: str
    kernel: int
    strides: int
    in_channels: int
    out_channels: int
    expand_ratio: int
    group_dim: int
    drop_rate: float

    @property
    def is_residual(self) -> bool:
        """Whether the input is added to the output."""
        return self.strides == 1 and self.in_channels == self.out_channels

    @property
    def expanded_channels(self) -> int:
        """The channels inside the block."""
        return self.in_channels * self.expand_ratio

    @property
    def num_groups(self) -> int:
        """The groups of the convolution; 1 if it has fewer channels than `group_dim`."""
        return max(self.expanded_channels // self.group_dim, 1)


def efficientnet_blocks(
    shape: EfficientNetShape, group_dim: int | None = None, expand_ratio: int | None = None
) -> list[MBConvBlock]:
    """Return the blocks of B0, scaled in width and depth."""
    channels = round_channels(STEM_CHANNELS, shape.width)
    repeats = [math.ceil(shape.depth * stage.repeats) for stage in _B0_STAGES]
    blocks = []
    for number, (stage, count) in enumerate(zip(_B0_STAGES, repeats, strict=True), 1):
        out_channels = round_channels(stage.channels, shape.width)
        for letter in string.ascii_lowercase[:count]:
            block = MBConvBlock(
                f"block{number}{letter}",
                stage.kernel,
                stage.strides if letter == "a" else 1,
                channels,
                out_channels,
                1 if number == 1 else expand_ratio or 6,
                group_dim or 1,
                # Deeper blocks are dropped more often.
                _DROP_CONNECT * len(blocks) / sum(repeats),
            )
            blocks.append(block)
            channels = out_channels
    return blocks


def round_channels(channels: int, width: float) -> int:
    """Scale channels by `width`, to a multiple of 8 and at least 90 % of the product."""
    scaled = channels * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * scaled else rounded + 8
