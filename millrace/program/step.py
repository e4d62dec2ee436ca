"""One weight update: a global batch in, new weights out."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Bool, Float32, Int, Int32, UInt32

from millrace.card import Card, with_card
from millrace.nn.layers import KEPT
from millrace.plan import Plan
from millrace.program.accumulate import (
    Accumulated,
    ModelStateReduction,
    accumulate,
    check_model_state,
    combine_contributions,
    keep_first,
    model_state_contribution,
    reduction_modes,
    to_summable,
)
from millrace.program.mixed_precision import (
    LossScale,
    adjust_loss_scale,
    all_finite,
    narrow,
    round_tree,
    widen,
)
from millrace.program.optimizer_state import run_optimizer
from millrace.program.replicas import REPLICA_AXIS, sum_over_replicas

LossFn = Callable[[Any, Any, Any, Array], tuple[Array, tuple[Any, Any]]]
"""``(params, model_state, batch, key) -> (loss, (model_state, info))``."""

_FORWARD, _ROUNDING = 0, 1  # folded into an update's key, one for each use


@with_card
class TrainState(NamedTuple):
    """Everything that training changes, as plain data to save, restore and compare."""

    update: Int32[Array, ""]
    params: Any
    model_state: Any
    optimizer_state: Any
    loss_scale: LossScale
    key: UInt32[Array, " words"]
    """The words of a random key: unlike a typed key, they can be saved."""

    @property
    def carried(self) -> Any:
        """The former name of `model_state`."""
        return self.model_state

    def card(self) -> Card:
        """Return what a terminal or a notebook shows; it reads nothing but the update."""
        update: Any = "?"
        with contextlib.suppress(RuntimeError, TypeError):  # donated, or being traced
            update = int(jax.device_get(self.update))
        sizes = {
            "parameters": self.params,
            "model_state": self.model_state,
            "optimizer_state": self.optimizer_state,
        }
        rows = {name: f"{_count(tree):,}" for name, tree in sizes.items()}
        return Card("TrainState", {"update": update} | rows)


def _count(tree: Any) -> int:
    return sum(getattr(leaf, "size", 1) for leaf in jax.tree.leaves(tree))


class Weights(NamedTuple):
    """The part of a training state that defines the model."""

    params: Any
    model_state: Any = None


class GradientResult(NamedTuple):
    """What all replicas have in common before the weights change."""

    gradients: Any
    model_state: Any
    info: dict[str, Array]


class Step(NamedTuple):
    """What defines one weight update."""

    loss_fn: LossFn
    optimizer: optax.GradientTransformation
    plan: Plan
    model_state_reduction: ModelStateReduction = None
    extra_info: Mapping[str, Callable[[Array], Any]] = {}


# --- gradients ---


def compute_gradients(step: Step, state: TrainState, batches: Any) -> GradientResult:
    """Accumulate over the micro-batches, then reduce once over the replicas."""
    plan = step.plan
    modes = reduction_modes(step.model_state_reduction, state.model_state)
    num_micro_batches = plan.num_replicas * plan.batching.gradient_accumulation_count

    def gradient_fn(batch: Any, index: Int[Array, ""]) -> Any:
        key = micro_batch_key(plan, state, index)
        gradients, (model_state, info) = _micro_batch_gradients(step, state, batch, key)
        contributions = model_state_contribution(
            modes, state.model_state, model_state, num_micro_batches
        )
        return gradients, keep_first(modes, contributions, index), info

    accumulated: Accumulated = accumulate(
        gradient_fn,
        state.params,
        to_summable(state.model_state),
        batches,
        dtype=plan.gradient_accumulation_dtype,
        reduction=plan.gradient_accumulation_reduction,
    )
    gradients, totals, info = sum_over_replicas(tuple(accumulated), plan.num_replicas)
    gradients, info = jax.tree.map(lambda x: x / plan.num_replicas, (gradients, info))
    model_state = combine_contributions(modes, state.model_state, totals, num_micro_batches)
    return GradientResult(gradients, model_state, info)


def micro_batch_key(plan: Plan, state: TrainState, index: Int[Array, ""]) -> Array:
    """Return the random key of micro-batch `index` of this replica.

    Micro-batches are counted over all replicas, so that a key belongs to a micro-batch
    wherever and whenever it is computed.
    """
    update_key = jax.random.fold_in(wrap_key(state.key), state.update)
    forward_key = jax.random.fold_in(update_key, _FORWARD)
    micro_batch = index * plan.num_replicas + lax.axis_index(REPLICA_AXIS)
    return jax.random.fold_in(forward_key, micro_batch)


def wrap_key(words: UInt32[Array, " words"]) -> Array:
    """Return the random key whose words a state holds."""
    return jax.random.wrap_key_data(words)


def _micro_batch_gradients(step: Step, state: TrainState, batch: Any, key: Array) -> Any:
    plan = step.plan

    def scaled_loss(params: Any) -> tuple[Array, tuple[Any, Any]]:
        params = narrow(params, plan.types.compute)
        batch_ = narrow(batch, plan.types.compute)
        returned = step.loss_fn(params, state.model_state, batch_, key)
        loss, model_state, info = unpack_loss_output(returned)
        info = check_info(info, step.extra_info) | {"loss": loss}
        model_state = check_model_state(model_state, state.model_state)
        if plan.loss_scaling:
            loss = loss * state.loss_scale.factor
        return loss, (model_state, info)

    if plan.recomputation:
        scaled_loss = jax.checkpoint(scaled_loss, policy=save_products)
    return jax.grad(scaled_loss, has_aux=True)(copy_params(plan, state, state.params))


def copy_params(plan: Plan, state: TrainState, params: Any) -> Any:
    """Return the weights that an update differentiates, rounded at random if asked.

    All micro-batches and replicas of an update have the same copies. Rounding happens
    before differentiation, so the gradient is that of the copy, as for plain casts.

    Args:
        plan: Decides whether to round.
        state: Its key and update number make the random numbers.
        params: The weights, or those of one stage.
    """
    if not plan.rounds_copies:
        return params
    like = jax.eval_shape(lambda p: narrow(p, plan.types.compute), params)
    return round_tree(params, like, _rounding_key(state), stochastic=True)


def _rounding_key(state: TrainState) -> Array:
    update_key = jax.random.fold_in(wrap_key(state.key), state.update)
    return jax.random.fold_in(update_key, _ROUNDING)


def save_products(primitive: Any, *_: Any, **params: Any) -> bool:
    """Decide what recomputation keeps: products, convolutions and values named KEPT.

    Everything else is cheap to recompute from these.
    """
    return primitive.name in ("dot_general", "conv_general_dilated") or (
        primitive.name == "name" and params.get("name") == KEPT
    )


# --- the update ---


def apply_update(
    step: Step, state: TrainState, result: GradientResult
) -> tuple[TrainState, Any]:
    """Change the weights once; return the new state and the update's info."""
    finite = check_finite(step.plan, result.gradients)
    loss = result.info["loss"]
    params, optimizer_state = update_weights(step, state, result.gradients, finite, loss)
    new, info = advance_state(step, state, result.model_state, result.info, finite)
    return new._replace(params=params, optimizer_state=optimizer_state), info


