"""Model state: how the values of an update's micro-batches and replicas become one."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from millrace.program.accumulate import path_name
from millrace.program.casting import widened
from millrace.program.replicas import REPLICA_AXIS

Mode = Literal["mean", "sum", "once"]

ModelStateReduction = Mode | None | Callable[[str, Any], Mode | None]
"""None for the default of each value: "mean" for floats, "once" for everything else."""


def model_state_modes(reduction: ModelStateReduction, model_state: Any) -> Any:
    """Return a tree like `model_state` with each value's mode."""

    def mode(path: Any, leaf: Any) -> Mode:
        chosen = reduction(path_name(path), leaf) if callable(reduction) else reduction
        if chosen is None:
            return "mean" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "once"
        _check_mode(chosen, path_name(path), leaf.dtype)
        return chosen

    return jax.tree_util.tree_map_with_path(mode, model_state)


def _check_mode(mode: Any, name: str, dtype: Any) -> None:
    if mode not in ("mean", "sum", "once"):
        raise ValueError(
            f"model_state_reduction for {name} must be mean, sum or once, got {mode!r}."
        )
    if mode == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"The model state {name} is {dtype}, which cannot be averaged over "
            "micro-batches and replicas. Leave model_state_reduction out, or choose once "
            "for it (it changes once per update, as a counter of updates does) or sum "
            "(each micro-batch's change is added)."
        )
    if mode == "sum" and (_is_bool(dtype) or _is_key(dtype)):
        raise ValueError(
            f"The model state {name} is {dtype}, which cannot be added up over "
            "micro-batches and replicas. Leave model_state_reduction out, or choose once "
            "for it: it changes once per update."
        )


def _is_bool(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def addable(model_state: Any) -> Any:
    """Return model state in types that add up exactly.

    Halves become float32 (600 times 1 in bfloat16 is 256), booleans integers, and random
    keys their words.
    """

    def convert(x: Any) -> Any:
        if _is_key(x.dtype):
            return jax.random.key_data(x)
        return x.astype(jnp.int32) if _is_bool(x.dtype) else x

    return widened(jax.tree.map(convert, model_state))


def contribution(modes: Any, old: Any, new: Any) -> Any:
    """Return what a micro-batch adds: its value, or its change where these are summed."""
    return jax.tree.map(
        lambda mode, o, n: n - o if mode == "sum" else n, modes, *addable((old, new))
    )


def from_first(modes: Any, contributions: Any, index: jax.Array) -> Any:
    """Drop what changes once per update, but for the first micro-batch of replica 0.

    Args:
        modes: From ``model_state_modes``.
        contributions: Of one micro-batch of this replica.
        index: The micro-batch's number within the update.
    """
    is_first = (index == 0) & (lax.axis_index(REPLICA_AXIS) == 0)
    return jax.tree.map(
        lambda mode, c: jnp.where(is_first, c, 0).astype(c.dtype) if mode == "once" else c,
        modes,
        contributions,
    )


def combined(modes: Any, old: Any, contributions: Any, micro_batches: int) -> Any:
    """Make the new model state of what all micro-batches have added up."""

    def one(mode: Mode, o: jax.Array, c: jax.Array) -> jax.Array:
        if _is_key(o.dtype):
            return jax.random.wrap_key_data(c, impl=jax.random.key_impl(o))
        if mode == "sum":
            return (o.astype(c.dtype) + c).astype(o.dtype)
        return (c / micro_batches if mode == "mean" else c).astype(o.dtype)

    return jax.tree.map(one, modes, old, contributions)


def checked_model_state(new: Any, old: Any) -> Any:
    """Return model state with the structure, shapes and types they had before."""
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
                f"{jnp.asarray(n).dtype}. Carry a key of the same kind."
            )
    return jax.tree.map(
        lambda n, o: n if _is_key(o.dtype) else jnp.asarray(n).astype(o.dtype), new, old
    )
