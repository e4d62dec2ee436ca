"""Operations on batches of bytes, with the results of Pillow, each sample on its own.

Computing every operation for every sample would be wasteful, and a branch per sample cannot
be vectorized. So each operation is one of three, and an identity in the other two: a gather
(`warp`), a blend with another version of the image (`blend`), or a table (`look_up`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

Images = UInt8[Array, "batch height width channels"]
PerSample = Float[Array, " batch"]

BLACK, MEAN, GRAY, SMOOTH = range(4)
"""What `blend` starts from: brightness, contrast, saturation and sharpness."""

_FIXED = 1 << 16  # Pillow computes coordinates in units of 1/65536 pixel
_NUM_LEVELS = 256


def materialize(images: jax.Array) -> jax.Array:
    """Keep XLA from computing bytes again for each of their uses."""

    def copy_rows(images: jax.Array) -> jax.Array:
        # XLA drops barriers on a CPU, but it does not fuse loops.
        zero = images.reshape(-1)[0] & 0
        return jax.lax.map(lambda row: row | zero, images)

    return jax.lax.platform_dependent(
        images, cpu=copy_rows, default=jax.lax.optimization_barrier
    )


# Geometry


def warp(images: Images, matrix: Float[Array, "batch 6"]) -> Images:
    """Move pixels: each is that at ``(a x + b y + c, d x + e y + f)``, or black outside.

    The nearest pixel is taken, in Pillow's fixed-point arithmetic.

    Args:
        images: The images.
        matrix: a, b, c, d, e and f of each image.
    """
    count, height, width, _ = images.shape
    a, b, c, d, e, f = matrix.T
    x, y = jnp.arange(width), jnp.arange(height)[:, None]
    samples = jnp.arange(count)[:, None, None]
    columns = _source_positions(a, b, c, x, y)
    rows = _source_positions(d, e, f, x, y)
    # Negative indices would count from the end; past the end, zeros are filled in.
    columns = jnp.where(columns < 0, width, columns)
    rows = jnp.where(rows < 0, height, rows)
    return images.at[samples, rows, columns].get(mode="fill", fill_value=0)


def _source_positions(
    by_x: PerSample, by_y: PerSample, offset: PerSample, x: Array, y: Array
) -> Int[Array, "batch height width"]:
    """Return the coordinates of the pixels to take, rounded down."""

    def fixed(value: PerSample) -> Int[Array, "batch 1 1"]:
        return jnp.floor(value * _FIXED + 0.5).astype(jnp.int32)[:, None, None]

    # Coordinates are those of the centers of pixels.
    start = fixed(offset + 0.5 * by_x + 0.5 * by_y)
    return (fixed(by_x) * x + fixed(by_y) * y + start) >> 16


def rotation(angle: PerSample, height: int, width: int) -> list[PerSample]:
    """Return the rows of the matrix that turns images about their center.

    Args:
        angle: Degrees, counterclockwise.
        height: Height of the images.
        width: Width of the images.
    """
    angle = -jnp.deg2rad(angle)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x, y = width / 2, height / 2
    return [cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y]


# Blends


def blend(
    images: Images, start: Int[Array, " batch"], factor: PerSample, *, sharpen: bool = True
) -> Images:
    """Move each image away from another version of itself; a factor of 1 changes nothing.

    Args:
        images: The images.
        start: What a factor of 0 gives: BLACK, MEAN, GRAY or SMOOTH.
        factor: How far to go; above 1, beyond the image itself.
        sharpen: Whether `start` may be SMOOTH.
    """
    start, factor = start[:, None, None, None], factor[:, None, None, None]
    gray = to_gray(images)
    pixels = gray.shape[1] * gray.shape[2]
    total = gray.sum((1, 2, 3), keepdims=True)
    mean = (2 * total + pixels) // (2 * pixels)  # rounded
    other = jnp.where(start == MEAN, mean, jnp.where(start == GRAY, gray, 0))
    if sharpen:
        other = jnp.where(start == SMOOTH, smooth(images), other)
    other = other.astype(jnp.float32)
    result = other + factor * (images.astype(jnp.float32) - other)
    return jnp.clip(result, 0, 255).astype(jnp.uint8)  # rounded down, as in Pillow


def to_gray(images: Images) -> Int[Array, "batch height width 1"]:
    """Return the brightness of each pixel."""
    wide = images.astype(jnp.int32)
    if images.shape[-1] == 1:
        return wide
    weights = (19595, 38470, 7471)  # of red, green and blue, in units of 1/65536
    total = (wide * jnp.array(weights)).sum(-1, keepdims=True)
    return (total + (1 << 15)) >> 16


def smooth(images: Images) -> Images:
    """Average each pixel, with weight 5, and its 8 neighbors; the border stays."""
    _, height, width, _ = images.shape
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0))).astype(jnp.int32)
    rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
    total = (total + 4 * images.astype(jnp.int32)).astype(jnp.float32)
    average = jnp.floor(total * (1 / 13) + 0.5).astype(jnp.uint8)
    y, x = jnp.arange(height)[:, None, None], jnp.arange(width)[:, None]
    is_inside = (y > 0) & (y < height - 1) & (x > 0) & (x < width - 1)
    return jnp.where(is_inside, average, images)


# Tables

Tables = UInt8[Array, "batch channels 256"]


def look_up(images: Images, tables: Tables) -> Images:
    """Replace each value by that in the table of its sample and channel."""
    positions = _table_positions(images)
    return tables.reshape(-1).at[positions].get(mode="promise_in_bounds")


def histograms(images: Images) -> Int[Array, "batch channels 256"]:
    """Count the values of each channel."""
    # On a GPU, many values of a scatter would wait for the same counter. On a CPU, the
    # product takes 30 times as long.
    return jax.lax.platform_dependent(
        images, cpu=_count_by_scatter, default=_count_by_product
    )


def _count_by_scatter(images: Images) -> Int[Array, "batch channels 256"]:
    count, _, _, channels = images.shape
    counts = jnp.zeros(count * channels * _NUM_LEVELS, jnp.int32)
    counts = counts.at[_table_positions(images)].add(1, mode="promise_in_bounds")
    return counts.reshape(count, channels, _NUM_LEVELS)


def _count_by_product(images: Images) -> Int[Array, "batch channels 256"]:
    """Multiply one-hot matrices of the upper and the lower four bits."""
    count, height, width, channels = images.shape
    values = images.reshape(count, height * width, channels).transpose(0, 2, 1)
    nibbles = jnp.arange(16, dtype=jnp.uint8)
    high = ((values >> 4)[..., None] == nibbles).astype(jnp.bfloat16)
    low = ((values & 15)[..., None] == nibbles).astype(jnp.bfloat16)
    # Counts up to 2**24 are exact in float32.
    counts = jnp.einsum("scph,scpl->schl", high, low, preferred_element_type=jnp.float32)
    return counts.reshape(count, channels, _NUM_LEVELS).astype(jnp.int32)


def _table_positions(images: Images) -> Int[Array, "batch height width channels"]:
    """Return the position of each value in the tables of all samples and channels."""
    count, _, _, channels = images.shape
    first = jnp.arange(count * channels).reshape(count, 1, 1, channels) * _NUM_LEVELS
    return first + images


def posterize(bits: Int[Array, " batch"]) -> Int[Array, "batch 1 256"]:
    """Keep only the highest bits of values."""
    mask = 256 - (1 << (8 - bits))
    return _levels() & mask[:, None, None]


def solarize(threshold: PerSample) -> Int[Array, "batch 1 256"]:
    """Invert values of at least the threshold."""
    levels = _levels()
    return jnp.where(levels < threshold[:, None, None], levels, 255 - levels)


def autocontrast(counts: Int[Array, "batch channels 256"]) -> Array:
    """Stretch the values of each channel to 0–255."""
    levels = _levels()
    present = counts > 0
    low = jnp.argmax(present, -1, keepdims=True)
    high = 255 - jnp.argmax(present[..., ::-1], -1, keepdims=True)
    stretched = jnp.clip((levels - low) * 255 // jnp.maximum(high - low, 1), 0, 255)
    return jnp.where(high > low, stretched, levels)


def equalize(counts: Int[Array, "batch channels 256"]) -> Array:
    """Make all values of each channel about equally frequent."""
    high = 255 - jnp.argmax((counts > 0)[..., ::-1], -1, keepdims=True)
    last = jnp.take_along_axis(counts, high, -1)
    step = (counts.sum(-1, keepdims=True) - last) // 255
    below = jnp.cumsum(counts, -1) - counts
    table = jnp.minimum((step // 2 + below) // jnp.maximum(step, 1), 255)
    return jnp.where(step > 0, table, _levels())


def _levels() -> Int[Array, "256"]:
    return jnp.arange(_NUM_LEVELS, dtype=jnp.int32)
