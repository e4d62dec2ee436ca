"""Residual networks by size: ResNet, and ResNeXt with its grouped convolutions.

Those of Graphcore's TensorFlow 1 application, whose names of blocks are kept, so that its
pipeline splits work. Padding is symmetric and shortcuts are projected only where shapes
change, as in torchvision, whose weights fit.
"""

from typing import NamedTuple

from millrace.apps.cnn.families import Residual
from millrace.apps.cnn.group_dim import RESNEXT_GROUPS
from millrace.apps.cnn.models.resnet import halved
from millrace.nn import layers
from millrace.nn.branches import close_residual, on_branch, open_residual
from millrace.nn.layers import Layer
from millrace.nn.norms import NormFactory

_EXPANSION = 4
_AROUND = {1: ((0, 0), (0, 0)), 3: ((1, 1), (1, 1)), 7: ((3, 3), (3, 3))}
"""Padding by the side of a kernel."""


class _Network(NamedTuple):
    """What the blocks of a network have in common."""

    norm: NormFactory
    bottleneck: bool
    projects: bool
    """Whether a shortcut whose shape changes is projected, or padded with zeros."""
    groups: int = 1
    group_dim: int = 0

    def inner(self, width: int) -> int:
        """Channels of the 3 x 3 convolutions."""
        if self.groups == 1:
            return width
        return width * self.groups * self.group_dim // 64

    def outer(self, width: int) -> int:
        """Channels between blocks."""
        return width * (_EXPANSION if self.bottleneck else 1)


def resnet(
    shape: Residual, num_classes: int, norm: NormFactory, *, small: bool
) -> list[Layer]:
    """A residual network; `small` if it is for pictures of 32 x 32."""
    projects = shape.bottleneck or not small
    return _network(
        shape, num_classes, _Network(norm, shape.bottleneck, projects), small=small
    )


def resnext(
    shape: Residual,
    num_classes: int,
    norm: NormFactory,
    *,
    small: bool,
    group_dim: int | None = None,
) -> list[Layer]:
    """A residual network with 32 groups of `group_dim` channels in its first stack."""
    common = _Network(norm, True, True, RESNEXT_GROUPS, group_dim or 4)
    return _network(shape, num_classes, common, small=small)


def _network(
    shape: Residual, num_classes: int, common: _Network, *, small: bool
) -> list[Layer]:
    widths = (16, 32, 64) if small else (64, 128, 256, 512)
    model, channels = _stem(widths[0], common.norm, small), widths[0]
    for stack, (width, count) in enumerate(zip(widths, shape.blocks, strict=True), 1):
        for number in range(count):
            strides = 2 if stack > 1 and number == 0 else 1
            model += _block(f"b{stack}/{number}", width, strides, channels, common)
            channels = common.outer(width)
    return [
        *model,
        layers.global_average_pool("reduce_mean"),
        layers.dense("fc1", num_classes),
    ]


def _stem(width: int, norm: NormFactory, small: bool) -> list[Layer]:
    first = [_conv("b0/conv", width, 3 if small else 7, strides=1 if small else 2)]
    stem = [*first, norm("b0/norm"), layers.relu("b0/relu")]
    if small:
        return stem
    return [*stem, layers.max_pool("b0/pool", 3, 2, pads=_AROUND[3])]


def _conv(
    name: str, features: int, kernel: int, *, strides: int = 1, groups: int = 1
) -> Layer:
    return layers.conv(
        name, features, kernel, strides=strides, padding=_AROUND[kernel], groups=groups
    )


def _block(
    name: str, width: int, strides: int, channels: int, common: _Network
) -> list[Layer]:
    inner, outer = common.inner(width), common.outer(width)
    changes = strides > 1 or channels != outer
    if common.bottleneck:
        convs = [
            _conv(f"{name}/conv1", inner, 1),
            _conv(f"{name}/conv2", inner, 3, strides=strides, groups=common.groups),
            _conv(f"{name}/conv3", outer, 1),
        ]
    else:
        convs = [
            _conv(f"{name}/conv1", inner, 3, strides=strides),
            _conv(f"{name}/conv2", outer, 3),
        ]
    block = []
    for number, conv in enumerate(convs, 1):
        last = number == len(convs)
        # A block that could be the identity starts as it.
        zero = last and not changes
        block += [
            open_residual(conv) if number == 1 else on_branch("main", conv),
            on_branch("main", common.norm(f"{name}/norm{number}", zero_scale=zero)),
            *([] if last else [on_branch("main", layers.relu(f"{name}/relu{number}"))]),
        ]
    shortcut = _shortcut(f"{name}/shortcut", outer, strides, common) if changes else []
    return [*block, *shortcut, close_residual(f"{name}/add"), layers.relu(f"{name}/relu")]


def _shortcut(name: str, features: int, strides: int, common: _Network) -> list[Layer]:
    if not common.projects:
        return [on_branch("skip", layers.stateless(name, halved))]
    return [
        on_branch("skip", _conv(f"{name}/conv", features, 1, strides=strides)),
        on_branch("skip", common.norm(f"{name}/norm")),
    ]
