"""A small network that learns CIFAR-10 in seconds, after Keller Jordan's airbench94.

It is as published with the record for training CIFAR-10 to 94 % (arXiv 2404.00498, and the
variant for Muon): a first layer that whitens patches, three blocks of two convolutions,
batch norm without scales, GELU, and a head whose logits are scaled down.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.nn import layers
from millrace.nn.convolution import conv2d
from millrace.nn.initializers import Init
from millrace.nn.layers import (
    Call,
    Layer,
    Tree,
    close_residual,
    on_branch,
    open_residual,
)
from millrace.nn.norms import NormFactory

WHITENING = "whiten"
"""The name of the first layer."""

_WINDOW = 2
"""Height and width of the patches that the first layer whitens."""
_NOISE = 5e-4
"""Variance added to that of every principal component."""
_HEAD_SCALE = 72.0
"""Divides the logits. With it, the head and the biases train at one learning rate."""


def speednet(
    num_classes: int,
    norm: NormFactory,
    *,
    widths: tuple[int, ...] = (64, 256, 256),
    is_residual: bool = False,
) -> list[Layer]:
    """Return a network for small images; 2.0 million parameters for ten classes.

    Args:
        num_classes: Outputs.
        norm: Builds the normalization layers, which have no scale.
        widths: Channels of the blocks, each of which halves height and width.
        is_residual: Whether blocks have a third convolution, and the output of the first
            is added to that of the third.
    """
    model = [_whitening(WHITENING), layers.gelu(f"{WHITENING}_gelu")]
    for number, width in enumerate(widths, 1):
        model += _block(f"block{number}", width, norm, is_residual=is_residual)
    return [
        *model,
        layers.stateless("max_pool", lambda x: x.max((1, 2))),
        _scaled_head("head", num_classes),
    ]


def _block(name: str, width: int, norm: NormFactory, *, is_residual: bool) -> list[Layer]:
    def unit(number: int) -> list[Layer]:
        conv = layers.conv(f"{name}/conv{number}", width, copies_inputs=True)
        return [conv, norm(f"{name}/norm{number}", with_scale=False)]

    def gelu(number: int) -> Layer:
        return layers.gelu(f"{name}/gelu{number}")

    conv, first_norm = unit(1)
    first = [conv, layers.max_pool(f"{name}/pool", 2, 2), first_norm, gelu(1)]
    if not is_residual:
        return [*first, *unit(2), gelu(2)]
    start, *rest = [*unit(2), gelu(2), *unit(3)]
    branch = [open_residual(start), *(on_branch("main", layer) for layer in rest)]
    return [*first, *branch, close_residual(f"{name}/add"), gelu(3)]


def _whitening(name: str) -> Layer:
    """Return a convolution with a fixed kernel, which is not trained, and a bias.

    The kernel is a part of the model state. It starts at random; training sets it to what
    `whiten` returns.
    """

    def init(x: Any) -> tuple[Tree, Tree]:
        inputs = _WINDOW**2 * x.shape[-1]
        shape = (_WINDOW, _WINDOW, x.shape[-1], 2 * inputs)
        kernel = Init("normal", shape, inputs**-0.5)
        return {"bias": jnp.zeros(2 * inputs)}, {"kernel": kernel}

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        del call
        kernel = model_state["kernel"].astype(x.dtype)
        return conv2d(x, kernel, padding="VALID") + params["bias"], model_state

    return Layer(name, init, apply)


def _scaled_head(name: str, features: int) -> Layer:
    def init(x: Any) -> tuple[Tree, Tree]:
        shape = (x.shape[-1], features)
        return {"kernel": Init("normal", shape, _HEAD_SCALE / x.shape[-1])}, {}

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        del model_state, call
        # Not rounded to 16 bits, so that the mean logits of several views are exact.
        logits = jnp.matmul(x, params["kernel"], preferred_element_type=jnp.float32)
        return logits / _HEAD_SCALE, {}

    return Layer(name, init, apply)


def whiten(
    images: jax.Array,  # (samples, height, width, channels), scaled
) -> np.ndarray:  # (window, window, channels, features)
    """Return the kernel with uncorrelated outputs of variance 1 for patches of images.

    It holds the principal components of the patches, divided by the root of their variance,
    and the same with the other sign.
    """
    channels = images.shape[-1]
    covariance = np.asarray(jax.jit(_covariance)(images), np.float64)
    variances, components = np.linalg.eigh(covariance)
    components /= np.sqrt(np.maximum(variances, 0) + _NOISE)
    kernel = components.reshape(_WINDOW, _WINDOW, channels, -1)
    return np.concatenate([kernel, -kernel], -1).astype(np.float32)


def _covariance(
    images: jax.Array,  # (samples, height, width, channels)
) -> jax.Array:  # (window * window * channels, the same)
    """Return the mean product of the values of a patch, row by row and channels last."""
    pixels = images.astype(jnp.float32)
    _, height, width, channels = pixels.shape
    rows, columns = height - _WINDOW + 1, width - _WINDOW + 1
    views = [
        pixels[:, top : top + rows, left : left + columns]
        for top in range(_WINDOW)
        for left in range(_WINDOW)
    ]
    patches = jnp.concatenate(views, -1).reshape(-1, _WINDOW**2 * channels)
    return jnp.matmul(patches.T, patches, precision="highest") / len(patches)
