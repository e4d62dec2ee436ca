"""Several models trained together that differ only in their learning rates.

A *trial* is one of these models. All trials have the same initial weights, batches and
dropout, so each becomes the model that it would be if trained alone, up to rounding, and
differences in the result come from the learning rate. With stochastic rounding, the random
numbers of a trial differ from those of a model trained alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.apps.autoencoder.config import TrainingConfig
from millrace.apps.autoencoder.config.training import Steps
from millrace.apps.autoencoder.kernels import joint
from millrace.apps.autoencoder.loss import build_loss
from millrace.apps.autoencoder.metrics import build_metrics, compute_scores
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.program import (
    COMPILER_OPTIONS,
    build_learning_rate,
    build_optimizer,
)
from millrace.program.evaluate import MetricFn
from millrace.program.step import LossFn
from millrace.program.training import TrainingProgram, training_program

_LOSS_SCALE = 1000.0
"""The loss scale of the reference, used in place of dynamic scaling."""


class StepMeans(NamedTuple):
    """Sums of losses and errors of all trials since the current step began.

    They are part of the model state because an update reports scalars only: one metric per
    trial would fill the log.
    """

    num_updates: jax.Array  # ()
    loss: jax.Array  # (trials,)
    rmse: jax.Array  # (trials,)

    def add(self, loss: jax.Array, rmse: jax.Array, updates_per_step: int) -> "StepMeans":
        """Add an update; the first one of a step starts from 0 again."""
        is_over = self.num_updates == updates_per_step
        old = StepMeans(*(jnp.where(is_over, 0.0, value) for value in self))
        return StepMeans(old.num_updates + 1, old.loss + loss, old.rmse + rmse)


class TrialsModelState(NamedTuple):
    """The model state of several trials."""

    models: Any
    means: StepMeans


def build_trials_loss(
    loss_fn: LossFn, updates_per_step: int, *, fp_exceptions: bool = False
) -> LossFn:
    """Return the loss of trials whose weights are stacked along dim 0.

    The value is the mean loss of the trials, and the gradient is that of their sum: the
    weights of a trial appear in its own loss only, so each gets its own gradient. The loss
    reports the lowest RMSE and the number of trials that have not diverged. With
    `fp_exceptions`, the value is not finite as soon as one loss is not.
    """

    def trials_loss(
        params: Any, model_state: TrialsModelState, batch: Any, key: jax.Array
    ) -> Any:
        each = jax.vmap(loss_fn, in_axes=(0, 0, None, None))
        losses, (models, infos) = each(params, model_state.models, batch, key)
        means = model_state.means.add(losses, infos["rmse"], updates_per_step)
        info = {
            "lowest_rmse": jnp.nanmin(infos["rmse"]),
            "finite_models": jnp.isfinite(losses).sum().astype(jnp.float32),
        }
        mean = mean_with_sum_gradient(losses)
        if fp_exceptions:
            mean = jnp.where(jnp.isfinite(losses).all(), mean, jnp.nan)
        return mean, (TrialsModelState(models, jax.lax.stop_gradient(means)), info)

    return trials_loss


@jax.custom_vjp
def mean_with_sum_gradient(losses: jax.Array) -> jax.Array:  # (trials,) -> ()
    """Return the mean of the finite losses, with the gradient of the sum of all.

    The gradient of the mean would divide that of every trial by the number of trials.
    """
    finite = jnp.isfinite(losses)
    mean = jnp.where(finite, losses, 0).sum() / jnp.maximum(finite.sum(), 1)
    return jnp.where(finite.any(), mean, jnp.nan).astype(losses.dtype)


mean_with_sum_gradient.defvjp(
    lambda losses: (mean_with_sum_gradient(losses), jnp.ones_like(losses)),
    lambda ones, gradient: (gradient * ones,),
)


def init_trials(weights: tuple[Any, Any], num_trials: int) -> tuple[Any, TrialsModelState]:
    """Return weights and model state of trials that all start from the same weights."""
    params, models = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (num_trials, *jnp.shape(x))), weights
    )
    zeros = jnp.zeros(num_trials)
    return params, TrialsModelState(models, StepMeans(jnp.float32(0), zeros, zeros))


def build_trials_program(
    config: TrainingConfig,
    model: Model,
    steps: Steps,
    exponents: Sequence[float],
    device: Any,
) -> TrainingProgram:
    """Return one compiled loop that trains a model for each learning rate."""
    batch_size, plan = config.resolved_batch_size, config.plan
    initial = 2.0 ** np.array(exponents) * batch_size
    optimizer = build_optimizer(config, build_learning_rate(config, initial, steps))
    if plan.loss_scaling == "dynamic":
        # The scale is common to all trials: one that diverges would lower it until no
        # other trial learns.
        plan = dataclasses.replace(plan, loss_scaling=_LOSS_SCALE)
        optimizer = skip_nonfinite_trials(optimizer)
    loss_fn = build_loss(model, config.training.refeeding, platform=device.platform)
    if config.training.refeeding == "joint" and joint.is_supported(
        model, batch_size, len(exponents), plan.types.compute, device
    ):
        loss_fn = joint.build_joint_loss(model)
    return training_program(
        build_trials_loss(
            loss_fn, steps.updates_per_step, fp_exceptions=config.training.fp_exceptions
        ),
        optimizer,
        plan,
        extra_info={"learning_rate_factor": build_learning_rate(config, 1.0, steps)},
        devices=[device],
        compiler_options=COMPILER_OPTIONS,
    )


def skip_nonfinite_trials(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Skip the update of every trial along dim 0 whose gradients are not finite."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves = jax.tree.leaves(updates)
        each = [jnp.isfinite(x).reshape(x.shape[0], -1).all(1) for x in leaves]
        finite = jnp.stack(each).all(0)

        def select(new: jax.Array, old: Any) -> jax.Array:
            # The count of updates is a scalar for all trials and always advances.
            shape = (-1, *[1] * (new.ndim - 1))
            return jnp.where(finite.reshape(shape), new, old) if new.ndim else new

        new_updates, new_state = optimizer.update(updates, state, params)
        return (
            jax.tree.map(lambda x: select(x, 0), new_updates),
            jax.tree.map(select, new_state, state),
        )

    return optax.GradientTransformation(optimizer.init, update)


def build_trials_metrics(model: Model, labels: Sequence[str]) -> MetricFn:
    """Return the metric function of several trials; names end in the label of the trial."""
    each = jax.vmap(build_metrics(model), in_axes=(0, None, None))

    def metric_fn(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
        return {
            f"{name}_{label}": values[number]
            for name, values in each(params, model_state, batch).items()
            for number, label in enumerate(labels)
        }

    return metric_fn


def compute_trials_scores(
    means: dict[str, float], labels: Sequence[str]
) -> dict[str, float]:
    """Turn means over rows into the RMSE of each trial."""
    scores = {}
    for label in labels:
        suffix = f"_{label}"
        own = {n.removesuffix(suffix): v for n, v in means.items() if n.endswith(suffix)}
        scores[f"rmse{suffix}"] = compute_scores(own)["rmse"]
    return scores
