"""Two-dimensional convolution, as XLA has it where that is fast.

On CPU, inside a loop, it is not: see ``dense_convolution`` and ``grouped_convolution``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from millrace.nn.dense_convolution import LAYOUT, Pads, Pair, dense_conv2d
from millrace.nn.grouped_convolution import grouped_conv2d
from millrace.nn.strided_convolution import folded_conv2d, is_worth_folding


class EmptyOutputError(ValueError):
    """Raised where the images are too small for a kernel."""


def conv2d(
    x: jax.Array,
    kernel: jax.Array,
    *,
    strides: Pair = (1, 1),
    padding: str | Pads = "SAME",
    groups: int = 1,
    as_product: bool = False,
) -> jax.Array:
    """Convolve images (batch, height, width, channels) with a (h, w, in, out) kernel.

    With groups, channels and features are divided into that many parts, and each part
    of the features sees only its part of the channels: the kernel is (h, w, in / groups,
    out). As many groups as channels is a depthwise convolution. One of single pixels can,
    off the CPU, be computed `as_product`, which XLA joins with what is around it.
    """
    check_groups(x.shape[-1], kernel.shape[3], groups)
    if kernel.shape[2] * groups != x.shape[-1]:
        raise ValueError(
            f"{x.shape[-1]} channels in {groups} groups need a kernel of "
            f"{x.shape[-1] // groups} channels, got one of {kernel.shape[2]}."
        )
    if x.dtype != kernel.dtype:  # XLA says so too, but the ways for a CPU would not
        raise TypeError(
            f"A convolution needs images and kernel of one type, got {x.dtype} and "
            f"{kernel.dtype}."
        )
    pads = padding_pairs(x.shape[1:3], kernel.shape[:2], strides, padding)
    if any(x.shape[1 + d] + sum(pads[d]) < kernel.shape[d] for d in (0, 1)):
        raise EmptyOutputError(
            f"Images of {x.shape[1]} x {x.shape[2]}, padded by {pads}, are smaller than "
            f"the kernel of {kernel.shape[0]} x {kernel.shape[1]}: nothing would be left. "
            'Give larger images, or use padding "SAME".'
        )
    if jax.default_backend() != "cpu":
        if groups == 1 and is_worth_folding(x.shape[-1], strides):
            return folded_conv2d(x, kernel, strides, pads)
        is_pointwise = kernel.shape[:2] == strides == (1, 1) and not any(map(any, pads))
        if as_product and is_pointwise and groups == 1:
            return jnp.tensordot(x, kernel[0, 0], 1)
        return lax.conv_general_dilated(
            x,
            kernel,
            strides,
            pads,
            dimension_numbers=LAYOUT,
            feature_group_count=groups,
        )
    # Eigen has no 16-bit convolutions; XLA would convert around every one of them.
    wide, wide_kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    if groups == 1:
        y: jax.Array = dense_conv2d(wide, wide_kernel, strides, pads)
    else:
        y = grouped_conv2d(wide, wide_kernel, strides, pads, groups)
    return y.astype(x.dtype)


def check_groups(channels: int, features: int, groups: int) -> None:
    """Raise unless channels and features can be divided into so many groups."""
    if groups < 1 or channels % groups or features % groups:
        raise ValueError(
            f"groups must divide the channels ({channels}) and the features ({features}) "
            f"of a convolution, got {groups}."
        )


def padding_pairs(
    size: Any, kernel: Any, strides: Pair, padding: str | Pads
) -> tuple[Pair, Pair]:
    """Write a padding out as (before, after) for height and width."""
    if not isinstance(padding, str):
        return padding
    first, second = lax.padtype_to_pads(size, kernel, strides, padding)
    return (int(first[0]), int(first[1])), (int(second[0]), int(second[1]))
