"""Residual networks: He et al.'s for CIFAR, and ResNet v1.5 for ImageNet.

Layers are named as in Graphcore's application, so that its pipeline splits work.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from millrace.nn import layers
from millrace.nn.layers import Layer, close_residual, on_branch, open_residual
from millrace.nn.norms import NormFactory

_IMAGENET_WIDTHS = (64, 128, 256, 512)
_EXPANSION = 4


def cifar_resnet(num_blocks: int, num_classes: int, norm: NormFactory) -> list[Layer]:
    """Return a network of depth 6 x `num_blocks` + 2 for 32 x 32 images."""
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


def resnet9(num_classes: int, norm: NormFactory) -> list[Layer]:
    """Return a wide network of nine layers for small images that learns fast.

    It is that of David Page (How to Train Your ResNet, 2018), with an average pool at the
    end; 6.6 million parameters.
    """
    model: list[Layer] = []
    for number, features in enumerate((64, 128, 256, 512), 1):
        name = f"conv{number}"
        model += _conv_norm_relu(f"{name}_1", features, norm)
        if number > 1:
            model.append(layers.max_pool(f"{name}_pool", 2, 2))
        if number in (2, 4):
            first, *rest = (
                layer
                for part in ("2", "3")
                for layer in _conv_norm_relu(f"{name}_{part}", features, norm)
            )
            model += [open_residual(first), *(on_branch("main", x) for x in rest)]
            model.append(close_residual(f"{name}_add"))
    return [
        *model,
        layers.global_average_pool("avg_pool"),
        layers.dense("fc_layer", num_classes),
    ]


def _conv_norm_relu(name: str, features: int, norm: NormFactory) -> list[Layer]:
    return [
        layers.conv(f"{name}_conv", features),
        norm(f"{name}_bn"),
        layers.relu(f"{name}_relu"),
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
        shortcut = layers.stateless(f"{name}_shortcut", downsample_shortcut)
        block.append(on_branch("skip", shortcut))
    return [
        *block,
        close_residual(f"{name}_add"),
        layers.relu(f"{name}_post_addition_relu"),
    ]


def downsample_shortcut(
    x: jax.Array,  # (batch, height, width, channels)
) -> jax.Array:
    """Keep every second pixel and pad with zeros to twice the channels."""
    downsampled = lax.slice(x, (0, 0, 0, 0), x.shape, (1, 2, 2, 1))
    return jnp.concatenate([downsampled, jnp.zeros_like(downsampled)], -1)


def resnet(
    num_blocks: Sequence[int],
    num_classes: int,
    norm: NormFactory,
    *,
    bottleneck: bool,
    small: bool = False,
) -> list[Layer]:
    """Return a network for 224 x 224 images, with strides in the 3 x 3 convolutions (v1.5).

    The last norm of a block without projection is initialized to zero, so that the
    block starts as the identity. If images are `small`, such as 32 x 32, the first layers
    keep their size.
    """
    stem = layers.conv("conv1_conv", 64, 7, strides=2, padding=((3, 3), (3, 3)))
    pool = layers.max_pool("pool1_pool", 3, 2, pads=((1, 1), (1, 1)))
    model = [
        layers.conv("conv1_conv", 64) if small else stem,
        norm("conv1_bn"),
        layers.relu("conv1_relu"),
        *([] if small else [pool]),
    ]
    stacks = zip(_IMAGENET_WIDTHS, num_blocks, strict=True)
    for stack, (width, count) in enumerate(stacks, 2):
        for number in range(1, count + 1):
            strides = 2 if stack > 2 and number == 1 else 1
            convs = [(width, 3, strides), (width, 3, 1)]
            if bottleneck:
                convs = [(width, 1, 1), (width, 3, strides), (_EXPANSION * width, 1, 1)]
            model += _block(f"conv{stack}_block{number}", convs, number == 1, norm)
    return [
        *model,
        layers.global_average_pool("avg_pool"),
        layers.dense("predictions", num_classes),
    ]


def _block(
    name: str,
    convs: Sequence[tuple[int, int, int]],  # (features, kernel size, strides) each
    project: bool,
    norm: NormFactory,
) -> list[Layer]:
    """Return a residual block; `project` adds a convolution to the shortcut."""
    block: list[Layer] = []
    for number, (features, kernel, strides) in enumerate(convs, 1):
        is_last = number == len(convs)
        prefix = f"{name}_{number}"
        conv = layers.conv(f"{prefix}_conv", features, kernel, strides=strides)
        block += [
            open_residual(conv) if number == 1 else on_branch("main", conv),
            on_branch("main", norm(f"{prefix}_bn", zero_scale=is_last and not project)),
            *([] if is_last else [on_branch("main", layers.relu(f"{prefix}_relu"))]),
        ]
    if project:
        features, strides = convs[-1][0], max(strides for _, _, strides in convs)
        shortcut = layers.conv(f"{name}_0_conv", features, 1, strides=strides)
        block += [on_branch("skip", shortcut), on_branch("skip", norm(f"{name}_0_bn"))]
    return [*block, close_residual(f"{name}_add"), layers.relu(f"{name}_out")]
