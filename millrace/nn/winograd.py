"""Convolutions of 3x3 on CPU with fewer multiplications: Winograd's F(2x2, 3x3).

Four outputs of a convolution take 36 multiplications per pair of channels. Here they take
16: images and kernel are transformed, multiplied elementwise and added up over channels,
which is a matrix product for each of the 16 elements, and the sums are transformed back.
The transforms only add, subtract and halve, so that rounding errors stay those of other
ways to add up the products.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from millrace.nn.dense_convolution import Images, Outputs, Pads

TRANSFORMED = "transformed"
"""Name of a transformed kernel among the weights of a layer."""

Transformed = Float[Array, "16 channels features"]

_SIZE = 2
"""Outputs of a tile along a side."""
_TILE = _SIZE + 2
"""Inputs of a tile along a side."""

_FROM_IMAGE = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
_FROM_KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
_TO_OUTPUT = ((1, 1, 1, 0), (0, 1, -1, -1))

_MIN_CHANNELS = 32
_MIN_TILES = 16
"""With fewer tiles, reading the kernel takes longer than computing with it, and the
transformed one is larger."""


def is_worthwhile(shape: Sequence[int]) -> bool:
    """Whether a kernel of this shape is faster transformed, if images are large enough."""
    return tuple(shape[:2]) == (3, 3) and min(shape[2:]) >= _MIN_CHANNELS


def transform_kernel(
    kernel: np.ndarray,  # (3, 3, channels, features)
) -> np.ndarray:
    """Return a kernel for ``winograd_conv2d``: (16, channels, features)."""
    wide = np.einsum("ai,bj,ijcf->abcf", _FROM_KERNEL, _FROM_KERNEL, kernel, optimize=True)
    return wide.astype(kernel.dtype).reshape(_TILE**2, *kernel.shape[2:])


def pays_off(x: Images, pads: Pads) -> bool:
    """Whether images are large enough for a transformed kernel."""
    return x.shape[0] * math.prod(_count_tiles(x.shape, pads)) >= _MIN_TILES


def winograd_conv2d(x: Images, kernel: Transformed, pads: Pads) -> Outputs:
    """Convolve float32 images, with strides of 1, with a transformed kernel of 3x3."""
    batch, channels, features = x.shape[0], x.shape[-1], kernel.shape[-1]
    down, right = _count_tiles(x.shape, pads)
    tiles = _transform_images(x, pads, (down, right))
    products = lax.dot_general(
        lax.optimization_barrier(tiles).reshape(_TILE**2, -1, channels),
        kernel,
        (((2,), (1,)), ((0,), (0,))),
    )
    # Without the barriers, XLA computes the transforms again for every product.
    sums = lax.optimization_barrier(products)
    sums = sums.reshape(_TILE, _TILE, batch, down, right, features)
    columns = [_combine(_TO_OUTPUT, [row[n] for row in sums]) for n in range(_TILE)]
    rows = [_combine(_TO_OUTPUT, [column[n] for column in columns]) for n in range(_SIZE)]
    y = jnp.stack([jnp.stack(row, 3) for row in rows], 2)
    y = y.reshape(batch, _SIZE * down, _SIZE * right, features)
    return y[:, : _count_outputs(x.shape, pads, 0), : _count_outputs(x.shape, pads, 1)]


def _transform_images(
    x: Images, pads: Pads, tiles: tuple[int, int]
) -> Float[Array, "16 batch down right channels"]:
    around = []
    for dim in (0, 1):
        covered = _SIZE * tiles[dim] + 2
        around.append((pads[dim][0], covered - x.shape[1 + dim] - pads[dim][0], 0))
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *around, (0, 0, 0)])
    last = [_SIZE * (count - 1) + 1 for count in tiles]
    inputs = [
        [x[:, i : i + last[0] : _SIZE, j : j + last[1] : _SIZE] for j in range(_TILE)]
        for i in range(_TILE)
    ]
    columns = [
        _combine(_FROM_IMAGE, [inputs[i][j] for i in range(_TILE)]) for j in range(_TILE)
    ]
    rows = [
        _combine(_FROM_IMAGE, [columns[j][i] for j in range(_TILE)]) for i in range(_TILE)
    ]
    return jnp.stack([element for row in rows for element in row])


def _combine(matrix: Sequence[Sequence[int]], parts: Sequence[Array]) -> list[Array]:
    """Multiply a matrix of 0, 1 and -1 with a vector of arrays."""
    sums = []
    for row in matrix:
        total: Array | None = None
        for factor, part in zip(row, parts, strict=True):
            if factor:
                signed = part if factor > 0 else -part
                total = signed if total is None else total + signed
        assert total is not None
        sums.append(total)
    return sums


def _count_outputs(shape: Sequence[int], pads: Pads, dim: int) -> int:
    return shape[1 + dim] + sum(pads[dim]) - 2


def _count_tiles(shape: Sequence[int], pads: Pads) -> tuple[int, int]:
    down, right = (-(-_count_outputs(shape, pads, dim) // _SIZE) for dim in (0, 1))
    return down, right
