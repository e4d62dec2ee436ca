"""Several models trained together that differ only in a few hyperparameters.

A *trial* is one of these models. All trials have the same initial weights and batches, and
draw their dropout masks from the same random bits, so each becomes the model that it would
be if trained alone, up to rounding, and differences in the result come from the
hyperparameters. With stochastic rounding, the random numbers of a trial differ from those
of a model trained alone.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.apps.autoencoder.config import TrainingConfig
from millrace.apps.autoencoder.config.training import Hyperparameters, Steps
from millrace.apps.autoencoder.kernels import joint
from millrace.apps.autoencoder.loss import build_loss, report_in_ratings
from millrace.apps.autoencoder.metrics import build_metrics, compute_scores
from millrace.apps.autoencoder.model import Model, TracedRate, stack_rates
from millrace.apps.autoencoder.program import (
    COMPILER_OPTIONS,
    align_dims,
    build_learning_rate,
    build_optimizer,
)
from millrace.data.ratings.matrix import Biases
from millrace.program.evaluate import MetricFn
from millrace.program.step import LossFn, TrainState
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


def get_settings(config: TrainingConfig, model: Model) -> Hyperparameters:
    """Return the settings of a model that is trained alone, but for the learning rate."""
    assert not isinstance(model.dropout_rate, TracedRate)
    assert not isinstance(model.input_dropout_rate, TracedRate)
    return Hyperparameters(
        learning_rate=math.nan,
        weight_decay=config.training.weight_decay,
        dropout_rate=model.dropout_rate,
        input_dropout_rate=model.input_dropout_rate,
    )


Rates = dict[str, TracedRate]
"""Dropout rates that differ between trials, stacked along dim 0, by field of `Model`."""


def stack_varied_rates(trials: Sequence[Hyperparameters]) -> Rates:
    """Return the dropout rates that are not the same in all trials."""
    by_name = {
        name: [getattr(trial, name) for trial in trials]
        for name in ("dropout_rate", "input_dropout_rate")
    }
    return {n: stack_rates(rates) for n, rates in by_name.items() if len(set(rates)) > 1}


def build_trials_loss(
    model: Model,
    build: Callable[[Model], LossFn],
    rates: Rates,
    updates_per_step: int,
    *,
    one_by_one: bool = False,
    fp_exceptions: bool = False,
) -> LossFn:
    """Return the loss of trials whose weights are stacked along dim 0.

    `build` returns the loss of one model. The model that it gets has traced rates where
    they differ, so any loss can be used that draws its masks with ``draw_dropout_masks``
    and ``drop_input_ratings``.

    The value is the mean loss of the trials, and the gradient is that of their sum: the
    weights of a trial appear in its own loss only, so each gets its own gradient. The loss
    reports the lowest RMSE and the number of trials that have not diverged. With
    `one_by_one`, a trial is computed after the other instead of all at once; the result is
    the same. With `fp_exceptions`, the value is not finite as soon as one loss is not.
    """

    def trials_loss(
        params: Any, model_state: TrialsModelState, batch: Any, key: jax.Array
    ) -> Any:
        def loss_of_one(rates: Any, params: Any, model_state: Any) -> Any:
            return build(model._replace(**rates))(params, model_state, batch, key)

        each = _map_one_by_one(loss_of_one) if one_by_one else jax.vmap(loss_of_one)
        losses, (models, infos) = each(rates, params, model_state.models)
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


def _map_one_by_one(loss_of_one: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``jax.vmap(loss_of_one)``, with the trials one after the other.

    The gradient of a trial is computed right after its loss, while its arrays are in the
    cache: a loop that computes all losses first would keep those of all trials.
    """

    def losses(rates: Any, params: Any, model_state: Any) -> Any:
        def differentiate(trial: tuple[Any, Any, Any]) -> Any:
            rates, params, model_state = trial
            return jax.value_and_grad(
                lambda params: loss_of_one(rates, params, model_state), has_aux=True
            )(params)

        @jax.custom_vjp
        def each(params: Any) -> Any:
            return forward(params)[0]

        def forward(params: Any) -> tuple[Any, Any]:
            return jax.lax.map(differentiate, (rates, params, model_state))

        def backward(gradients: Any, given: tuple[jax.Array, Any]) -> tuple[Any]:
            scale = functools.partial(align_dims, given[0])
            return (jax.tree.map(lambda g: scale(g) * g, gradients),)

        each.defvjp(forward, backward)
        return each(params)

    return losses


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
    trials: Sequence[Hyperparameters],
    device: Any,
    unit: float = 1.0,
) -> TrainingProgram:
    """Return one compiled loop that trains a model for each trial.

    `unit` is what the values of the ratings are measured in.
    """
    plan = config.plan
    optimizer = _build_trials_optimizer(config, steps, trials)
    if plan.loss_scaling == "dynamic":
        # The scale is common to all trials: one that diverges would lower it until no
        # other trial learns.
        plan = dataclasses.replace(plan, loss_scaling=_LOSS_SCALE)
        optimizer = skip_nonfinite_trials(optimizer)
    # Rates that all trials share are constants, as in a program for one model.
    first, rates = trials[0], stack_varied_rates(trials)
    model = model._replace(
        dropout_rate=first.dropout_rate, input_dropout_rate=first.input_dropout_rate
    )
    build = _choose_loss(config, model, rates, len(trials), device)
    loss_fn = build_trials_loss(
        model,
        lambda model: report_in_ratings(build(model), unit),
        rates,
        steps.updates_per_step,
        one_by_one=_prefers_one_by_one(config, device),
        fp_exceptions=config.training.fp_exceptions,
    )
    return training_program(
        loss_fn,
        optimizer,
        plan,
        extra_info={"learning_rate_factor": build_learning_rate(config, 1.0, steps)},
        devices=[device],
        compiler_options=COMPILER_OPTIONS,
    )


