"""Combine the micro-batches of an update: their gradients, model state and info.

All micro-batches of an update start from the same model state. What each makes of it is
reduced to one new state: averaged, summed, or taken from a single micro-batch.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from millrace.plan import AccumulatorType, Reduction
from millrace.program.mixed_precision import widen
from millrace.program.replicas import REPLICA_AXIS


def path_name(path: Any) -> str:
    """Format a leaf's path in its tree as ``block/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


# --- gradients ---


class Accumulated(NamedTuple):
    """The results of one replica over the micro-batches of an update."""

    gradients: Any
    model_state: Any
    info: dict[str, Array]


def accumulate(
    gradient_fn: Callable[[Any, Array], tuple[Any, Any, dict[str, Array]]],
    params: Any,
    model_state: Any,
    batches: Any,
    *,
    dtype: AccumulatorType,
    reduction: Reduction,
) -> Accumulated:
    """Run `gradient_fn(batch, index)` over dim 0 of `batches` and reduce the results.

    Args:
        gradient_fn: Returns gradients, contributions to the model state, and info.
        params: The weights, whose dtypes the accumulators take where `dtype` is None.
        model_state: A tree like the contributions that `gradient_fn` returns. They are
            summed, whatever the reduction of the gradients.
        batches: A pytree whose leaves are (micro-batches, samples, ...).
        dtype: See ``Plan.gradient_accumulation_dtype``.
        reduction: See ``Plan.gradient_accumulation_reduction``.
    """
    count = jax.tree.leaves(batches)[0].shape[0]
    dtypes = accumulator_dtypes(params, dtype)
    if count == 1:
        # Sum, mean and running mean of one gradient are the gradient: save the buffer.
        first = jax.tree.map(lambda x: x[0], batches)
        gradients, model_state, info = gradient_fn(first, jnp.int32(0))
        gradients = jax.tree.map(
            lambda g, t: g.astype(jnp.promote_types(g.dtype, t)), gradients, dtypes
        )
        return Accumulated(gradients, model_state, info)

    def add(totals: tuple[Any, Any], item: tuple[Array, Any]) -> Any:
        index, batch = item
        gradients, contributions, info = gradient_fn(batch, index)
        total = jax.tree.map(
            lambda a, g: add_gradient(a, g, index, count, reduction), totals[0], gradients
        )
        return (total, jax.tree.map(jnp.add, totals[1], contributions)), info

    zeros = jax.tree.map(lambda p, t: jnp.zeros(p.shape, t), params, dtypes)
    start = (zeros, jax.tree.map(jnp.zeros_like, model_state))
    (gradients, model_state), infos = lax.scan(add, start, (jnp.arange(count), batches))
    info = jax.tree.map(lambda values: values.mean(0), infos)
    return Accumulated(gradients, model_state, info)


def accumulator_dtypes(params: Any, dtype: AccumulatorType) -> Any:
    """Return a tree like `params` with the dtype of each accumulator.

    A single dtype applies to variables of up to 32 bits. float64 stays float64, unless
    `dtype` is a function that decides otherwise.
    """

    # A scalar type such as jnp.float32 is callable too.
    is_type = isinstance(dtype, type) or hasattr(dtype, "dtype")
    choose_dtype = None
    if callable(dtype) and not is_type:
        choose_dtype = _as_function_of_path(dtype)

    def choose(path: Any, leaf: Any) -> jnp.dtype:
        chosen: Any = dtype
        if choose_dtype is not None:
            chosen = choose_dtype(path_name(path), leaf)
        elif leaf.dtype == jnp.float64:
            chosen = None  # whoever uses float64 weights wants float64 gradients
        chosen = leaf.dtype if chosen is None else jnp.dtype(chosen)
        if not jnp.issubdtype(chosen, jnp.floating):
            raise ValueError(
                f"gradient_accumulation_dtype for {path_name(path)} must be a floating "
                f"type, got {chosen}."
            )
        return chosen

    return jax.tree_util.tree_map_with_path(choose, params)


def _as_function_of_path(function: Callable[..., Any]) -> Callable[[str, Any], Any]:
    """Return ``f(path, variable)``, given that or a function of the variable alone."""
    try:
        inspect.signature(function).bind("path", None)
    except TypeError:
        return lambda path, variable: function(variable)
    return function


def add_gradient(
    total: Float[Array, "*dims"],
    gradient: Float[Array, "*dims"],
    index: Int[Array, ""],
    count: int,
    reduction: Reduction,
) -> Float[Array, "*dims"]:
    """Add the gradient of micro-batch `index` of `count` to an accumulator."""
    # Cast before dividing: a float16 gradient divided by 128 underflows.
    gradient = gradient.astype(total.dtype)
    if reduction == "sum":
        return total + gradient
    if reduction == "mean":
        return total + gradient / count
    # In float32 and rounded once: 16-bit factors do not add up to 1, and that compounds.
    wide = total.astype(jnp.promote_types(total.dtype, jnp.float32))
    mean = wide + (gradient.astype(wide.dtype) - wide) / (index + 1).astype(wide.dtype)
    return mean.astype(total.dtype)