def check_finite(plan: Plan, gradients: Any) -> Bool[Array, ""] | None:
    """Return whether all gradients are finite; None if the plan does not need to know."""
    if plan.fp_exceptions or plan.loss_scaling == "dynamic":
        return all_finite(gradients)
    return None


def update_weights(
    step: Step,
    state: TrainState,
    gradients: Any,
    finite: Bool[Array, ""] | None,
    loss: Float32[Array, ""],
) -> tuple[Any, Any]:
    """Run the optimizer in float32; return weights and optimizer state as stored.

    Args:
        step: What defines the update.
        state: Its weights and optimizer state may be a part of the whole.
        gradients: Gradients of these weights.
        finite: Whether all gradients are finite, if the plan needs to know.
        loss: The mean over micro-batches and replicas, for optimizers that use it.
    """
    plan = step.plan
    wide = widen(gradients)
    if plan.loss_scaling:
        wide = jax.tree.map(lambda g: g / state.loss_scale.factor, wide)
    stored = (state.params, state.optimizer_state)
    old_params, old_state = widen(stored)
    updates, new_state = run_optimizer(step.optimizer, wide, old_state, old_params, loss)
    new_params = optax.apply_updates(old_params, updates)
    rounded = round_tree(
        (new_params, new_state),
        stored,
        _rounding_key(state),
        stochastic=plan.stochastic_rounding,
    )
    if plan.loss_scaling == "dynamic":
        # After an overflow, only the loss scale changes.
        rounded = _select(finite, rounded, stored)
    return rounded


