"""One weight update: gradients of a global batch in, new weights out."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from millrace.nn.layers import KEPT
from millrace.plan import Plan
from millrace.program import loss_scale as scaling
from millrace.program.accumulate import Accumulated, accumulate
from millrace.program.casting import narrow, widened
from millrace.program.model_state import (
    ModelStateReduction,
    addable,
    checked_model_state,
    combined,
    contribution,
    from_first,
    model_state_modes,
)
from millrace.program.optimizer_state import run_optimizer
from millrace.program.replicas import REPLICA_AXIS, sum_over_replicas
from millrace.program.rounding import round_tree

LossFn = Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, tuple[Any, Any]]]
"""``(params, model_state, batch, key) -> (loss, (model_state, info))``."""

_FORWARD, _ROUNDING = 0, 1  # what an update's random key is split for


class TrainState(NamedTuple):
    """All that training changes. Plain data: it can be saved, restored, compared."""

    update: jax.Array
    params: Any
    model_state: Any
    optimizer_state: Any
    loss_scale: scaling.LossScale
    key: jax.Array

    @property
    def carried(self) -> Any:
        """The former name of `model_state`."""
        return self.model_state


class Weights(NamedTuple):
    """The part of a training state that makes the model."""

    params: Any
    model_state: Any = None


class GradientResult(NamedTuple):
    """What the replicas agree on before the weights are changed."""

    gradients: Any
    model_state: Any
    info: dict[str, jax.Array]


class Step(NamedTuple):
    """The choices that make up one weight update."""

    loss_fn: LossFn
    optimizer: optax.GradientTransformation
    plan: Plan
    model_state_reduction: ModelStateReduction = None
    watch: Mapping[str, Callable[[jax.Array], Any]] = {}


def compute_gradients(step: Step, state: TrainState, batches: Any) -> GradientResult:
    """Accumulate over the micro-batches, then exchange once between the replicas."""
    plan = step.plan
    modes = model_state_modes(step.model_state_reduction, state.model_state)

    def gradient_fn(batch: Any, index: jax.Array) -> Any:
        key = micro_batch_key(plan, state, index)
        gradients, (model_state, info) = _gradients(step, state, batch, key)
        changes = contribution(modes, state.model_state, model_state)
        return gradients, from_first(modes, changes, index), info

    gathered: Accumulated = accumulate(
        gradient_fn,
        state.params,
        addable(state.model_state),
        batches,
        dtype=plan.gradient_accumulation_dtype,
        reduction=plan.gradient_accumulation_reduction,
    )
    gradients, contributions, info = sum_over_replicas(tuple(gathered), plan.num_replicas)
    gradients, info = jax.tree.map(lambda x: x / plan.num_replicas, (gradients, info))
    micro_batches = plan.num_replicas * plan.batching.gradient_accumulation_count
    model_state = combined(modes, state.model_state, contributions, micro_batches)
    return GradientResult(gradients, model_state, info)


def micro_batch_key(plan: Plan, state: TrainState, index: jax.Array) -> jax.Array:
    """Return the random key of a micro-batch of this replica.

    Counted over all replicas, so that a key belongs to a micro-batch wherever and
    whenever it is computed.
    """
    update_key = jax.random.fold_in(unwrap(state.key), state.update)
    forward_key = jax.random.fold_in(update_key, _FORWARD)
    micro = index * plan.num_replicas + lax.axis_index(REPLICA_AXIS)
    return jax.random.fold_in(forward_key, micro)


def apply_update(
    step: Step, state: TrainState, gathered: GradientResult
) -> tuple[TrainState, Any]:
    """Change the weights once."""
    finite = gradients_finite(step.plan, gathered.gradients)
    loss = gathered.info["loss"]
    params, optimizer_state = new_weights(step, state, gathered.gradients, finite, loss)
    new, info = next_state(step, state, gathered.model_state, gathered.info, finite)
    return new._replace(params=params, optimizer_state=optimizer_state), info


def next_state(
    step: Step, state: TrainState, model_state: Any, info: Any, finite: jax.Array | None
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Change everything but the weights and the optimizer's state."""
    if step.plan.loss_scaling == "dynamic":
        model_state = _select(finite, model_state, state.model_state)
    new = state._replace(
        update=state.update + 1,
        model_state=model_state,
        loss_scale=_next_scale(step.plan, state.loss_scale, finite),
    )
    return new, _update_info(step, state, info, finite)