# --- model state ---

Mode = Literal["mean", "sum", "once"]

ModelStateReduction = Mode | None | Callable[[str, Any], Mode | None]
"""A mode for all values, or a function of path and value that returns one. None is the
default of each value: "mean" for floats, "once" for everything else."""


def reduction_modes(reduction: ModelStateReduction, model_state: Any) -> Any:
    """Return a tree like `model_state` with the mode of each value."""

    def choose(path: Any, leaf: Any) -> Mode:
        mode = reduction(path_name(path), leaf) if callable(reduction) else reduction
        if mode is None:
            return "mean" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "once"
        _check_mode(mode, path_name(path), leaf.dtype)
        return mode

    return jax.tree_util.tree_map_with_path(choose, model_state)


def _check_mode(mode: Any, name: str, dtype: Any) -> None:
    if mode not in ("mean", "sum", "once"):
        raise ValueError(
            f"model_state_reduction for {name} must be mean, sum or once, got {mode!r}."
        )
    if mode == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"The model state {name} is {dtype}, which cannot be averaged over "
            "micro-batches and replicas. Omit model_state_reduction, or choose once (it "
            "changes once per update, like a counter of updates) or sum (the changes of "
            "all micro-batches are added)."
        )
    if mode == "sum" and (_is_bool(dtype) or _is_key(dtype)):
        raise ValueError(
            f"The model state {name} is {dtype}, which cannot be summed over "
            "micro-batches and replicas. Omit model_state_reduction, or choose once: it "
            "changes once per update."
        )


def _is_bool(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def to_summable(model_state: Any) -> Any:
    """Return model state in dtypes that can be summed exactly.

    16-bit floats become float32 (in bfloat16, 600 times 1 is 256), booleans become
    integers, and random keys their words.
    """

    def convert(x: Any) -> Any:
        if _is_key(x.dtype):
            return jax.random.key_data(x)
        return x.astype(jnp.int32) if _is_bool(x.dtype) else x

    return widen(jax.tree.map(convert, model_state))


def model_state_contribution(modes: Any, old: Any, new: Any, num_micro_batches: int) -> Any:
    """Return what one of several micro-batches adds to the totals.

    That is its value for "once", and its change for "sum". For "mean", it is the value
    divided by a power of two, which is exact: the sum of the smallest floats, which masks
    are made of, would be infinite.
    """

    def contribution(mode: Mode, o: Array, n: Array) -> Array:
        if mode == "mean":
            return n / _power_of_two(num_micro_batches)
        return n - o if mode == "sum" else n

    return jax.tree.map(contribution, modes, *to_summable((old, new)))


def keep_first(modes: Any, contributions: Any, index: Int[Array, ""]) -> Any:
    """Zero "once" values, except in the first micro-batch of replica 0.

    The sum over all micro-batches and replicas is then the value of that one.
    """
    is_first = (index == 0) & (lax.axis_index(REPLICA_AXIS) == 0)
    return jax.tree.map(
        lambda mode, c: jnp.where(is_first, c, 0).astype(c.dtype) if mode == "once" else c,
        modes,
        contributions,
    )


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


def combine_contributions(modes: Any, old: Any, totals: Any, num_micro_batches: int) -> Any:
    """Return the new model state from the summed contributions of all micro-batches."""

    def combine(mode: Mode, o: Array, total: Array) -> Array:
        if _is_key(o.dtype):
            return jax.random.wrap_key_data(total, impl=jax.random.key_impl(o))
        if mode == "sum":
            return (o.astype(total.dtype) + total).astype(o.dtype)
        if mode == "mean":
            total = total / (num_micro_batches / _power_of_two(num_micro_batches))
        return total.astype(o.dtype)

    return jax.tree.map(combine, modes, old, totals)


def check_model_state(new: Any, old: Any) -> Any:
    """Return `new` in the dtypes of `old`; raise if structure or shapes differ."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise TypeError(
            "loss_fn must return model state of the structure it was given: "
            f"{jax.tree.structure(old)}, got {jax.tree.structure(new)}."
        )
    named = jax.tree_util.tree_leaves_with_path(old)
    for (path, o), n in zip(named, jax.tree.leaves(new), strict=True):
        if jnp.shape(n) != jnp.shape(o):
            raise TypeError(
                f"The model state {path_name(path)} changed its shape from "
                f"{jnp.shape(o)} to {jnp.shape(n)}."
            )
        if _is_key(o.dtype) and jnp.asarray(n).dtype != o.dtype:
            raise TypeError(
                f"The model state {path_name(path)} changed its type from {o.dtype} to "
                f"{jnp.asarray(n).dtype}. Return a key of the same implementation."
            )
    return jax.tree.map(
        lambda n, o: n if _is_key(o.dtype) else jnp.asarray(n).astype(o.dtype), new, old
    )
