"""What the device does to images, as the first thing in the compiled loop.

The same arithmetic as `millrace.data.augment` on the host, in the same order: the values
are scaled first, so that the zeros around a picture stand for its mean.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

PAD = 4
_STREAM = 0x5EED  # sets these random numbers apart from those of the layers


def standardize(images: jax.Array) -> jax.Array:
    """Give each picture mean 0 and standard deviation 1, as `augment.standardize` does."""
    images = images.astype(jnp.float32)
    axes = (1, 2, 3)
    floor = 1 / math.sqrt(math.prod(images.shape[1:]))
    std = jnp.maximum(images.std(axes, keepdims=True), floor)
    return (images - images.mean(axes, keepdims=True)) / std


def normalize(images: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """Scale bytes to 0–1 and normalize each channel, as `augment.normalize` does."""
    scale = jnp.array([1 / (255 * s) for s in std], jnp.float32)
    offset = jnp.array([m / s for m, s in zip(mean, std, strict=True)], jnp.float32)
    return images.astype(jnp.float32) * scale - offset


def random_flip(images: jax.Array, key: jax.Array) -> jax.Array:
    """Mirror each picture, left to right, with probability one half."""
    key = jax.random.fold_in(key, _STREAM)
    flipped = jax.random.bernoulli(key, 0.5, (images.shape[0], 1, 1, 1))
    return jnp.where(flipped, images[:, :, ::-1], images)


def random_crop_and_flip(images: jax.Array, key: jax.Array) -> jax.Array:
    """Put zeros around each picture, cut its size out somewhere, and mirror every other."""
    count = images.shape[0]
    place, side = jax.random.split(jax.random.fold_in(key, _STREAM))
    top, left = jax.random.randint(place, (2, count), 0, 2 * PAD + 1)
    return crop_and_flip(images, top, left, jax.random.bernoulli(side, 0.5, (count,)))


def crop_and_flip(
    images: jax.Array, top: jax.Array, left: jax.Array, flipped: jax.Array
) -> jax.Array:
    """Cut each picture out of itself padded with zeros, and mirror it where `flipped`.

    One gather does it all: what lies outside a picture is filled with zeros.
    """
    count, height, width, _ = images.shape
    across = jnp.arange(width)
    across = jnp.where(flipped[:, None], across[::-1], across)
    rows = top[:, None] + jnp.arange(height) - PAD
    columns = left[:, None] + across - PAD
    # A negative index would count from the end; beyond the end, zeros are filled in.
    rows = jnp.where(rows < 0, height, rows)
    columns = jnp.where(columns < 0, width, columns)
    pictures = jnp.arange(count)[:, None, None]
    return images.at[pictures, rows[:, :, None], columns[:, None, :]].get(
        mode="fill", fill_value=0
    )