def new_weights(
    step: Step,
    state: TrainState,
    gradients: Any,
    finite: jax.Array | None,
    loss: jax.Array,
) -> tuple[Any, Any]:
    """Run the optimizer in float32 and round what it returns to the stored types.

    Args:
        step: The choices.
        state: Of which the weights and the optimizer's state may be a part of the whole.
        gradients: For these weights.
        finite: Whether all gradients are, where the plan wants to know.
        loss: For optimizers that need it; the mean over micro-batches and replicas.
    """
    plan = step.plan
    wide = widened(gradients)
    if plan.loss_scaling:
        wide = jax.tree.map(lambda g: g / state.loss_scale.factor, wide)
    stored = (state.params, state.optimizer_state)
    old_params, old_state = widened(stored)
    updates, new_state = run_optimizer(step.optimizer, wide, old_state, old_params, loss)
    new_params = optax.apply_updates(old_params, updates)
    key = jax.random.fold_in(unwrap(state.key), state.update)
    key = jax.random.fold_in(key, _ROUNDING)
    rounded = round_tree(
        (new_params, new_state), stored, key, stochastic=plan.stochastic_rounding
    )
    if plan.loss_scaling == "dynamic":
        # An overflow leaves everything as it was; only the factor changes.
        rounded = _select(finite, rounded, stored)
    return rounded


def _update_info(
    step: Step, state: TrainState, info: dict[str, jax.Array], finite: jax.Array | None
) -> dict[str, jax.Array]:
    """Add what the program knows about this update to what the loss reported."""
    info = dict(info)
    for name, function in step.watch.items():
        # As the optimizer counts: an update that was skipped is not one.
        applied = state.update - state.loss_scale.skipped
        info[name] = jnp.asarray(function(applied), jnp.float32)
    if step.plan.loss_scaling == "dynamic":
        info["loss_scale"] = state.loss_scale.factor
    if finite is not None:
        info["gradients_finite"] = finite.astype(jnp.float32)
    return info


def _gradients(step: Step, state: TrainState, batch: Any, key: jax.Array) -> Any:
    plan = step.plan

    def scaled_loss(params: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        params = narrow(params, plan.types.compute)
        batch_ = narrow(batch, plan.types.compute)
        returned = step.loss_fn(params, state.model_state, batch_, key)
        loss, model_state, info = unpacked(returned)
        info = checked_info(info, step.watch) | {"loss": loss}
        model_state = checked_model_state(model_state, state.model_state)
        if plan.loss_scaling:
            loss = loss * state.loss_scale.factor
        return loss, (model_state, info)

    if plan.recomputation:
        scaled_loss = jax.checkpoint(scaled_loss, policy=keep_products)
    return jax.grad(scaled_loss, has_aux=True)(state.params)


def keep_products(primitive: Any, *_: Any, **params: Any) -> bool:
    """Recomputation's policy: keep matrix products, convolutions and named values."""
    return primitive.name in ("dot_general", "conv_general_dilated") or (
        primitive.name == "name" and params.get("name") == KEPT
    )


def gradients_finite(plan: Plan, gradients: Any) -> jax.Array | None:
    if plan.fp_exceptions or plan.loss_scaling == "dynamic":
        return scaling.all_finite(gradients)
    return None


def _next_scale(
    plan: Plan, scale: scaling.LossScale, finite: jax.Array | None
) -> scaling.LossScale:
    if plan.loss_scaling == "dynamic" and finite is not None:
        return scaling.adjust(scale, finite)
    return scale


def _select(condition: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def unwrap(key_data: jax.Array) -> jax.Array:
    """Make a random key from the words the state carries; words can be saved."""
    return jax.random.wrap_key_data(key_data)


def unpacked(returned: Any) -> tuple[jax.Array, Any, Any]:
    try:
        loss, (model_state, info) = returned
        shape = jnp.shape(loss)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "loss_fn must return (loss, (model_state, info)): a scalar, the model state "
            "(None if there are none) and a dict of scalars ({} if there are none)."
        ) from error
    if shape:
        raise TypeError(
            f"loss_fn must return a scalar loss, got shape {shape}. Take the mean over "
            "the batch."
        )
    return jnp.asarray(loss, jnp.float32), model_state, info


def checked_info(info: Any, watch: Mapping[str, Any]) -> dict[str, jax.Array]:
    if not isinstance(info, Mapping):
        raise TypeError(
            "loss_fn must return (loss, (model_state, info)) with info a flat dict of "
            f"scalars, got info of type {type(info).__name__}."
        )
    taken = {"loss", "loss_scale", "gradients_finite", *watch} & set(info)
    if taken:
        raise ValueError(
            f"info cannot be called {' or '.join(sorted(taken))}: the program reports "
            "that itself."
        )
    for name, value in info.items():
        if isinstance(value, Mapping | list | tuple) or jnp.ndim(value):
            raise TypeError(f"info[{name!r}] must be a scalar, got {_kind(value)}.")
    return {name: jnp.asarray(value, jnp.float32) for name, value in info.items()}


def _kind(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return f"a {type(value).__name__}"
    return f"an array of shape {jnp.shape(value)}"
