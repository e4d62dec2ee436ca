"""How a training program runs an optimizer: the dtypes of its state, its arguments."""

import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Float32

from millrace.config import ConfigurationError
from millrace.plan import Plan
from millrace.program.accumulate import path_name
from millrace.program.mixed_precision import cast_where, widen

_log = logging.getLogger("millrace")

_HARDEST_TO_MOVE = 1 + 2.0**-7
"""The bfloat16 number that needs the largest relative change, 0.4 %, to change at all."""


def init_optimizer_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Initialize the optimizer state in float32 and return it in the stored dtypes.

    An array that belongs to a weight and has its shape, such as a momentum, is stored in
    the weight's dtype. Everything else keeps the dtype it has for float32 weights: in
    bfloat16, a decay rate of 0.999 is 1, and a sum of ones stops at 256.

    Args:
        optimizer: An optax transformation.
        params: The weights in their stored dtypes, or a part of them.
    """
    state = optimizer.init(widen(params))
    stored = jax.eval_shape(optimizer.init, _widen_float16(params))
    shapes = {
        path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }

    def store(path: Any, value: Any, like: Any) -> Array:
        value = jnp.asarray(value)
        # Optimizers keep trees like the weights, so a path ends with that of its weight.
        suffixes = (path[start:] for start in range(len(path) + 1))
        if value.ndim > 0 and any(shapes.get(end) == value.shape for end in suffixes):
            return value.astype(like.dtype)
        return value

    return jax.tree_util.tree_map_with_path(store, state, stored)


def _widen_float16(params: Any) -> Any:
    # Squared gradients leave the range of float16: Adam's second moment would underflow
    # to 0, and the update explode.
    return cast_where(params, jnp.float32, lambda x: x.dtype == jnp.float16)


def run_optimizer(
    optimizer: optax.GradientTransformation,
    gradients: Any,
    state: Any,
    params: Any,
    loss: Float32[Array, ""],
) -> tuple[Any, Any]:
    """Return the updates and the new state; pass the loss as ``value`` if it is accepted.

    All arrays are float32 or wider. The loss is the mean over micro-batches and replicas.
    """
    update = optax.with_extra_args_support(optimizer).update
    extra = {"value": loss} if _accepts_value(update) else {}
    return update(gradients, state, params, **extra)


def _accepts_value(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in parameters)


def check_optimizer(
    optimizer: optax.GradientTransformation, params: Any, plan: Plan
) -> None:
    """Raise if an optimizer cannot be run; warn if rounding keeps its state from decaying.

    Args:
        optimizer: An optax transformation.
        params: The weights in their stored dtypes.
        plan: Decides how the state is rounded.
    """
    try:
        state = jax.eval_shape(lambda p: _decay_once(optimizer, p)[0], params)
    except (AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"This optimizer cannot be used with a training program: {error}. It is "
            "called as init(params) and update(gradients, state, params, value=loss). "
            "Optimizers that need more do not work, such as optax.lbfgs (the loss "
            "function) or optax.lookahead (two sets of weights). Use optax.adamw, for "
            "example, or the optimizer inside lookahead."
        ) from error
    if plan.types.weights != "bfloat16" or plan.stochastic_rounding:
        return
    if stuck := _find_stuck_state(optimizer, params, state):
        _log.warning(
            "The optimizer state %s is stored in bfloat16 and decays by less than 0.4 %% "
            "per update, which rounding undoes: it never decays. (This affects Adam's "
            "second moment unless b2 is below 0.996.) Use stochastic_rounding, or "
            "precision 16.32.",
            stuck,
        )


def _decay_once(optimizer: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """Return a state and the state after one update with gradients of 0."""
    state = init_optimizer_state(optimizer, params)
    old = jax.tree.map(
        lambda x: jnp.full_like(x, _HARDEST_TO_MOVE) if _is_bfloat16(x) else x, state
    )
    zeros = jax.tree.map(jnp.zeros_like, widen(params))
    _, new = run_optimizer(optimizer, zeros, widen(old), widen(params), jnp.float32(1))
    return old, new


def _find_stuck_state(optimizer: Any, params: Any, state: Any) -> str | None:
    """Name state that decays in float32 but not in bfloat16 once the gradients are 0.

    Tried with weights of size 1. Optimizers that depend on the sizes of the weights are
    not examined.
    """
    if not any(map(_is_bfloat16, jax.tree.leaves(state))):
        return None
    small = jax.tree.map(lambda p: jnp.ones((1,) * p.ndim, p.dtype), params)
    try:
        old, new = _decay_once(optimizer, small)
    except (TypeError, ValueError):
        return None
    if jax.tree.structure(old) != jax.tree.structure(state):
        return None
    named = jax.tree_util.tree_leaves_with_path(state)
    leaves = zip(named, jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    for (path, stored), o, n in leaves:
        if _is_bfloat16(stored) and _is_bfloat16(o) and _is_stuck(o, n):
            return path_name(path)
    return None


def _is_bfloat16(x: Any) -> bool:
    return x.dtype == jnp.bfloat16 and math.prod(x.shape) > 0


def _is_stuck(old: Float[Array, "*dims"], new: Float32[Array, "*dims"]) -> bool:
    shrinks = new < old.astype(new.dtype)
    return bool((shrinks & (new.astype(old.dtype) == old)).any())
