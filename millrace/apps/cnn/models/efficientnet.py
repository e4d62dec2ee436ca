"""EfficientNet: inverted residual blocks, depthwise or in small groups.

Names of blocks are those of Graphcore's TensorFlow 1 application, so that its pipeline
splits work; padding is symmetric, as in timm and torchvision. With a `group_dim` of 16 and
an `expand_ratio` of 4 it is the variant G16 of Masters et al. (2021), in which every
convolution has more to do for each number it reads.
"""

from typing import Any

import jax
import jax.numpy as jnp

from millrace.apps.cnn.efficientnet_blocks import (
    STEM,
    TOP,
    Block,
    blocks_of,
    round_channels,
)
from millrace.apps.cnn.families import Scaled
from millrace.nn import layers
from millrace.nn.branches import close_residual, on_branch, open_residual
from millrace.nn.initializers import Init
from millrace.nn.layers import Call, Layer, Tree
from millrace.nn.norms import NormFactory

_SQUEEZE = 0.25


def efficientnet(
    shape: Scaled,
    num_classes: int,
    norm: NormFactory,
    *,
    group_dim: int | None = None,
    expand_ratio: int | None = None,
) -> list[Layer]:
    """B0 made wider and deeper as `shape` says."""
    stem, top = (round_channels(n, shape.width) for n in (STEM, TOP))
    model = _convolved("block0", stem, 3, norm, strides=2)
    for block in blocks_of(shape, group_dim, expand_ratio):
        model += _inverted_residual(block, norm)
    return [
        *model,
        *_convolved("Top", top, 1, norm),
        layers.global_average_pool("avg_pool"),
        layers.dropout("dropout", shape.dropout),
        _classifier("fc1", num_classes),
    ]


def _inverted_residual(block: Block, norm: NormFactory) -> list[Layer]:
    """Widen, convolve in groups, weigh the channels, narrow again; add what came in."""
    wide, groups = block.wide, block.num_groups
    body: list[Layer] = []
    if block.expand_ratio > 1:
        body += _convolved(f"{block.name}/a", wide, 1, norm)
    body += _convolved(
        f"{block.name}/b", wide, block.kernel, norm, strides=block.strides, groups=groups
    )
    body.append(squeeze_excite(f"{block.name}/SE", max(1, int(block.channels * _SQUEEZE))))
    body += _convolved(f"{block.name}/c", block.features, 1, norm)[:2]  # no swish
    if not block.is_residual:
        return body
    dropped = layers.dropout(
        f"{block.name}/drop_connect", block.drop_rate, whole_samples=True
    )
    first, *rest = [*body, dropped]
    branch = [on_branch("main", layer) for layer in rest]
    return [open_residual(first), *branch, close_residual(f"{block.name}/add")]


def _convolved(
    name: str,
    features: int,
    kernel: int,
    norm: NormFactory,
    *,
    strides: int = 1,
    groups: int = 1,
) -> list[Layer]:
    """A convolution, its norm, and swish."""
    around = (kernel // 2, kernel // 2)
    conv = layers.conv(
        f"{name}/conv",
        features,
        kernel,
        strides=strides,
        padding=(around, around),
        groups=groups,
        fan="in" if groups > 1 else "out",
    )
    swish = layers.stateless(f"{name}/swish", jax.nn.silu)
    return [conv, norm(f"{name}/norm"), swish]


def squeeze_excite(name: str, reduced: int) -> Layer:
    """Weigh each channel by what two small layers make of all channels' means."""

    def part(before: int, after: int) -> Tree:
        kernel = Init("truncated_normal", (before, after), (2 / after) ** 0.5)
        return {"kernel": kernel, "bias": jnp.zeros(after)}

    def init(x: Any) -> tuple[Tree, Tree]:
        channels = x.shape[-1]
        return {"reduce": part(channels, reduced), "expand": part(reduced, channels)}, {}

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        del model_state, call
        reduce, expand = params["reduce"], params["expand"]
        pooled = x.mean((1, 2), dtype=jnp.float32).astype(x.dtype)
        squeezed = jax.nn.silu(pooled @ reduce["kernel"] + reduce["bias"])
        excited = jax.nn.sigmoid(squeezed @ expand["kernel"] + expand["bias"])
        return x * excited[:, None, None], {}

    return Layer(name, init, apply)


def _classifier(name: str, num_classes: int) -> Layer:
    """A dense layer that starts as Glorot and Bengio have it."""
    layer = layers.dense(name, num_classes)

    def init(x: Any) -> tuple[Tree, Tree]:
        shape = (x.shape[-1], num_classes)
        kernel = Init("uniform", shape, (6 / sum(shape)) ** 0.5)
        return {"kernel": kernel, "bias": jnp.zeros(num_classes)}, {}

    return layer._replace(init=init)
