"""An exponential moving average of the weights, kept as a part of the optimizer state.

There it follows whatever happens to momentum: it is updated inside the compiled loop,
offloaded, divided over the stages of a pipeline, saved and restored. Validation and
everything that reads a checkpoint use the average as the weights of the model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Int32

from millrace.nn.norms import NUM_UPDATES, warmed_up_decay

__all__ = ["NUM_UPDATES", "EmaState", "averaged_params", "with_ema"]


class EmaState(NamedTuple):
    """The state of an optimizer with a moving average of the weights."""

    num_updates: Int32[Array, ""]
    average: Any
    """The moving average, a tree like the weights."""
    inner: Any
    """The state of the optimizer itself."""


def with_ema(
    optimizer: optax.GradientTransformation, decay: float
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that also averages the weights after every update.

    ``a <- d a + (1 - d) w`` with ``d = min(decay, (1 + n) / (10 + n))`` in update n, so
    that the initial weights are forgotten soon. The weights themselves do not change.

    Args:
        optimizer: The optimizer that updates the weights.
        decay: Weight of the old average, such as 0.999.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> EmaState:
        # Copies, because the weights and the state are donated separately.
        average = jax.tree.map(lambda p: jnp.array(p, copy=True), params)
        return EmaState(jnp.zeros([], jnp.int32), average, inner.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, EmaState]:
        new, inner_state = inner.update(updates, state.inner, params, **extra)
        num_updates = jnp.asarray(optax.safe_increment(state.num_updates))
        kept = warmed_up_decay(decay, num_updates)
        average = jax.tree.map(
            lambda a, w: kept * a + (1 - kept) * w,
            state.average,
            optax.apply_updates(params, new),
        )
        return new, EmaState(num_updates, average, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def averaged_params(state: Any) -> Any:
    """Return the moving average of the weights in a state, or the weights without one."""
    optimizer_state = getattr(state, "optimizer_state", None)
    if isinstance(optimizer_state, EmaState):
        return optimizer_state.average
    return state.params
