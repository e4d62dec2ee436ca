"""The loop over the weight updates of one call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def repeat_update(
    one_update: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    chunk: Any,
    part: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Make the updates of a chunk in a loop.

    Args:
        one_update: ``(state, batches) -> (state, info)``, jitted.
        state: The state before the first update.
        chunk: Leaves are (updates, ...).
        part: The first update and their number; by default all of the chunk.

    Returns:
        The new state, and the stacked infos; with a part, padded with zeros.
    """
    if part is None:
        return lax.scan(one_update, state, chunk)
    first, count = part[0], part[1]
    size = jax.tree.leaves(chunk)[0].shape[0]
    # Scanning nothing returns empty infos, which have the types. Unlike jax.eval_shape, it
    # sees the same arguments as the loop, so that the update is traced only once.
    _, empty = lax.scan(one_update, state, jax.tree.map(lambda x: x[:0], chunk))
    infos = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), empty)

    def add_update(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state, infos = carry
        batches = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, first + index, keepdims=False), chunk
        )
        state, info = one_update(state, batches)
        infos = jax.tree.map(
            lambda all, one: lax.dynamic_update_index_in_dim(all, one, index, 0),
            infos,
            info,
        )
        return state, infos

    return lax.fori_loop(0, count, add_update, (state, infos))
