"""RMSProp as the references have it, with a learning rate for each part of the model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from millrace.program.accumulate import path_name

_DECAY, _FIRST_MEAN_SQUARE, _EPSILON = 0.9, 0.01, 1.0


class RmsPropState(NamedTuple):
    """The number of updates, and every weight's moving mean square gradient."""

    updates: jax.Array
    mean_square: Any


def rmsprop(learning_rates: Mapping[str, optax.Schedule]) -> optax.GradientTransformation:
    """Return ``m <- 0.9 m + 0.1 g^2; w <- w - lr g / (1 + sqrt(m))``, m from 0.01.

    The 1 is outside the root and large: where gradients are small it is plain descent.
    It is why the loss is a sum over the batch and not a mean.

    Args:
        learning_rates: By scope, the beginning of a weight's path.
    """

    def init(params: Any) -> RmsPropState:
        first = jax.tree.map(lambda p: jnp.full_like(p, _FIRST_MEAN_SQUARE), params)
        return RmsPropState(jnp.int32(0), first)

    def update(
        gradients: Any, state: RmsPropState, params: Any = None
    ) -> tuple[Any, RmsPropState]:
        del params
        mean_square = jax.tree.map(
            lambda m, g: _DECAY * m + (1 - _DECAY) * jnp.square(g),
            state.mean_square,
            gradients,
        )
        rates = {
            scope: jnp.asarray(rate(state.updates))
            for scope, rate in learning_rates.items()
        }

        def step(path: Any, gradient: jax.Array, square: jax.Array) -> jax.Array:
            rate = rates[scope_of(path_name(path), rates)]
            return -rate * gradient / (_EPSILON + jnp.sqrt(square))

        updates = jax.tree_util.tree_map_with_path(step, gradients, mean_square)
        return updates, RmsPropState(state.updates + 1, mean_square)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def scope_of(path: str, scopes: Mapping[str, Any]) -> str:
    """Return the scope that a weight belongs to."""
    found = [scope for scope in scopes if path.startswith(f"{scope}/")]
    if len(found) != 1:
        raise ValueError(
            f"The weight {path} must belong to exactly one of {', '.join(scopes)}; it "
            f"belongs to {', '.join(found) or 'none'}."
        )
    return found[0]


def stepped(base: float, decay: float, updates_per_step: int) -> optax.Schedule:
    """Return the schedule ``base * decay ** floor(update / updates_per_step)``."""

    def rate(update: Any) -> jax.Array:
        return base * jnp.float32(decay) ** jnp.floor_divide(update, updates_per_step)

    return rate
