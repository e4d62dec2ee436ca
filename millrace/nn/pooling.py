"""Max pooling whose gradient is a sum of masked copies instead of a scatter.

XLA's own gradient scatters: on an H200 it takes 1.3 ms of ResNet-50's 35 ms per update at
batch 256, where reading and writing the values once would take 0.3. Here the forward pass
also notes which of a window's values was the largest, and the backward pass hands each
gradient to that one. As in XLA, the first of several equal values gets it.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Pair = tuple[int, int]

_PLACES = 256
"""How many places of a window an eight-bit number tells apart. Larger windows, of which
every place would be a copy, have XLA's own gradient."""


def max_pool(
    x: jax.Array, window: int, strides: int, pads: Sequence[Pair] = ((0, 0), (0, 0))
) -> jax.Array:
    """Return the largest value of each square window of images (batch, h, w, channels)."""
    settled: Any = tuple(tuple(pair) for pair in pads)
    if window * window > _PLACES:
        return _xla_max_pool(x, window, strides, settled)
    return _max_pool(x, window, strides, settled)


def _xla_max_pool(
    x: jax.Array, window: int, strides: int, pads: tuple[Pair, Pair]
) -> jax.Array:
    return lax.reduce_window(
        x,
        -jnp.inf,
        lax.max,
        (1, window, window, 1),
        (1, strides, strides, 1),
        ((0, 0), *pads, (0, 0)),
    )


_max_pool = jax.custom_vjp(_xla_max_pool, nondiff_argnums=(1, 2, 3))


def _forward(x: jax.Array, window: int, strides: int, pads: tuple[Pair, Pair]) -> Any:
    padded = jnp.pad(x, ((0, 0), *pads, (0, 0)), constant_values=-jnp.inf)
    largest: jax.Array | None = None
    place = jnp.zeros((), jnp.uint8)
    for number, view in enumerate(_views(padded, window, strides)):
        if largest is None:
            largest, place = view, jnp.zeros(view.shape, jnp.uint8)
        else:
            place = jnp.where(view > largest, jnp.uint8(number), place)
            largest = jnp.maximum(view, largest)
    return largest, (place, x.shape)


def _backward(
    window: int, strides: int, pads: tuple[Pair, Pair], kept: Any, dy: jax.Array
) -> Any:
    place, shape = kept
    total = None
    for number, (down, right) in enumerate(_offsets(window)):
        own = jnp.where(place == number, dy, jnp.zeros((), dy.dtype))
        spread = [
            _spread(offset, before, size, count, strides)
            for offset, (before, _), size, count in zip(
                (down, right), pads, shape[1:3], dy.shape[1:3], strict=True
            )
        ]
        term = lax.pad(own, jnp.zeros((), dy.dtype), [(0, 0, 0), *spread, (0, 0, 0)])
        total = term if total is None else total + term
    return (total,)


_max_pool.defvjp(_forward, _backward)


def _spread(
    offset: int, before: int, size: int, count: int, strides: int
) -> tuple[int, int, int]:
    """Pad so that output i lands on input i x strides + offset - before."""
    low = offset - before
    return low, size - low - ((count - 1) * strides + 1), strides - 1


def _offsets(window: int) -> Iterator[Pair]:
    return itertools.product(range(window), range(window))


def _views(padded: jax.Array, window: int, strides: int) -> Iterator[jax.Array]:
    """For each place in the window, the values that all windows have there."""
    height, width = (n - window + 1 for n in padded.shape[1:3])
    for down, right in _offsets(window):
        yield padded[:, down : down + height : strides, right : right + width : strides]
