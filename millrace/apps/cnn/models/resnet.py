"""Residual networks: He et al.'s for CIFAR, and ResNet v1.5 for ImageNet.

Layer names are those of Graphcore's application, so that its pipeline splits work.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from millrace.nn import layers
from millrace.nn.branches import close_residual, on_branch, open_residual
from millrace.nn.layers import Layer
from millrace.nn.norms import NormFactory

_IMAGENET_WIDTHS = (64, 128, 256, 512)
_BOTTLENECK_EXPANSION = 4


def cifar_resnet(num_blocks: int, num_classes: int, norm: NormFactory) -> list[Layer]:
    """A network of depth 6 x `num_blocks` + 2 for pictures of 32 x 32."""
    model = [layers.conv("conv1_conv", 16), norm("conv1_bn"), layers.relu("conv1_relu")]
    for stack, features in enumerate((16, 32, 64), 2):
        for block in range(1, num_blocks + 1):
            downsample = stack > 2 and block == 1
            model += _cifar_block(f"conv{stack}_block{block}", features, downsample, norm)
    return [
        *model,
        layers.global_average_pool("avg_pool"),
        layers.dense("fc_layer", num_classes),
    ]


def _cifar_block(
    name: str, features: int, downsample: bool, norm: NormFactory
) -> list[Layer]:
    first = f"{name}_layer1_conv_ds" if downsample else f"{name}_layer1_conv"
    block = [
        open_residual(layers.conv(first, features, strides=2 if downsample else 1)),
        on_branch("main", norm(f"{name}_layer1_bn")),
        on_branch("main", layers.relu(f"{name}_layer1_relu")),
        on_branch("main", layers.conv(f"{name}_layer2_conv", features)),
        on_branch("main", norm(f"{name}_layer2_bn")),
    ]
    if downsample:
        shortcut = layers.stateless(f"{name}_shortcut", halved)
        block.append(on_branch("skip", shortcut))
    return [
        *block,
        close_residual(f"{name}_add"),
        layers.relu(f"{name}_post_addition_relu"),
    ]


def halved(x: jax.Array) -> jax.Array:
    """Every second pixel, and as many channels of zeros again; no parameters."""
    thinned = x[:, ::2, ::2]
    return jnp.concatenate([thinned, jnp.zeros_like(thinned)], -1)


def resnet(
    num_blocks: Sequence[int], num_classes: int, norm: NormFactory, *, bottleneck: bool
) -> list[Layer]:
    """A network for pictures of 224 x 224, the stride on the 3 x 3 convolution (v1.5).

    The last norm of a block without projection starts at zero, so that the block
    starts as the identity.
    """
    model = [
        layers.conv("conv1_conv", 64, 7, strides=2, padding=((3, 3), (3, 3))),
        norm("conv1_bn"),
        layers.relu("conv1_relu"),
        layers.max_pool("pool1_pool", 3, 2, pads=((1, 1), (1, 1))),
    ]
    block_of = _bottleneck_block if bottleneck else _basic_block
    stacks = zip(_IMAGENET_WIDTHS, num_blocks, strict=True)
    for stack, (width, count) in enumerate(stacks, 2):
        for number in range(1, count + 1):
            strides = 2 if stack > 2 and number == 1 else 1
            name = f"conv{stack}_block{number}"
            model += block_of(name, width, strides, number == 1, norm)
    return [
        *model,
        layers.global_average_pool("avg_pool"),
        layers.dense("predictions", num_classes),
    ]


def _bottleneck_block(
    name: str, width: int, strides: int, project: bool, norm: NormFactory
) -> list[Layer]:
    wide = _BOTTLENECK_EXPANSION * width
    return [
        open_residual(layers.conv(f"{name}_1_conv", width, 1)),
        on_branch("main", norm(f"{name}_1_bn")),
        on_branch("main", layers.relu(f"{name}_1_relu")),
        on_branch("main", layers.conv(f"{name}_2_conv", width, 3, strides=strides)),
        on_branch("main", norm(f"{name}_2_bn")),
        on_branch("main", layers.relu(f"{name}_2_relu")),
        on_branch("main", layers.conv(f"{name}_3_conv", wide, 1)),
        on_branch("main", norm(f"{name}_3_bn", zero_scale=not project)),
        *_joined(name, wide, strides, project, norm),
    ]


def _basic_block(
    name: str, width: int, strides: int, project: bool, norm: NormFactory
) -> list[Layer]:
    return [
        open_residual(layers.conv(f"{name}_1_conv", width, 3, strides=strides)),
        on_branch("main", norm(f"{name}_1_bn")),
        on_branch("main", layers.relu(f"{name}_1_relu")),
        on_branch("main", layers.conv(f"{name}_2_conv", width, 3)),
        on_branch("main", norm(f"{name}_2_bn", zero_scale=not project)),
        *_joined(name, width, strides, project, norm),
    ]


def _joined(
    name: str, features: int, strides: int, project: bool, norm: NormFactory
) -> list[Layer]:
    """The shortcut, projected where sizes change, and what joins it to the branch."""
    shortcut: list[Layer] = []
    if project:
        shortcut = [
            on_branch("skip", layers.conv(f"{name}_0_conv", features, 1, strides=strides)),
            on_branch("skip", norm(f"{name}_0_bn")),
        ]
    return [*shortcut, close_residual(f"{name}_add"), layers.relu(f"{name}_out")]