def advance_state(
    step: Step,
    state: TrainState,
    model_state: Any,
    info: Any,
    finite: Bool[Array, ""] | None,
) -> tuple[TrainState, dict[str, Array]]:
    """Update everything but the weights and the optimizer state."""
    scale = state.loss_scale
    if step.plan.loss_scaling == "dynamic":
        assert finite is not None, "check_finite computes it for dynamic scaling"
        model_state = _select(finite, model_state, state.model_state)
        scale = adjust_loss_scale(scale, finite)
    new = state._replace(update=state.update + 1, model_state=model_state, loss_scale=scale)
    return new, _add_program_info(step, state, info, finite)


def _add_program_info(
    step: Step, state: TrainState, info: dict[str, Array], finite: Array | None
) -> dict[str, Array]:
    """Add what the program knows about an update to what the loss reported."""
    info = dict(info)
    for name, function in step.extra_info.items():
        # Counted like the optimizer counts: a skipped update is not one.
        applied = state.update - state.loss_scale.skipped
        info[name] = jnp.asarray(function(applied), jnp.float32)
    if step.plan.loss_scaling == "dynamic":
        info["loss_scale"] = state.loss_scale.factor
    if finite is not None:
        info["gradients_finite"] = finite.astype(jnp.float32)
    return info


def _select(condition: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


# --- what a loss returns ---


def unpack_loss_output(returned: Any) -> tuple[Float32[Array, ""], Any, Any]:
    """Return loss, model state and info; raise if a loss returned anything else."""
    try:
        loss, (model_state, info) = returned
        shape = jnp.shape(loss)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "loss_fn must return (loss, (model_state, info)): a scalar, the model state "
            "(None if there is none) and a dict of scalars ({} if there are none)."
        ) from error
    if shape:
        raise TypeError(
            f"loss_fn must return a scalar loss, got shape {shape}. Take the mean over "
            "the batch."
        )
    if not jnp.issubdtype(kind := jnp.result_type(loss), jnp.floating):
        raise TypeError(f"loss_fn must return a float loss, got {kind}.")
    return jnp.asarray(loss, jnp.float32), model_state, info


def check_info(info: Any, extra_info: Mapping[str, Any]) -> dict[str, Array]:
    """Return info in float32; raise if it is not a flat dict of scalars with free names."""
    if not isinstance(info, Mapping):
        raise TypeError(
            "loss_fn must return (loss, (model_state, info)) with info a flat dict of "
            f"scalars, got info of type {type(info).__name__}."
        )
    reserved = {"loss", "loss_scale", "gradients_finite", *extra_info} & set(info)
    if reserved:
        raise ValueError(
            f"info cannot be called {' or '.join(sorted(reserved))}: the program reports "
            "that itself."
        )
    for name, value in info.items():
        if isinstance(value, Mapping | list | tuple) or jnp.ndim(value):
            raise TypeError(f"info[{name!r}] must be a scalar, got {_describe(value)}.")
    return {name: jnp.asarray(value, jnp.float32) for name, value in info.items()}


def _describe(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return f"a {type(value).__name__}"
    return f"an array of shape {jnp.shape(value)}"
