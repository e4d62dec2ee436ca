"""Several models trained together: they differ in nothing but their learning rates.

All have the same first weights, batches and dropout, so each becomes what it would have
become alone, but for rounding, and what differs in the end is due to the learning rate.
Where weights are rounded at random, the models' chances are others than one's alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.apps.autoencoder.config import TrainingOptions
from millrace.apps.autoencoder.kernels import joint
from millrace.apps.autoencoder.loss import loss_of
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.program import (
    COMPILER_OPTIONS,
    learning_rate_of,
    optimizer_of,
)
from millrace.apps.autoencoder.reference_steps import Steps
from millrace.apps.autoencoder.scoring import errors_of, scores
from millrace.program.evaluate import MetricFn
from millrace.program.step import LossFn
from millrace.program.training import TrainingProgram, training_program

_LOSS_SCALE = 1000.0
"""The reference's, for models whose loss should be scaled dynamically."""


def label(exponent: float) -> str:
    """Write the exponent of a learning rate as it is part of a metric's name.

    Twelve digits tell apart what 32 bits do.
    """
    return f"{-exponent:.12g}"


class Means(NamedTuple):
    """What the models' losses and errors have been since the step began, added up.

    They are carried rather than reported: what an update reports is single numbers, and
    the loop would write every model's by itself.
    """

    num_updates: jax.Array
    loss: jax.Array
    rmse: jax.Array

    def plus(self, loss: jax.Array, rmse: jax.Array, updates_per_step: int) -> "Means":
        """Add an update's; the first one of a step begins anew."""
        is_over = self.num_updates == updates_per_step
        old = Means(*(jnp.where(is_over, 0.0, value) for value in self))
        return Means(old.num_updates + 1, old.loss + loss, old.rmse + rmse)


class JointModelState(NamedTuple):
    """What the loss of several models keeps from update to update."""

    models: Any
    means: Means


def together(
    loss_fn: LossFn, updates_per_step: int, *, fp_exceptions: bool = False
) -> LossFn:
    """Return the loss of models whose weights are stacked along dim 0.

    Its value is the mean of the models' losses, and its gradient that of their sum: a
    model's weights have no part in the loss of another, so this is each one's own. It
    reports the lowest error of all, and how many models have not diverged. With
    `fp_exceptions`, a loss that is not finite makes the value so.
    """

    def loss(params: Any, model_state: JointModelState, batch: Any, key: jax.Array) -> Any:
        each = jax.vmap(loss_fn, in_axes=(0, 0, None, None))
        losses, (models, infos) = each(params, model_state.models, batch, key)
        means = model_state.means.plus(losses, infos["rmse"], updates_per_step)
        info = {
            "lowest_rmse": jnp.nanmin(infos["rmse"]),
            "finite_models": jnp.isfinite(losses).sum().astype(jnp.float32),
        }
        mean = mean_of_models(losses)
        if fp_exceptions:
            mean = jnp.where(jnp.isfinite(losses).all(), mean, jnp.nan)
        return mean, (JointModelState(models, jax.lax.stop_gradient(means)), info)

    return loss


@jax.custom_vjp
def mean_of_models(losses: jax.Array) -> jax.Array:
    """Return the mean of the losses that are finite; its gradient is that of the sum.

    The gradient of the mean would divide each model's by how many there are.
    """
    finite = jnp.isfinite(losses)
    mean = jnp.where(finite, losses, 0).sum() / jnp.maximum(finite.sum(), 1)
    return jnp.where(finite.any(), mean, jnp.nan).astype(losses.dtype)


mean_of_models.defvjp(
    lambda losses: (mean_of_models(losses), jnp.ones_like(losses)),
    lambda ones, gradient: (gradient * ones,),
)


def first_state(weights: tuple[Any, Any], count: int) -> tuple[Any, JointModelState]:
    """Return the weights and model state of models that all start alike."""
    params, model_state = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), weights
    )
    nothing = jnp.zeros(count)
    return params, JointModelState(model_state, Means(jnp.float32(0), nothing, nothing))


def trials_program(
    config: TrainingOptions,
    model: Model,
    steps: Steps,
    exponents: Sequence[float],
    device: Any,
) -> TrainingProgram:
    """Return one compiled loop that trains a model for each of the learning rates."""
    batch_size, plan = config.resolved_batch_size, config.plan
    first = 2.0 ** np.array(exponents) * batch_size
    optimizer = optimizer_of(config, learning_rate_of(config, first, steps))
    if plan.loss_scaling == "dynamic":
        # One scale for all: with a model that diverges, no other would learn any more.
        plan = dataclasses.replace(plan, loss_scaling=_LOSS_SCALE)
        optimizer = each_if_finite(optimizer)
    loss_fn = loss_of(model, config.refeeding, platform=device.platform)
    if config.refeeding == "joint" and joint.are_for(
        model, batch_size, len(exponents), plan.types.compute, device
    ):
        loss_fn = joint.joint_loss(model)
    return training_program(
        together(loss_fn, steps.updates_per_step, fp_exceptions=config.fp_exceptions),
        optimizer,
        plan,
        extra_info={"learning_rate_factor": learning_rate_of(config, 1.0, steps)},
        devices=[device],
        compiler_options=COMPILER_OPTIONS,
    )


def each_if_finite(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Leave an update out for those models along dim 0 whose gradients are not finite."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        leaves = jax.tree.leaves(updates)
        each = [jnp.isfinite(x).reshape(x.shape[0], -1).all(1) for x in leaves]
        finite = jnp.stack(each).all(0)

        def chosen(new: jax.Array, old: Any) -> jax.Array:
            # What has one value for all models, the count of updates, moves on.
            shape = (-1, *[1] * (new.ndim - 1))
            return jnp.where(finite.reshape(shape), new, old) if new.ndim else new

        new, moved = optimizer.update(updates, state, params)
        return (
            jax.tree.map(lambda x: chosen(x, 0), new),
            jax.tree.map(chosen, moved, state),
        )

    return optax.GradientTransformation(optimizer.init, update)


def trials_errors(model: Model, labels: Sequence[str]) -> MetricFn:
    """Return what validation measures of each user, for each of the models."""
    each = jax.vmap(errors_of(model), in_axes=(0, None, None))

    def metric_fn(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
        return {
            f"{name}_{label}": values[place]
            for name, values in each(params, model_state, batch).items()
            for place, label in enumerate(labels)
        }

    return metric_fn


def trials_scores(means: dict[str, float], labels: Sequence[str]) -> dict[str, float]:
    """Turn the means over users into each model's RMSE."""
    found = {}
    for each in labels:
        ending = f"_{each}"
        own = {n.removesuffix(ending): v for n, v in means.items() if n.endswith(ending)}
        found[f"rmse{ending}"] = scores(own)["rmse"]
    return found
