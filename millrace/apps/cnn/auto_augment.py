"""Random operations on the device: RandAugment, TrivialAugment, color jitter, erasing.

All but erasing work on bytes, before images are scaled, and have the operations and
magnitudes of torchvision. Every sample has its own random numbers, all from one key.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import image_ops

OPERATIONS = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    *("brightness", "color", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
)
NUM_MAGNITUDES = 31
"""Magnitudes of an operation, numbered from 0."""

_INDEX = {name: number for number, name in enumerate(OPERATIONS)}
SIGNED = np.array([1 <= number <= 9 for number in range(len(OPERATIONS))])
"""Operations whose magnitude is negative in half of the cases."""
_BLENDS = {
    "brightness": image_ops.BLACK,
    "color": image_ops.GRAY,
    "contrast": image_ops.MEAN,
    "sharpness": image_ops.SMOOTH,
}
# Separate these random numbers from each other and from those of crops, blends and layers.
_OPERATION_STREAM, _JITTER_STREAM, _ERASING_STREAM = 0xA06, 0xC010, 0xE4A5

_ERASED_AREA = (0.02, 1 / 3)
_ERASED_ASPECT = 0.3  # to 1 / 0.3, height over width
_ERASING_ATTEMPTS = 10


class Choice(NamedTuple):
    """One operation for each sample."""

    operation: jax.Array
    """Numbers of the operations, in the order of OPERATIONS: (batch,)."""
    magnitude: jax.Array
    """Their magnitudes, with signs: (batch,). See `magnitude_table`."""


def magnitude_table(
    policy: Literal["randaugment", "trivialaugment"], height: int, width: int
) -> np.ndarray:  # (operations, NUM_MAGNITUDES)
    """Return the magnitudes of all operations, without signs.

    Shears are tangents, translations pixels, rotations degrees; brightness, color, contrast
    and sharpness are the distance of the factor from 1; posterize counts bits, and solarize
    has a threshold. TrivialAugment moves small images by at most their side.
    """
    wide = policy == "trivialaugment"
    shear, angle, factor, lost_bits = (0.99, 135, 0.99, 6) if wide else (0.3, 30, 0.9, 4)
    across, down = 150 / 331 * width, 150 / 331 * height
    if wide:
        across, down = min(32, width), min(32, height)
    ends = {
        **{"shear_x": shear, "shear_y": shear, "rotate": angle},
        **{"translate_x": across, "translate_y": down},
        **dict.fromkeys(_BLENDS, factor),
    }
    steps = np.linspace(0, 1, NUM_MAGNITUDES)
    table = np.zeros((len(OPERATIONS), NUM_MAGNITUDES))
    for name, end in ends.items():
        table[_INDEX[name]] = end * steps
    table[_INDEX["posterize"]] = 8 - np.round(lost_bits * steps)
    table[_INDEX["solarize"]] = 255 * (1 - steps)
    return table.astype(np.float32)


def choose_operations(
    policy: Literal["randaugment", "trivialaugment"],
    key: jax.Array,
    *,
    magnitude: int,
    shape: tuple[int, ...],  # (batch, height, width, channels)
    num_ops: int,
) -> Choice:
    """Draw `num_ops` operations for each sample, all equally likely: (num_ops, batch).

    Magnitudes are `magnitude` for RandAugment and uniformly random for TrivialAugment.
    """
    count, height, width, _ = shape
    keys = jax.random.split(_stream(key, _OPERATION_STREAM), 3)
    draws = (num_ops, count)
    operation = jax.random.randint(keys[0], draws, 0, len(OPERATIONS))
    level = jnp.full(draws, magnitude)
    if policy == "trivialaugment":
        level = jax.random.randint(keys[1], draws, 0, NUM_MAGNITUDES)
    value = jnp.asarray(magnitude_table(policy, height, width))[operation, level]
    negative = jax.random.bernoulli(keys[2], 0.5, draws) & jnp.asarray(SIGNED)[operation]
    return Choice(operation, jnp.where(negative, -value, value))


def apply_operations(
    images: jax.Array,  # uint8 (batch, height, width, channels)
    choices: Choice,  # (num_ops, batch)
) -> jax.Array:
    """Apply to each image its operations, one after the other."""

    def apply_next(images: jax.Array, choice: Choice) -> tuple[jax.Array, None]:
        return apply_operation(images, choice), None

    return image_ops.materialize(jax.lax.scan(apply_next, images, choices)[0])


def apply_operation(
    images: jax.Array,  # uint8 (batch, height, width, channels)
    choice: Choice,
) -> jax.Array:
    """Apply to each image its operation."""
    _, height, width, _ = images.shape
    start = jnp.full_like(choice.operation, image_ops.BLACK)
    for name, version in _BLENDS.items():
        start = jnp.where(choice.operation == _INDEX[name], version, start)
    is_blend = (choice.operation >= _INDEX["brightness"]) & (
        choice.operation <= _INDEX["sharpness"]
    )
    factor = jnp.where(is_blend, 1 + choice.magnitude, 1.0)
    # Without copies, XLA would blend, and build a table, for every use of the results.
    images = image_ops.materialize(image_ops.blend(images, start, factor))
    tables = image_ops.materialize(_build_tables(images, choice))
    images = image_ops.look_up(images, tables)
    return image_ops.warp(images, _build_matrix(choice, height, width))


def _build_matrix(choice: Choice, height: int, width: int) -> jax.Array:
    """Return the matrix of each sample; the identity for operations that move nothing."""
    value = choice.magnitude
    zero, one = jnp.zeros_like(value), jnp.ones_like(value)
    moved = jnp.trunc(value)  # whole pixels
    matrices = {
        "shear_x": [one, value, zero, zero, one, zero],
        "shear_y": [one, zero, zero, value, one, zero],
        "translate_x": [one, zero, -moved, zero, one, zero],
        "translate_y": [one, zero, zero, zero, one, -moved],
        "rotate": image_ops.rotation(value, height, width),
    }
    result = jnp.stack([one, zero, zero, zero, one, zero], 1)
    for name, rows in matrices.items():
        chosen = (choice.operation == _INDEX[name])[:, None]
        result = jnp.where(chosen, jnp.stack(rows, 1), result)
    return result


def _build_tables(images: jax.Array, choice: Choice) -> jax.Array:
    """Return the table of each sample and channel; the identity where there is none."""
    counts = image_ops.histograms(images)
    tables = jnp.broadcast_to(jnp.arange(256), counts.shape)
    for name, table in {
        "posterize": image_ops.posterize(choice.magnitude.astype(jnp.int32)),
        "solarize": image_ops.solarize(choice.magnitude),
        "autocontrast": image_ops.autocontrast(counts),
        "equalize": image_ops.equalize(counts),
    }.items():
        chosen = (choice.operation == _INDEX[name])[:, None, None]
        tables = jnp.where(chosen, table, tables)
    return tables.astype(jnp.uint8)


def color_jitter(
    images: jax.Array,  # uint8 (batch, height, width, channels)
    key: jax.Array,
    strength: float,
) -> jax.Array:
    """Change brightness, contrast and saturation of each image, in random order.

    The factors are uniform between 1 - strength, but at least 0, and 1 + strength.
    """
    order_key, factor_key = jax.random.split(_stream(key, _JITTER_STREAM))
    kinds = jnp.array([image_ops.BLACK, image_ops.MEAN, image_ops.GRAY])
    if images.shape[-1] == 1:
        kinds = kinds[:2]  # gray images have no saturation
    shape = (images.shape[0], len(kinds))
    order = kinds[jnp.argsort(jax.random.uniform(order_key, shape), axis=1)]
    low, high = max(0.0, 1 - strength), 1 + strength
    factors = jax.random.uniform(factor_key, shape, minval=low, maxval=high)
    for number in range(len(kinds)):
        start, factor = order[:, number], factors[:, number]
        images = image_ops.blend(images, start, factor, sharpen=False)
    return images


def random_erasing(
    images: jax.Array,  # (batch, height, width, channels)
    key: jax.Array,
    probability: float,
) -> jax.Array:
    """Set a random rectangle of each image to 0, with a probability."""
    top, bottom, left, right = _draw_rectangles(key, probability, images.shape)[..., None]
    rows, columns = jnp.arange(images.shape[1]), jnp.arange(images.shape[2])
    inside_rows = (top <= rows) & (rows < bottom)
    inside_columns = (left <= columns) & (columns < right)
    inside = inside_rows[:, :, None] & inside_columns[:, None, :]
    return jnp.where(inside[..., None], jnp.zeros((), images.dtype), images)


def _draw_rectangles(
    key: jax.Array, probability: float, shape: tuple[int, ...]
) -> jax.Array:
    """Return top, bottom, left and right edge of each rectangle: (4, batch).

    The area is uniform and the aspect ratio uniform in its logarithm. A rectangle that does
    not fit is drawn again, up to 10 times; then, nothing is erased.
    """
    count, height, width, _ = shape
    keys = jax.random.split(_stream(key, _ERASING_STREAM), 5)
    attempts = (_ERASING_ATTEMPTS, count)
    low, high = _ERASED_AREA
    area = jax.random.uniform(keys[0], attempts, minval=low, maxval=high) * height * width
    limit = -np.log(_ERASED_ASPECT)
    aspect = jnp.exp(jax.random.uniform(keys[1], attempts, minval=-limit, maxval=limit))
    rows, columns = jnp.round(jnp.sqrt(area * aspect)), jnp.round(jnp.sqrt(area / aspect))
    fits = (rows < height) & (columns < width)
    first = jnp.argmax(fits, 0)[None]
    rows = jnp.take_along_axis(rows, first, 0)[0]
    columns = jnp.take_along_axis(columns, first, 0)[0]
    erased = fits.any(0) & jax.random.bernoulli(keys[2], probability, (count,))
    top = jnp.floor(jax.random.uniform(keys[3], (count,)) * (height - rows + 1))
    left = jnp.floor(jax.random.uniform(keys[4], (count,)) * (width - columns + 1))
    edges = jnp.stack([top, top + rows, left, left + columns])
    return jnp.where(erased, edges, 0).astype(jnp.int32)


def _stream(key: jax.Array, number: int) -> jax.Array:
    return jax.random.fold_in(key, number)
