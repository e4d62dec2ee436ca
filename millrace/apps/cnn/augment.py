"""Mixup and CutMix: each sample is blended with others of its micro-batch, on the device.

The partners are the micro-batch itself, rolled along: by one for mixup and, after it, by
two for CutMix. So one key gives both the pictures and the shares of their labels.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_STREAM = 0x317  # sets these random numbers apart from those of the layers
_MIXUP_PARTNER = 1
_NUM_QUANTILES = 4096


class Mixing(NamedTuple):
    """How much is blended; see ``RecipeOptions``."""

    mixup_alpha: float = 0.0
    cutmix_lambda: float = 1.0


class Draw(NamedTuple):
    """What chance has chosen for a micro-batch; None where a kind is off."""

    shares: jax.Array | None
    """Of each sample in its blend with the one before, at least one half."""
    box: jax.Array | None
    """Top, bottom, left and right edge of what is replaced, in pixels."""


def draw(mixing: Mixing, key: jax.Array, num_samples: int, height: int, width: int) -> Draw:
    """Draw the shares of mixup and the box of CutMix.

    The box has a side of √(1 - lambda) of the picture's, its center lies anywhere, and
    what would be outside is cut off.
    """
    share_key, place_key = jax.random.split(jax.random.fold_in(key, _STREAM))
    shares = box = None
    if mixing.mixup_alpha > 0:
        shares = _larger_shares(share_key, mixing.mixup_alpha, num_samples)
    if mixing.cutmix_lambda < 1:
        sides = jnp.array([height, width])
        side = math.sqrt(1 - mixing.cutmix_lambda)
        half = jnp.array([int(height * side) // 2, int(width * side) // 2])
        center = jax.random.randint(place_key, (2,), 0, sides)
        first, last = jnp.maximum(center - half, 0), jnp.minimum(center + half, sides)
        box = jnp.stack([first[0], last[0], first[1], last[1]])
    return Draw(shares, box)


def _larger_shares(key: jax.Array, alpha: float, count: int) -> jax.Array:
    """Draw x from Beta(alpha, alpha) and return the larger of x and 1 - x.

    By looking its quantile up: JAX's own draws and rejects in a loop, for each round of
    which a GPU waits for its host.
    """
    table = jnp.asarray(_quantiles(alpha))
    place = jax.random.uniform(key, (count,)) * _NUM_QUANTILES
    below = jnp.clip(jnp.floor(place), 0, _NUM_QUANTILES - 1).astype(jnp.int32)
    part = place - below
    s = (1 - part) * table[below] + part * table[below + 1]
    return 1 - s ** (1 / alpha) / 2


@functools.cache
def _quantiles(alpha: float) -> np.ndarray:
    """Return quantiles of s, where s^(1/alpha) / 2 is the smaller of x and 1 - x.

    The density of s, (1 - s^(1/alpha) / 2)^(alpha - 1), has none of the poles that a Beta
    distribution has, so that a table serves.
    """
    s = np.linspace(0, 1, 16 * _NUM_QUANTILES + 1)
    density = (1 - s ** (1 / alpha) / 2) ** (alpha - 1)
    mass = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    wanted = np.linspace(0, 1, _NUM_QUANTILES + 1)
    return np.interp(wanted, mass / mass[-1], s).astype(np.float32)


def mix_images(images: jax.Array, drawn: Draw) -> jax.Array:
    """Blend (samples, height, width, channels) as drawn; in float32, rounded once."""
    mixed = images.astype(jnp.float32)
    if drawn.shares is not None:
        shares = drawn.shares[:, None, None, None]
        mixed = shares * mixed + (1 - shares) * jnp.roll(mixed, _MIXUP_PARTNER, 0)
    if drawn.box is not None:
        _, height, width, _ = images.shape
        top, bottom, left, right = drawn.box
        rows, columns = jnp.arange(height)[:, None], jnp.arange(width)
        inside = (top <= rows) & (rows < bottom) & (left <= columns) & (columns < right)
        other = jnp.roll(mixed, _cutmix_partner(len(images)), 0)
        mixed = jnp.where(inside[:, :, None], other, mixed)
    return mixed.astype(images.dtype)


def mix_labels(
    labels: jax.Array, drawn: Draw, height: int, width: int
) -> list[tuple[jax.Array, jax.Array]]:
    """Return the labels each sample is made of, each with its shares; they add up to 1."""
    parts = [(labels, jnp.ones(labels.shape, jnp.float32))]
    if drawn.shares is not None:
        before = jnp.roll(labels, _MIXUP_PARTNER)
        parts = [(labels, drawn.shares), (before, 1 - drawn.shares)]
    if drawn.box is None:
        return parts
    top, bottom, left, right = drawn.box
    kept = 1 - (bottom - top) * (right - left) / (height * width)  # what is left of lambda
    partner = _cutmix_partner(len(labels))
    return [
        *((label, kept * share) for label, share in parts),
        *(
            (jnp.roll(label, partner), (1 - kept) * jnp.roll(share, partner))
            for label, share in parts
        ),
    ]


def _cutmix_partner(num_samples: int) -> int:
    """Two before, so that it is another than mixup's; of two samples, the other one."""
    return 2 if num_samples > 2 else 1