def _build_trials_optimizer(
    config: TrainingConfig, steps: Steps, trials: Sequence[Hyperparameters]
) -> optax.GradientTransformation:
    rates = np.array([trial.learning_rate for trial in trials])
    decays = [trial.weight_decay for trial in trials]
    return build_optimizer(
        config,
        build_learning_rate(config, rates, steps),
        np.array(decays) if len(set(decays)) > 1 else decays[0],
    )


def _prefers_one_by_one(config: TrainingConfig, device: Any) -> bool:
    """Whether trials are faster one after the other.

    On a CPU without re-feeding, each known rating reads a row of weights, and the rows of
    sixteen models do not fit into the cache: at once they took several times as long. In
    16 bits the loss scale has to come before the gradient.
    """
    is_wide = config.plan.types.compute == "float32"
    return device.platform == "cpu" and config.training.refeeding == "none" and is_wide


def _choose_loss(
    config: TrainingConfig, model: Model, rates: Rates, num_trials: int, device: Any
) -> Callable[[Model], LossFn]:
    """Return a function that builds the loss of one trial."""
    refeeding, compute = config.training.refeeding, config.plan.types.compute
    fits = joint.is_supported(
        model, config.resolved_batch_size, num_trials, compute, device
    )
    if refeeding == "joint" and fits and not rates:
        return joint.build_joint_loss
    return lambda model: build_loss(
        model, refeeding, platform=device.platform, num_models=num_trials
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


def select_trials(state: TrainState, places: Sequence[int]) -> TrainState:
    """Return the state of some of the trials, on the host."""
    chosen = np.array(places)
    return _map_trials(lambda x: x[chosen], jax.device_get(state))


@jax.jit
def _take(state: TrainState, place: jax.Array) -> TrainState:
    return _map_trials(lambda x: jax.lax.dynamic_index_in_dim(x, place, 0, False), state)


def take_trial(state: TrainState, place: int) -> TrainState:
    """Return the state of one trial, as that of a model that is trained alone."""
    taken = _take(state, jax.device_put(np.int32(place)))
    return taken._replace(model_state=taken.model_state.models)


def _map_trials(function: Callable[[Any], Any], state: TrainState) -> TrainState:
    """Apply a function to everything that has one entry per trial along dim 0."""

    def apply(tree: Any) -> Any:
        # Counts of updates are scalars for all trials.
        return jax.tree.map(lambda x: function(x) if np.ndim(x) else x, tree)

    return state._replace(
        params=apply(state.params),
        model_state=apply(state.model_state),
        optimizer_state=apply(state.optimizer_state),
    )


def build_trials_metrics(
    model: Model,
    labels: Sequence[str],
    biases: Biases | None = None,
    *,
    clip: bool = False,
) -> MetricFn:
    """Return the metric function of several trials; names end in the label of the trial."""
    metrics = build_metrics(model, biases, clip=clip)
    each = jax.vmap(metrics, in_axes=(0, None, None))

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
    each = split_trials_scores(means, labels)
    return {f"rmse_{label}": each[label]["rmse"] for label in labels}


def split_trials_scores(
    means: dict[str, float], labels: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Turn means over rows into the metrics of each trial, by label."""
    scores = {}
    for label in labels:
        suffix = f"_{label}"
        own = {n.removesuffix(suffix): v for n, v in means.items() if n.endswith(suffix)}
        scores[label] = compute_scores(own)
    return scores
