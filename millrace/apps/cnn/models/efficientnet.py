"""EfficientNet: inverted residual blocks with depthwise or grouped convolutions.

Blocks are named as in Graphcore's TensorFlow 1 application, so that its pipeline splits
work; padding is symmetric, as in timm and torchvision. With a `group_dim` of 16 and an
`expand_ratio` of 4, it is the variant G16 of Masters et al. (2021), whose convolutions do
more work per byte of memory traffic.
"""

from typing import Any

import jax
import jax.numpy as jnp

from millrace.apps.cnn.models.spec import (
    STEM_CHANNELS,
    TOP_CHANNELS,
    EfficientNetShape,
    MBConvBlock,
    efficientnet_blocks,
    round_channels,
)
from millrace.nn import layers
from millrace.nn.initializers import Init
from millrace.nn.layers import Call, Layer, Tree, close_residual, on_branch, open_residual
from millrace.nn.norms import NormFactory

_SQUEEZE_RATIO = 0.25


def efficientnet(
    shape: EfficientNetShape,
    num_classes: int,
    norm: NormFactory,
    *,
    group_dim: int | None = None,
    expand_ratio: int | None = None,
) -> list[Layer]:
    """Return B0, scaled in width and depth."""
    stem, top = (round_channels(n, shape.width) for n in (STEM_CHANNELS, TOP_CHANNELS))
    model = _conv_norm_swish("block0", stem, 3, norm, strides=2)
    for block in efficientnet_blocks(shape, group_dim, expand_ratio):
        model += _inverted_residual(block, norm)
    return [
        *model,
        *_conv_norm_swish("Top", top, 1, norm),
        layers.global_average_pool("avg_pool"),
        layers.dropout("dropout", shape.dropout),
        _classifier("fc1", num_classes),
    ]


def _inverted_residual(block: MBConvBlock, norm: NormFactory) -> list[Layer]:
    """Expand, convolve in groups, squeeze and excite, project; add the input."""
    expanded = block.expanded_channels
    body: list[Layer] = []
    if block.expand_ratio > 1:
        body += _conv_norm_swish(f"{block.name}/a", expanded, 1, norm)
    body += _conv_norm_swish(
        f"{block.name}/b",
        expanded,
        block.kernel,
        norm,
        strides=block.strides,
        groups=block.num_groups,
    )
    reduced = max(1, int(block.in_channels * _SQUEEZE_RATIO))
    body.append(squeeze_excite(f"{block.name}/SE", reduced))
    body += _conv_norm_swish(f"{block.name}/c", block.out_channels, 1, norm)[:2]  # no swish
    if not block.is_residual:
        return body
    drop = layers.dropout(f"{block.name}/drop_connect", block.drop_rate, whole_samples=True)
    first, *rest = [*body, drop]
    branch = [on_branch("main", layer) for layer in rest]
    return [open_residual(first), *branch, close_residual(f"{block.name}/add")]


def _conv_norm_swish(
    name: str,
    features: int,
    kernel: int,
    norm: NormFactory,
    *,
    strides: int = 1,
    groups: int = 1,
) -> list[Layer]:
    pad = (kernel // 2, kernel // 2)
    conv = layers.conv(
        f"{name}/conv",
        features,
        kernel,
        strides=strides,
        padding=(pad, pad),
        groups=groups,
        fan="in" if groups > 1 else "out",
    )
    swish = layers.stateless(f"{name}/swish", jax.nn.silu)
    return [conv, norm(f"{name}/norm"), swish]


def squeeze_excite(name: str, reduced: int) -> Layer:
    """Return a layer that scales channels by gates, computed from all channel means.

    Two dense layers with `reduced` hidden units compute the gates.
    """

    def dense_params(inputs: int, outputs: int) -> Tree:
        kernel = Init("truncated_normal", (inputs, outputs), (2 / outputs) ** 0.5)
        return {"kernel": kernel, "bias": jnp.zeros(outputs)}

    def init(x: Any) -> tuple[Tree, Tree]:
        channels = x.shape[-1]
        params = {
            "reduce": dense_params(channels, reduced),
            "expand": dense_params(reduced, channels),
        }
        return params, {}

    def apply(
        params: Tree,
        model_state: Tree,
        x: Any,  # (batch, height, width, channels)
        call: Call,
    ) -> tuple[Any, Tree]:
        del model_state, call
        reduce, expand = params["reduce"], params["expand"]
        pooled = x.mean((1, 2), dtype=jnp.float32).astype(x.dtype)
        squeezed = jax.nn.silu(pooled @ reduce["kernel"] + reduce["bias"])
        gates = jax.nn.sigmoid(squeezed @ expand["kernel"] + expand["bias"])
        return x * gates[:, None, None], {}

    return Layer(name, init, apply)


def _classifier(name: str, num_classes: int) -> Layer:
    """Return a dense layer with Glorot initialization."""
    layer = layers.dense(name, num_classes)

    def init(x: Any) -> tuple[Tree, Tree]:
        shape = (x.shape[-1], num_classes)
        kernel = Init("uniform", shape, (6 / sum(shape)) ** 0.5)
        return {"kernel": kernel, "bias": jnp.zeros(num_classes)}, {}

    return layer._replace(init=init)
