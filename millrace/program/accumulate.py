"""Many micro-batches, one gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from millrace.plan import AccumulatorType, Reduction


class Accumulated(NamedTuple):
    """What one replica has gathered over the micro-batches of an update."""

    gradients: Any
    model_state: Any
    info: dict[str, jax.Array]


def accumulate(
    gradient_fn: Callable[[Any, jax.Array], tuple[Any, Any, dict[str, jax.Array]]],
    params: Any,
    model_state: Any,
    batches: Any,
    *,
    dtype: AccumulatorType,
    reduction: Reduction,
) -> Accumulated:
    """Run `gradient_fn(batch, index)` over dim 0 of `batches` and gather the results.

    Args:
        gradient_fn: Returns gradients, the model state' contribution and info.
        params: The variables, whose types the accumulators take where `dtype` is None.
        model_state: A tree like the contributions that `gradient_fn` returns.
        batches: A pytree whose leaves are (micro-batches, samples, ...).
        dtype: Of the accumulators; see ``Plan.gradient_accumulation_dtype``.
        reduction: See ``Plan.gradient_accumulation_reduction``.

    The model_state contributions are added up, whatever the reduction of the gradients.
    """
    count = jax.tree.leaves(batches)[0].shape[0]
    types = accumulator_types(params, dtype)
    if count == 1:
        # No accumulator: the sum, mean and running mean of one gradient are itself.
        first = jax.tree.map(lambda x: x[0], batches)
        gradients, model_state, info = gradient_fn(first, jnp.int32(0))
        gradients = jax.tree.map(
            lambda g, t: g.astype(jnp.promote_types(g.dtype, t)), gradients, types
        )
        return Accumulated(gradients, model_state, info)

    def add(so_far: tuple[Any, Any], item: tuple[jax.Array, Any]) -> Any:
        index, batch = item
        gradients, new_model_state, info = gradient_fn(batch, index)
        total = jax.tree.map(
            lambda a, g: add_gradient(a, g, index, count, reduction), so_far[0], gradients
        )
        return (total, jax.tree.map(jnp.add, so_far[1], new_model_state)), info

    zeros = jax.tree.map(lambda p, t: jnp.zeros(p.shape, t), params, types)
    start = (zeros, jax.tree.map(jnp.zeros_like, model_state))
    (gradients, model_state), infos = lax.scan(add, start, (jnp.arange(count), batches))
    info = jax.tree.map(lambda values: values.mean(0), infos)
    return Accumulated(gradients, model_state, info)


def accumulator_types(params: Any, dtype: AccumulatorType) -> Any:
    """Return a tree like `params` with each accumulator's type.

    One type for all is for variables of up to 32 bits; float64 stays float64 unless a
    function says otherwise.
    """

    def choose(path: Any, leaf: Any) -> jnp.dtype:
        chosen: Any = dtype
        # A NumPy scalar type such as jnp.float32 is callable too, but is a type.
        if callable(dtype) and not isinstance(dtype, type) and not hasattr(dtype, "dtype"):
            chosen = dtype(path_name(path), leaf)
        elif leaf.dtype == jnp.float64:
            chosen = None  # whoever has float64 weights wants all of their gradients
        chosen = leaf.dtype if chosen is None else jnp.dtype(chosen)
        if not jnp.issubdtype(chosen, jnp.floating):
            raise ValueError(
                f"gradient_accumulation_dtype for {path_name(path)} must be a floating "
                f"type, got {chosen}."
            )
        return chosen

    return jax.tree_util.tree_map_with_path(choose, params)


def path_name(path: Any) -> str:
    """Write a variable's place in its tree as ``block/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def add_gradient(
    total: jax.Array, gradient: jax.Array, index: jax.Array, count: int, how: Reduction
) -> jax.Array:
    """Add the gradient of micro-batch `index` of `count` to an accumulator."""
    # To the accumulator's type first: a float16 gradient divided by 128 underflows.
    gradient = gradient.astype(total.dtype)
    if how == "sum":
        return total + gradient
    if how == "mean":
        return total + gradient / count
    # In float32, rounded once: 16-bit factors do not add up to 1, and that compounds.
    wide = total.astype(jnp.promote_types(total.dtype, jnp.float32))
    mean = wide + (gradient.astype(wide.dtype) - wide) / (index + 1).astype(wide.dtype)
    return mean.astype(total.dtype)
