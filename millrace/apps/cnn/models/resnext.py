"""The families ResNet and ResNeXt (with grouped convolutions).

Blocks are named as in Graphcore's TensorFlow 1 application, so that its pipeline splits
work. As in torchvision, whose weights fit, padding is symmetric and shortcuts are
projected only where shapes change.
"""

from typing import NamedTuple

from millrace.apps.cnn.models.resnet import downsample_shortcut
from millrace.apps.cnn.models.spec import RESNEXT_GROUPS, ResNetShape, resnext_channels
from millrace.nn import layers
from millrace.nn.layers import Layer, close_residual, on_branch, open_residual
from millrace.nn.norms import NormFactory

_EXPANSION = 4
_PADDING = {1: ((0, 0), (0, 0)), 3: ((1, 1), (1, 1)), 7: ((3, 3), (3, 3))}
"""Symmetric padding by kernel size."""


class _Style(NamedTuple):
    """Options that all blocks of a network share."""

    norm: NormFactory
    bottleneck: bool
    projects: bool
    """Whether a shortcut whose shape changes is projected, or padded with zeros."""
    groups: int = 1
    group_dim: int = 0

    def inner_channels(self, width: int) -> int:
        """Return the channels of the 3 x 3 convolutions."""
        return width if self.groups == 1 else resnext_channels(width, self.group_dim)

    def outer_channels(self, width: int) -> int:
        """Return the channels between blocks."""
        return width * (_EXPANSION if self.bottleneck else 1)


def resnet(
    shape: ResNetShape, num_classes: int, norm: NormFactory, *, small: bool
) -> list[Layer]:
    """Return a residual network, for 32 x 32 images if `small`."""
    projects = shape.bottleneck or not small
    style = _Style(norm, shape.bottleneck, projects)
    return _network(shape, num_classes, style, small=small)


def resnext(
    shape: ResNetShape,
    num_classes: int,
    norm: NormFactory,
    *,
    small: bool,
    group_dim: int | None = None,
) -> list[Layer]:
    """Return a ResNeXt with 32 groups of `group_dim` channels in its first stack."""
    style = _Style(norm, True, True, RESNEXT_GROUPS, group_dim or 4)
    return _network(shape, num_classes, style, small=small)


def _network(
    shape: ResNetShape, num_classes: int, style: _Style, *, small: bool
) -> list[Layer]:
    widths = (16, 32, 64) if small else (64, 128, 256, 512)
    model, channels = _stem(widths[0], style.norm, small), widths[0]
    for stack, (width, count) in enumerate(zip(widths, shape.blocks, strict=True), 1):
        for number in range(count):
            strides = 2 if stack > 1 and number == 0 else 1
            model += _block(f"b{stack}/{number}", width, strides, channels, style)
            channels = style.outer_channels(width)
    return [
        *model,
        layers.global_average_pool("reduce_mean"),
        layers.dense("fc1", num_classes),
    ]


def _stem(width: int, norm: NormFactory, small: bool) -> list[Layer]:
    first = _conv("b0/conv", width, 3 if small else 7, strides=1 if small else 2)
    stem = [first, norm("b0/norm"), layers.relu("b0/relu")]
    if small:
        return stem
    return [*stem, layers.max_pool("b0/pool", 3, 2, pads=_PADDING[3])]


def _conv(
    name: str, features: int, kernel: int, *, strides: int = 1, groups: int = 1
) -> Layer:
    return layers.conv(
        name, features, kernel, strides=strides, padding=_PADDING[kernel], groups=groups
    )


def _block(
    name: str, width: int, strides: int, channels: int, style: _Style
) -> list[Layer]:
    inner, outer = style.inner_channels(width), style.outer_channels(width)
    changes_shape = strides > 1 or channels != outer
    if style.bottleneck:
        convs = [
            _conv(f"{name}/conv1", inner, 1),
            _conv(f"{name}/conv2", inner, 3, strides=strides, groups=style.groups),
            _conv(f"{name}/conv3", outer, 1),
        ]
    else:
        convs = [
            _conv(f"{name}/conv1", inner, 3, strides=strides),
            _conv(f"{name}/conv2", outer, 3),
        ]
    block = []
    for number, conv in enumerate(convs, 1):
        is_last = number == len(convs)
        # Where shapes allow it, a block starts as the identity.
        zero_scale = is_last and not changes_shape
        block += [
            open_residual(conv) if number == 1 else on_branch("main", conv),
            on_branch("main", style.norm(f"{name}/norm{number}", zero_scale=zero_scale)),
            *([] if is_last else [on_branch("main", layers.relu(f"{name}/relu{number}"))]),
        ]
    if changes_shape:
        block += _shortcut(f"{name}/shortcut", outer, strides, style)
    return [*block, close_residual(f"{name}/add"), layers.relu(f"{name}/relu")]


def _shortcut(name: str, features: int, strides: int, style: _Style) -> list[Layer]:
    if not style.projects:
        return [on_branch("skip", layers.stateless(name, downsample_shortcut))]
    return [
        on_branch("skip", _conv(f"{name}/conv", features, 1, strides=strides)),
        on_branch("skip", style.norm(f"{name}/norm")),
    ]
