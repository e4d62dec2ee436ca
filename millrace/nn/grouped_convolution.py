"""Grouped and depthwise convolution on CPU.

XLA:CPU's own are slow, and their gradients are hundreds of times slower inside a loop
(depthwise 3x3, 144 channels, 56x56, forward and backward: 529 ms outside a scan, 23 s
inside). Here a depthwise convolution is one multiply-add per kernel element, and a grouped
one is a few dense ones.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from millrace.nn.dense_convolution import (
    Images,
    Outputs,
    Pads,
    Pair,
    computed_once,
    dense_conv2d,
    input_gradient_pads,
)

GroupedKernel = Float[Array, "kernel_height kernel_width group_channels features"]
DepthwiseKernel = Float[Array, "kernel_height kernel_width 1 channels"]

_CHANNELS_PER_BLOCK = 16
"""Groups are joined until a dense convolution has this many channels. Narrower ones lose
more to overhead than the zeros between groups cost: 32 groups of 8 at 28x28 take 84 ms
joined in pairs, 120 ms one by one."""

_MAX_UNROLLED = 4
"""Blocks that are compiled one by one. In a loop, 48 blocks compile 6 times as fast and
run as fast; EfficientNet-B0 G16 in two pipeline stages has 84 convolutions, not 1,500."""


def grouped_conv2d(
    x: Images, kernel: GroupedKernel, strides: Pair, pads: Pads, groups: int
) -> Outputs:
    """Convolve each group of channels with its own part of the kernel.

    Several groups are joined into one dense convolution whose kernel is zero between
    them.
    """
    if kernel.shape[2] == 1:
        multiplier = kernel.shape[3] // groups
        return _depthwise(jnp.repeat(x, multiplier, -1), kernel, strides, pads)
    joined = _groups_per_block(groups, kernel.shape[2])
    blocks = groups // joined
    parts = (x, _block_diagonal(kernel, groups, joined))
    if blocks <= _MAX_UNROLLED:
        split = zip(*(jnp.split(part, blocks, -1) for part in parts), strict=True)
        return jnp.concatenate([dense_conv2d(*each, strides, pads) for each in split], -1)
    # In a loop, or XLA compiles one convolution per block.
    stacked = [jnp.moveaxis(p.reshape(*p.shape[:-1], blocks, -1), -2, 0) for p in parts]
    y = lax.map(lambda each: dense_conv2d(*each, strides, pads), stacked)
    y = jnp.moveaxis(y, 0, -2)
    return y.reshape(*y.shape[:-2], -1)


def _groups_per_block(groups: int, channels: int) -> int:
    """Return the largest divisor of `groups` whose channels fit into one block."""
    fitting = max(1, _CHANNELS_PER_BLOCK // channels)
    return max(n for n in range(1, min(groups, fitting) + 1) if groups % n == 0)


def _block_diagonal(
    kernel: GroupedKernel, groups: int, joined: int
) -> Float[Array, "kernel_height kernel_width block_channels features"]:
    """Return kernels of joined groups, zero where input and output groups differ."""
    if joined == 1:
        return kernel
    _, _, channels, features = kernel.shape
    input_group = np.arange(joined * channels) // channels
    output_group = np.arange(features) // (features // groups) % joined
    is_same = input_group[:, None] == output_group
    return jnp.where(is_same, jnp.tile(kernel, (1, 1, joined, 1)), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _depthwise(x: Images, kernel: DepthwiseKernel, strides: Pair, pads: Pads) -> Images:
    """Convolve every channel with its own kernel."""
    padded = _pad(x, pads, (1, 1))
    size = [(padded.shape[1 + d] - kernel.shape[d]) // strides[d] + 1 for d in (0, 1)]
    return _sum_of_taps(padded, kernel, size, strides)


def _depthwise_forward(
    x: Images, kernel: DepthwiseKernel, strides: Pair, pads: Pads
) -> Any:
    return _depthwise(x, kernel, strides, pads), (x, kernel)


def _depthwise_backward(
    strides: Pair, pads: Pads, saved: tuple[Images, DepthwiseKernel], dy: Images
) -> tuple[Images, DepthwiseKernel]:
    x, kernel = saved
    around = input_gradient_pads(x.shape, kernel.shape, dy.shape, strides, pads)
    dilated = _pad(dy, around, strides)
    dx = _sum_of_taps(dilated, kernel[::-1, ::-1], x.shape[1:3], (1, 1))
    return dx, _depthwise_kernel_gradient(x, kernel.shape, dy, strides, pads)


_depthwise.defvjp(_depthwise_forward, _depthwise_backward)


def _pad(x: Images, pads: Pads, dilation: Pair) -> Images:
    """Pad and dilate with zeros; negative pads crop."""
    inner = [(*pads[d], dilation[d] - 1) for d in (0, 1)]
    padded = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *inner, (0, 0, 0)])
    return computed_once(padded)  # or every tap would test whether it is in the padding


def _sum_of_taps(
    x: Images, kernel: DepthwiseKernel, size: Sequence[int], strides: Pair
) -> Images:
    height, width = kernel.shape[:2]
    taps = [
        _tap(x, (i, j), size, strides) * kernel[i, j, 0]
        for i in range(height)
        for j in range(width)
    ]
    return functools.reduce(jnp.add, taps)


def _tap(
    x: Float[Array, "*batch height width channels"],
    start: Pair,
    size: Sequence[int],
    strides: Pair,
) -> Float[Array, "*batch out_height out_width channels"]:
    """Return the pixels that one element of the kernel is multiplied with."""
    lead = x.ndim - 3
    ends = [start[d] + (size[d] - 1) * strides[d] + 1 for d in (0, 1)]
    return lax.slice(
        x,
        (*(0,) * lead, *start, 0),
        (*x.shape[:lead], *ends, x.shape[-1]),
        (*(1,) * lead, *strides, 1),
    )


def _depthwise_kernel_gradient(
    x: Images, shape: Sequence[int], dy: Images, strides: Pair, pads: Pads
) -> DepthwiseKernel:
    """Sum x times dy row by row, and over the columns only at the end.

    Summing over all pixels with XLA's own reductions takes 5 times as long.
    """
    padded = _pad(x, pads, (1, 1))
    samples, rows, columns, channels = dy.shape
    taps = [(i, j) for i in range(shape[0]) for j in range(shape[1])]

    def add(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
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
