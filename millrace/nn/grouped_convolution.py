"""Grouped and depthwise convolution on CPU.

XLA:CPU's own are slow, and their gradients inside a loop hundreds of times slower (a
depthwise 3x3 of 144 channels at 56x56, forward and backward: 529 ms outside a scan, 23 s
inside). Here a depthwise convolution is one multiplication and addition per element of
the kernel, and a grouped one is a few dense ones.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millrace.nn.dense_convolution import (
    Pads,
    Pair,
    computed_once,
    dense_conv2d,
    pads_of_input_gradient,
)

_CHANNELS_PER_BLOCK = 16
"""Dense convolutions of fewer channels waste more on their surroundings than zeros
between groups cost: 32 groups of 8 at 28x28 take 84 ms joined in twos, 120 one by one."""


def grouped_conv2d(
    x: jax.Array, kernel: jax.Array, strides: Pair, pads: Pads, groups: int
) -> jax.Array:
    """Convolve each group of channels with its own part of a (h, w, in/groups, out) kernel.

    Several groups are joined into one dense convolution whose kernel is zero between
    them.
    """
    if kernel.shape[2] == 1:
        multiplier = kernel.shape[3] // groups
        return _depthwise(jnp.repeat(x, multiplier, -1), kernel, strides, pads)
    joined = _groups_per_block(groups, kernel.shape[2])
    blocks = groups // joined
    kernels = jnp.split(_block_diagonal(kernel, groups, joined), blocks, -1)
    parts = zip(jnp.split(x, blocks, -1), kernels, strict=True)
    return jnp.concatenate([dense_conv2d(*part, strides, pads) for part in parts], -1)


def _groups_per_block(groups: int, channels: int) -> int:
    """The most groups whose channels fill a block, of those that divide all groups."""
    fitting = max(1, _CHANNELS_PER_BLOCK // channels)
    return max(n for n in range(1, min(groups, fitting) + 1) if groups % n == 0)


def _block_diagonal(kernel: jax.Array, groups: int, joined: int) -> jax.Array:
    """Kernels of blocks of groups: zero where input and output are of different groups."""
    if joined == 1:
        return kernel
    _, _, channels, features = kernel.shape
    of_input = np.arange(joined * channels) // channels
    of_output = np.arange(features) // (features // groups) % joined
    same = of_input[:, None] == of_output
    return jnp.where(same, jnp.tile(kernel, (1, 1, joined, 1)), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _depthwise(x: jax.Array, kernel: jax.Array, strides: Pair, pads: Pads) -> jax.Array:
    """Convolve every channel with a (h, w, 1, channels) kernel of its own."""
    padded = _padded(x, pads, (1, 1))
    size = [(padded.shape[1 + d] - kernel.shape[d]) // strides[d] + 1 for d in (0, 1)]
    return _sum_of_taps(padded, kernel, size, strides)


def _depthwise_forward(x: jax.Array, kernel: jax.Array, strides: Pair, pads: Pads) -> Any:
    return _depthwise(x, kernel, strides, pads), (x, kernel)


def _depthwise_backward(strides: Pair, pads: Pads, saved: Any, dy: jax.Array) -> Any:
    x, kernel = saved
    around = pads_of_input_gradient(x.shape, kernel.shape, dy.shape, strides, pads)
    spread = _padded(dy, around, strides)
    dx = _sum_of_taps(spread, kernel[::-1, ::-1], x.shape[1:3], (1, 1))
    return dx, _depthwise_kernel_gradient(x, kernel.shape, dy, strides, pads)


_depthwise.defvjp(_depthwise_forward, _depthwise_backward)


def _padded(x: jax.Array, pads: Pads, gaps: Pair) -> jax.Array:
    """Surround with zeros, which may also come between; negative pads cut off."""
    inner = [(*pads[d], gaps[d] - 1) for d in (0, 1)]
    padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *inner, (0, 0, 0)])
    return computed_once(padded)  # or every tap would ask whether it is in the padding


def _sum_of_taps(x: jax.Array, kernel: jax.Array, size: Any, strides: Pair) -> jax.Array:
    height, width = kernel.shape[:2]
    taps = [
        _tap(x, (i, j), size, strides) * kernel[i, j, 0]
        for i in range(height)
        for j in range(width)
    ]
    return functools.reduce(jnp.add, taps)


def _tap(x: jax.Array, start: Pair, size: Any, strides: Pair) -> jax.Array:
    """The pixels of (…, height, width, channels) that one element of the kernel meets."""
    lead = x.ndim - 3
    ends = [start[d] + (size[d] - 1) * strides[d] + 1 for d in (0, 1)]
    return lax.slice(
        x,
        (*(0,) * lead, *start, 0),
        (*x.shape[:lead], *ends, x.shape[-1]),
        (*(1,) * lead, *strides, 1),
    )


def _depthwise_kernel_gradient(
    x: jax.Array, shape: Any, dy: jax.Array, strides: Pair, pads: Pads
) -> jax.Array:
    """Add up x times dy row by row, element by element, and over the row at the end.

    As sums over all pixels, with XLA's own reductions, this takes 5 times as long.
    """
    padded = _padded(x, pads, (1, 1))
    samples, rows, columns, channels = dy.shape
    taps = [(i, j) for i in range(shape[0]) for j in range(shape[1])]

    def add(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        sample, row = index // rows, index % rows
        window = (1, shape[0], padded.shape[2], channels)
        above = lax.dynamic_slice(padded, (sample, row * strides[0], 0, 0), window)[0]
        dy_row = lax.dynamic_slice(dy, (sample, row, 0, 0), (1, 1, columns, channels))[0]
        return tuple(
            total + _tap(above, tap, (1, columns), strides) * dy_row
            for total, tap in zip(sums, taps, strict=True)
        )

    zeros = (jnp.zeros_like(dy[0, :1]),) * math.prod(shape[:2])
    sums = lax.fori_loop(0, samples * rows, add, zeros)
    return jnp.stack([total.sum((0, 1)) for total in sums]).reshape(shape)
