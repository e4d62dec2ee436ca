"""Convolution on CPU with gradients that are fast inside a loop.

XLA:CPU brings convolutions into its fast layout only at the top of a program, not inside
a loop; there, the gradients that JAX derives run 25 to 45 times slower (a 3x3 of 64
channels at 56x56, forward and backward: 97 ms outside a scan, 4,503 inside). Written out
as convolutions that have the fast layout to begin with, they take 46 ms anywhere.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LAYOUT = ("NHWC", "HWIO", "NHWC")
Pair = tuple[int, int]
Pads = tuple[Pair, Pair]
"""(before, after) for height and width."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dense_conv2d(x: jax.Array, kernel: jax.Array, strides: Pair, pads: Pads) -> jax.Array:
    """Convolve float32 images (batch, height, width, channels)."""
    if _is_pointwise(kernel.shape, pads):
        return _product(_thin(x, strides), kernel[0, 0], 0)
    return _convolve(x, kernel, strides, pads)


def _convolve(
    x: jax.Array, kernel: jax.Array, strides: Pair, pads: Pads, dilation: Pair = (1, 1)
) -> jax.Array:
    """Convolve; images smaller than the kernel are padded first.

    XLA:CPU has no fast way for those: a 3x3 of 512 channels over 8 images of 2x2 took 91
    ms, padded beforehand 5.
    """
    if any(x.shape[1 + d] < kernel.shape[d] for d in (0, 1)):
        around = [(*pads[d], dilation[d] - 1) for d in (0, 1)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *around, (0, 0, 0)])
        # Or XLA takes the padding back into the convolution.
        x, pads, dilation = lax.optimization_barrier(x), ((0, 0), (0, 0)), (1, 1)
    return lax.conv_general_dilated(
        x, kernel, strides, pads, lhs_dilation=dilation, dimension_numbers=LAYOUT
    )


def _forward(x: jax.Array, kernel: jax.Array, strides: Pair, pads: Pads) -> Any:
    return dense_conv2d(x, kernel, strides, pads), (x, kernel)


def _backward(strides: Pair, pads: Pads, saved: Any, dy: jax.Array) -> Any:
    x, kernel = saved
    dy = computed_once(dy)
    return (
        _input_gradient(x.shape, kernel, dy, strides, pads),
        _kernel_gradient(x, kernel.shape, dy, strides, pads),
    )


dense_conv2d.defvjp(_forward, _backward)


def computed_once(x: jax.Array) -> jax.Array:
    """Have XLA:CPU compute `x` once where several operations read it; NaN stays NaN.

    What ends in an operation on one array, such as the addition of a bias, it computes
    again for every reader, here even pixel by pixel in the order of a transposition. A
    selection between two arrays it does not.
    """
    return jnp.where(x != x, jnp.nan, x)


def _input_gradient(
    shape: Any, kernel: jax.Array, dy: jax.Array, strides: Pair, pads: Pads
) -> jax.Array:
    """A convolution of the spread-out dy with the flipped, transposed kernel."""
    if _is_pointwise(kernel.shape, pads):
        return _spread(_product(dy, kernel[0, 0], 1), shape, strides)
    return _convolve(
        dy,
        kernel[::-1, ::-1].transpose(0, 1, 3, 2),
        (1, 1),
        pads_of_input_gradient(shape, kernel.shape, dy.shape, strides, pads),
        strides,
    )


def pads_of_input_gradient(
    x: Any, kernel: Any, dy: Any, strides: Pair, pads: Pads
) -> tuple[Pair, Pair]:
    """What surrounds the spread-out dy, from the shapes of x, kernel and dy."""

    def around(dim: int) -> Pair:
        before = kernel[dim] - 1 - pads[dim][0]
        spread = (dy[1 + dim] - 1) * strides[dim] + 1
        return before, x[1 + dim] + kernel[dim] - 1 - spread - before

    return around(0), around(1)


def _kernel_gradient(
    x: jax.Array, shape: Any, dy: jax.Array, strides: Pair, pads: Pads
) -> jax.Array:
    """A convolution of x with dy in which samples play the part of channels."""
    if _is_pointwise(shape, pads):
        flat = _thin(x, strides).reshape(-1, shape[2])
        return (flat.T @ dy.reshape(-1, shape[3]))[None, None]

    def around(dim: int) -> Pair:
        spread = (dy.shape[1 + dim] - 1) * strides[dim] + 1
        before = pads[dim][0]
        return before, spread + shape[dim] - 1 - x.shape[1 + dim] - before

    gradient = lax.conv_general_dilated(
        x.transpose(3, 1, 2, 0),
        dy.transpose(1, 2, 0, 3),
        (1, 1),
        (around(0), around(1)),
        rhs_dilation=strides,
        dimension_numbers=LAYOUT,
    )
    return gradient.transpose(1, 2, 0, 3)


def _is_pointwise(shape: Any, pads: Pads) -> bool:
    return tuple(shape[:2]) == (1, 1) and not any(map(any, pads))


def _product(x: jax.Array, matrix: jax.Array, dim: int) -> jax.Array:
    return lax.dot_general(x, matrix, (((x.ndim - 1,), (dim,)), ((), ())))


def _thin(x: jax.Array, strides: Pair) -> jax.Array:
    return x if strides == (1, 1) else x[:, :: strides[0], :: strides[1]]


def _spread(dx: jax.Array, shape: Any, strides: Pair) -> jax.Array:
    """Undo ``_thin``: zeros between and after the rows and columns."""
    if strides == (1, 1):
        return dx
    gaps = [
        (0, shape[1 + d] - ((dx.shape[1 + d] - 1) * strides[d] + 1), strides[d] - 1)
        for d in (0, 1)
    ]
    return lax.pad(dx, jnp.zeros((), dx.dtype), [(0, 0, 0), *gaps, (0, 0, 0)])
