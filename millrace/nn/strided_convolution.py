"""A strided convolution of few channels as one of more channels without strides.

A network's first convolution has three channels, of which the matrix units of a GPU want
many more: XLA fills them up with zeros. Instead, every block of pixels that one stride
passes over becomes one pixel with the channels of all (space to depth), and the kernel is
cut up in the same way. Products and sums stay the same.
"""

import jax
import jax.numpy as jnp
from jax import lax

from millrace.nn.dense_convolution import LAYOUT, Pads, Pair

_MOST_CHANNELS = 4


def is_worth_folding(channels: int, strides: Pair) -> bool:
    """Say whether a convolution has so few channels and so long strides that it helps."""
    return channels <= _MOST_CHANNELS and min(strides) > 1


def folded_conv2d(x: jax.Array, kernel: jax.Array, strides: Pair, pads: Pads) -> jax.Array:
    """Convolve as XLA does, with blocks of pixels turned to channels first."""
    blocks = [-(-kernel.shape[axis] // strides[axis]) for axis in (0, 1)]
    edges, margins = [], []
    for axis in (0, 1):
        padded = x.shape[1 + axis] + sum(pads[axis])
        outputs = (padded - kernel.shape[axis]) // strides[axis] + 1
        used = (outputs + blocks[axis] - 1) * strides[axis]
        edges.append((pads[axis][0], used - x.shape[1 + axis] - pads[axis][0], 0))
        margins.append((0, blocks[axis] * strides[axis] - kernel.shape[axis]))
    zero = jnp.zeros((), x.dtype)
    x = lax.pad(x, zero, [(0, 0, 0), *edges, (0, 0, 0)])
    kernel = jnp.pad(kernel, (*margins, (0, 0), (0, 0)))
    return lax.conv_general_dilated(
        _fold_pixels(x, strides),
        _fold_kernel(kernel, strides),
        (1, 1),
        "VALID",
        dimension_numbers=LAYOUT,
    )


def _fold_pixels(x: jax.Array, strides: Pair) -> jax.Array:
    batch, height, width, channels = x.shape
    (down, right), size = strides, strides[0] * strides[1] * channels
    x = x.reshape(batch, height // down, down, width // right, right, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(
        batch, height // down, width // right, size
    )


def _fold_kernel(kernel: jax.Array, strides: Pair) -> jax.Array:
    # The features wait in front, in the place of the batch.
    folded = _fold_pixels(kernel.transpose(3, 0, 1, 2), strides)
    return folded.transpose(1, 2, 3, 0)
