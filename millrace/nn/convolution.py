"""Two-dimensional convolution: XLA's own where it is fast, ours where it is not.

XLA:CPU is slow inside a loop: see ``dense_convolution`` and ``grouped_convolution``.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from millrace.nn import winograd
from millrace.nn.dense_convolution import (
    LAYOUT,
    Images,
    Kernel,
    Outputs,
    Pads,
    Pair,
    dense_conv2d,
)
from millrace.nn.grouped_convolution import grouped_conv2d

_MAX_CHANNELS_TO_FOLD = 4
"""Only the first convolution of a network has this few (3 for RGB images)."""


_IS_PORTABLE: ContextVar[bool] = ContextVar("is_portable", default=False)


@contextlib.contextmanager
def portable_convolutions() -> Iterator[None]:
    """Trace convolutions as single operations of XLA, for a program that runs elsewhere.

    Otherwise, the device of this process decides how a convolution is computed.
    """
    token = _IS_PORTABLE.set(True)
    try:
        yield
    finally:
        _IS_PORTABLE.reset(token)


class EmptyOutputError(ValueError):
    """Raised when images are smaller than the kernel, so that no output is left."""


def conv2d(
    x: Images,
    kernel: Float[Array, "kernel_height kernel_width group_channels features"],
    *,
    strides: Pair = (1, 1),
    padding: str | Pads = "SAME",
    groups: int = 1,
    as_product: bool = False,
    transformed: winograd.Transformed | None = None,
) -> Outputs:
    """Convolve images with a kernel.

    Args:
        x: Images, channels last.
        kernel: In the dtype of `x`; it has ``channels / groups`` input channels.
        strides: For height and width.
        padding: "SAME", "VALID", or (before, after) for height and width.
        groups: Parts into which channels and features are divided; each part of the
            features sees only its part of the channels. One group per channel is a
            depthwise convolution.
        as_product: Compute a 1x1 convolution as a matrix product, except on CPU. XLA
            fuses a product with the operations around it, but not a convolution.
        transformed: The kernel from ``winograd.transform_kernel``, for CPUs.
    """
    _check_operands(x, kernel, groups)
    pads = padding_pairs(x.shape[1:3], kernel.shape[:2], strides, padding)
    if any(x.shape[1 + d] + sum(pads[d]) < kernel.shape[d] for d in (0, 1)):
        raise EmptyOutputError(
            f"Images of {x.shape[1]} x {x.shape[2]}, padded by {pads}, are smaller than "
            f"the kernel of {kernel.shape[0]} x {kernel.shape[1]}, so the output would be "
            'empty. Use larger images or padding "SAME".'
        )
    if _IS_PORTABLE.get():
        return _xla_conv2d(x, kernel, strides, pads, groups)
    if jax.default_backend() != "cpu":
        if groups == 1 and _is_worth_folding(x.shape[-1], strides):
            return space_to_depth_conv2d(x, kernel, strides, pads)
        is_pointwise = kernel.shape[:2] == strides == (1, 1) and not any(map(any, pads))
        if as_product and is_pointwise and groups == 1:
            return jnp.tensordot(x, kernel[0, 0], 1)
        return _xla_conv2d(x, kernel, strides, pads, groups)
    if transformed is not None and strides == (1, 1) and winograd.pays_off(x, pads):
        return winograd.winograd_conv2d(x, transformed, pads)
    # Eigen has no 16-bit convolutions; XLA would convert around every one of them.
    wide, wide_kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    if groups == 1:
        y: Array = dense_conv2d(wide, wide_kernel, strides, pads)
    else:
        y = grouped_conv2d(wide, wide_kernel, strides, pads, groups)
    return y.astype(x.dtype)


def _xla_conv2d(
    x: Images, kernel: Array, strides: Pair, pads: Pads, groups: int
) -> Outputs:
    return lax.conv_general_dilated(
        x, kernel, strides, pads, dimension_numbers=LAYOUT, feature_group_count=groups
    )


def _check_operands(x: Array, kernel: Array, groups: int) -> None:
    check_groups(x.shape[-1], kernel.shape[3], groups)
    if kernel.shape[2] * groups != x.shape[-1]:
        raise ValueError(
            f"{x.shape[-1]} channels in {groups} groups need a kernel with "
            f"{x.shape[-1] // groups} input channels, got {kernel.shape[2]}."
        )
    # XLA checks this too, but the CPU path would convert silently.
    if x.dtype != kernel.dtype:
        raise TypeError(
            "A convolution needs images and kernel of the same dtype, got "
            f"{x.dtype} and {kernel.dtype}."
        )


def check_groups(channels: int, features: int, groups: int) -> None:
    """Raise unless `groups` divides both channels and features."""
    if groups < 1 or channels % groups or features % groups:
        raise ValueError(
            f"groups must divide the channels ({channels}) and the features ({features}) "
            f"of a convolution, got {groups}."
        )


def padding_pairs(
    size: Sequence[int], kernel: Sequence[int], strides: Pair, padding: str | Pads
) -> Pads:
    """Return a padding as (before, after) for height and width."""
    if not isinstance(padding, str):
        return padding
    first, second = lax.padtype_to_pads(size, kernel, strides, padding)
    return (int(first[0]), int(first[1])), (int(second[0]), int(second[1]))


# --- space to depth ---
# The first convolution of a network has three channels, while the matrix units of a GPU
# want many more: XLA pads with zeros. Instead, the block of pixels that one stride passes
# over becomes one pixel with the channels of all, and the kernel is cut up the same way.
# The same products are summed.


def _is_worth_folding(channels: int, strides: Pair) -> bool:
    return channels <= _MAX_CHANNELS_TO_FOLD and min(strides) > 1


def space_to_depth_conv2d(x: Images, kernel: Kernel, strides: Pair, pads: Pads) -> Outputs:
    """Convolve with strides as a convolution of more channels without strides."""
    blocks = [-(-kernel.shape[dim] // strides[dim]) for dim in (0, 1)]
    edges, margins = [], []
    for dim in (0, 1):
        padded = x.shape[1 + dim] + sum(pads[dim])
        outputs = (padded - kernel.shape[dim]) // strides[dim] + 1
        used = (outputs + blocks[dim] - 1) * strides[dim]
        edges.append((pads[dim][0], used - x.shape[1 + dim] - pads[dim][0], 0))
        margins.append((0, blocks[dim] * strides[dim] - kernel.shape[dim]))
    zero = jnp.zeros((), x.dtype)
    x = lax.pad(x, zero, [(0, 0, 0), *edges, (0, 0, 0)])
    kernel = jnp.pad(kernel, (*margins, (0, 0), (0, 0)))
    # With the features in the place of the batch, a kernel folds as images do.
    folded_kernel = _fold_pixels(kernel.transpose(3, 0, 1, 2), strides)
    return lax.conv_general_dilated(
        _fold_pixels(x, strides),
        folded_kernel.transpose(1, 2, 3, 0),
        (1, 1),
        "VALID",
        dimension_numbers=LAYOUT,
    )


def _fold_pixels(
    x: Images, strides: Pair
) -> Float[Array, "batch blocks_down blocks_right block_channels"]:
    batch, height, width, channels = x.shape
    (down, right), size = strides, strides[0] * strides[1] * channels
    x = x.reshape(batch, height // down, down, width // right, right, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(
        batch, height // down, width // right, size
    )
