"""Convolution on CPU with gradients that are fast inside a loop.

XLA:CPU chooses its fast convolution layout only at the top level of a program. Inside a
loop, the gradients that JAX derives run 25 to 45 times slower (3x3, 64 channels, 56x56,
forward and backward: 97 ms outside a scan, 4,503 ms inside). Written as convolutions that
already have the fast layout, they take 46 ms anywhere.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

LAYOUT = ("NHWC", "HWIO", "NHWC")
Pair = tuple[int, int]
Pads = tuple[Pair, Pair]
"""(before, after) for height and width."""

Images = Float[Array, "batch height width channels"]
Kernel = Float[Array, "kernel_height kernel_width channels features"]
Outputs = Float[Array, "batch out_height out_width features"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dense_conv2d(x: Images, kernel: Kernel, strides: Pair, pads: Pads) -> Outputs:
    """Convolve float32 images."""
    if _is_pointwise(kernel.shape, pads):
        return _product(_subsample(x, strides), kernel[0, 0], 0)
    return _convolve(x, kernel, strides, pads)


def _convolve(
    x: Images, kernel: Kernel, strides: Pair, pads: Pads, dilation: Pair = (1, 1)
) -> Outputs:
    """Convolve; pad images that are smaller than the kernel first.

    XLA:CPU is slow for those: a 3x3 of 512 channels over 8 images of 2x2 took 91 ms,
    padded beforehand 5 ms.
    """
    if any(x.shape[1 + d] < kernel.shape[d] for d in (0, 1)):
        around = [(*pads[d], dilation[d] - 1) for d in (0, 1)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *around, (0, 0, 0)])
        # Without the barrier, XLA moves the padding back into the convolution.
        x, pads, dilation = lax.optimization_barrier(x), ((0, 0), (0, 0)), (1, 1)
    return lax.conv_general_dilated(
        x, kernel, strides, pads, lhs_dilation=dilation, dimension_numbers=LAYOUT
    )


def _forward(x: Images, kernel: Kernel, strides: Pair, pads: Pads) -> Any:
    return dense_conv2d(x, kernel, strides, pads), (x, kernel)


def _backward(
    strides: Pair, pads: Pads, saved: tuple[Images, Kernel], dy: Outputs
) -> tuple[Images, Kernel]:
    x, kernel = saved
    dy = computed_once(dy)
    return (
        _input_gradient(x.shape, kernel, dy, strides, pads),
        _kernel_gradient(x, kernel.shape, dy, strides, pads),
    )


dense_conv2d.defvjp(_forward, _backward)


def computed_once(x: Array) -> Array:
    """Make XLA:CPU compute `x` once even if several operations read it.

    It recomputes a cheap elementwise operation, such as adding a bias, for every reader,
    here even pixel by pixel in transposed order. It does not do so for a selection
    between two arrays. The values stay the same, NaN included.
    """
    return jnp.where(x != x, jnp.nan, x)


def _input_gradient(
    shape: Sequence[int], kernel: Kernel, dy: Outputs, strides: Pair, pads: Pads
) -> Images:
    """Convolve the dilated `dy` with the flipped, transposed kernel."""
    if _is_pointwise(kernel.shape, pads):
        return _undo_subsample(_product(dy, kernel[0, 0], 1), shape, strides)
    return _convolve(
        dy,
        kernel[::-1, ::-1].transpose(0, 1, 3, 2),
        (1, 1),
        input_gradient_pads(shape, kernel.shape, dy.shape, strides, pads),
        strides,
    )


def input_gradient_pads(
    x: Sequence[int], kernel: Sequence[int], dy: Sequence[int], strides: Pair, pads: Pads
) -> Pads:
    """Return the padding of the dilated `dy`, from the shapes of x, kernel and dy."""

    def around(dim: int) -> Pair:
        before = kernel[dim] - 1 - pads[dim][0]
        dilated = (dy[1 + dim] - 1) * strides[dim] + 1
        return before, x[1 + dim] + kernel[dim] - 1 - dilated - before

    return around(0), around(1)


def _kernel_gradient(
    x: Images, shape: Sequence[int], dy: Outputs, strides: Pair, pads: Pads
) -> Kernel:
    """Convolve `x` with `dy`, with the samples in the place of channels."""
    if _is_pointwise(shape, pads):
        flat = _subsample(x, strides).reshape(-1, shape[2])
        return (flat.T @ dy.reshape(-1, shape[3]))[None, None]

    def around(dim: int) -> Pair:
        dilated = (dy.shape[1 + dim] - 1) * strides[dim] + 1
        before = pads[dim][0]
        return before, dilated + shape[dim] - 1 - x.shape[1 + dim] - before

    gradient = lax.conv_general_dilated(
        x.transpose(3, 1, 2, 0),
        dy.transpose(1, 2, 0, 3),
        (1, 1),
        (around(0), around(1)),
        rhs_dilation=strides,
        dimension_numbers=LAYOUT,
    )
    return gradient.transpose(1, 2, 0, 3)


def _is_pointwise(shape: Sequence[int], pads: Pads) -> bool:
    return tuple(shape[:2]) == (1, 1) and not any(map(any, pads))


def _product(x: Images, matrix: Float[Array, "rows columns"], dim: int) -> Outputs:
    return lax.dot_general(x, matrix, (((x.ndim - 1,), (dim,)), ((), ())))


def _subsample(x: Images, strides: Pair) -> Images:
    return x if strides == (1, 1) else x[:, :: strides[0], :: strides[1]]


def _undo_subsample(dx: Images, shape: Sequence[int], strides: Pair) -> Images:
    """Insert zeros where ``_subsample`` dropped rows and columns."""
    if strides == (1, 1):
        return dx
    gaps = [
        (0, shape[1 + d] - ((dx.shape[1 + d] - 1) * strides[d] + 1), strides[d] - 1)
        for d in (0, 1)
    ]
    return lax.pad(dx, jnp.zeros((), dx.dtype), [(0, 0, 0), *gaps, (0, 0, 0)])
