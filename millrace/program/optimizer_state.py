"""The optimizer as the training program runs it: its state's types, and its arguments."""

import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from millrace.config import ConfigurationError
from millrace.plan import Plan
from millrace.program.accumulate import path_name
from millrace.program.casting import cast_where, widened

_log = logging.getLogger("millrace")

_JUST_ABOVE_ONE = 1 + 2.0**-7
"""The bfloat16 number that needs the largest relative change, 0.4 %, to move at all."""


def init_optimizer_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """Initialize the optimizer's state in float32, then store it in the right types.

    A state array that belongs to a weight and has its shape, such as a momentum, is
    stored in the weight's type. Everything else keeps the type it has for float32
    weights: a decay rate of 0.999 in bfloat16 is 1, and a sum of ones stops at 256.

    Args:
        optimizer: An optax transformation.
        params: The weights as they are stored, or a part of them.
    """
    state = optimizer.init(widened(params))
    stored = jax.eval_shape(optimizer.init, _with_wide_float16(params))
    shapes = {
        path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }

    def store(path: Any, value: Any, like: Any) -> jax.Array:
        value = jnp.asarray(value)
        # Optimizers keep trees like the weights, so the path ends as the weight's does.
        ends = (path[start:] for start in range(len(path) + 1))
        if value.ndim > 0 and any(shapes.get(end) == value.shape for end in ends):
            return value.astype(like.dtype)
        return value

    return jax.tree_util.tree_map_with_path(store, state, stored)


def _with_wide_float16(params: Any) -> Any:
    """Cast float16 to float32, whose range is too small for squared gradients.

    Adam's second moment would underflow to 0, and the update explode.
    """
    return cast_where(params, jnp.float32, lambda x: x.dtype == jnp.float16)


def run_optimizer(
    optimizer: optax.GradientTransformation,
    gradients: Any,
    state: Any,
    params: Any,
    loss: jax.Array,
) -> tuple[Any, Any]:
    """Return the updates and the new state; pass the loss as optax's ``value`` if wanted.

    Args:
        optimizer: An optax transformation, whether it takes extra arguments or not.
        gradients: In float32 or wider, as everything here.
        state: The optimizer's.
        params: The weights.
        loss: The mean over micro-batches and replicas.
    """
    run = optax.with_extra_args_support(optimizer).update
    extra = {"value": loss} if _takes_value(run) else {}
    return run(gradients, state, params, **extra)


def _takes_value(function: Callable[..., Any]) -> bool:
    """Tell whether a function has a parameter ``value``, or takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in parameters)


def check_optimizer(
    optimizer: optax.GradientTransformation, params: Any, plan: Plan
) -> None:
    """Refuse an optimizer that cannot be run; warn of one whose state cannot decay.

    Args:
        optimizer: An optax transformation.
        params: The weights as they are stored.
        plan: How they are rounded.
    """
    try:
        state = jax.eval_shape(lambda p: _updated(optimizer, p)[0], params)
    except (AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"This optimizer cannot be used with a training program: {error}. It is "
            "called as init(params) and update(gradients, state, params, value=loss). "
            "One that needs more, such as optax.lbfgs (the loss function) or "
            "optax.lookahead (two sets of weights), does not fit. Use optax.adamw, say, "
            "or the optimizer inside lookahead."
        ) from error
    if plan.types.weights != "bfloat16" or plan.stochastic_rounding:
        return
    if stuck := _first_stuck(optimizer, params, state):
        _log.warning(
            "The optimizer's state %s is stored in bfloat16 and decays by less than 0.4 %% "
            "an update, which rounding undoes: it never decays. (Adam's second moment "
            "does so unless b2 is below 0.996.) Use stochastic_rounding, or precision "
            "16.32.",
            stuck,
        )


def _updated(optimizer: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """Return a state and what becomes of it with gradients of 0."""
    state = init_optimizer_state(optimizer, params)
    old = jax.tree.map(
        lambda x: jnp.full_like(x, _JUST_ABOVE_ONE) if _is_half(x) else x, state
    )
    zeros = jax.tree.map(jnp.zeros_like, widened(params))
    _, new = run_optimizer(optimizer, zeros, widened(old), widened(params), jnp.float32(1))
    return old, new


def _first_stuck(optimizer: Any, params: Any, state: Any) -> str | None:
    """Name state that shrinks in float32 but not in bfloat16 once the gradients are 0.

    Found out with one number for each weight; an optimizer that is tied to the weights'
    sizes is not examined.
    """
    if not any(map(_is_half, jax.tree.leaves(state))):
        return None
    small = jax.tree.map(lambda p: jnp.ones((1,) * p.ndim, p.dtype), params)
    try:
        old, new = _updated(optimizer, small)
    except (TypeError, ValueError):
        return None
    if jax.tree.structure(old) != jax.tree.structure(state):
        return None
    named = jax.tree_util.tree_leaves_with_path(state)
    every = zip(named, jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    for (path, stored), o, n in every:
        if _is_half(stored) and _is_half(o) and _is_stuck(o, n):
            return path_name(path)
    return None


def _is_half(x: Any) -> bool:
    return x.dtype == jnp.bfloat16 and math.prod(x.shape) > 0


def _is_stuck(old: jax.Array, new: jax.Array) -> bool:
    shrinks = new < old.astype(new.dtype)
    return bool((shrinks & (new.astype(old.dtype) == old)).any())
