"""Build the model, the optimizer and the training program from a configuration."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.apps.autoencoder.config import AutoencoderConfig, TrainingConfig
from millrace.apps.autoencoder.config.training import Steps
from millrace.apps.autoencoder.loss import (
    build_loss,
    init_model_state,
    report_in_ratings,
)
from millrace.apps.autoencoder.model import DROPOUT_RATES, Model, init_params
from millrace.config import ConfigurationError
from millrace.data.ratings.matrix import Ratings
from millrace.loop.event_schedule import EventSchedule, check_update_count
from millrace.program.training import TrainingProgram, training_program

_MOMENTUM = 0.9
_CLIP_AT = 1.0
_DIRECTIONS = {
    "Momentum": lambda: optax.trace(_MOMENTUM),
    "SGD": optax.identity,
    "Adam": optax.scale_by_adam,
}
"""What each optimizer makes of a gradient."""

COMPILER_OPTIONS = {
    # Fuse products with the operations around them into calls of the YNN library: a tenth
    # less time (jax 0.10.2, two cores, size 128, batch 64, 17,736 items).
    "cpu": {
        "xla_cpu_experimental_ynn_fusion_type": (
            "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"
        )
    },
    # Run independent kernels concurrently: an update takes 183 us instead of 208, one of
    # sixteen models 522 us instead of 555 (jax 0.11.2, H200, the same sizes).
    "gpu": {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
}


def plan_steps(config: TrainingConfig, num_rows: int) -> Steps:
    """Compute the length of a run over this many rows with ratings."""
    batch_size = config.resolved_batch_size
    if num_rows < batch_size:
        raise ConfigurationError(
            f"There are {num_rows} {config.data.rows} with ratings, fewer than one batch "
            f"of {batch_size}. Lower --batch-size."
        )
    per_step = min(config.training.batches_per_step, num_rows // batch_size)
    steps_per_epoch = num_rows / (per_step * batch_size)
    rate = config.training.valid_per_epoch
    steps = Steps(
        batches_per_step=per_step,
        total=max(1, int(config.resolved_epochs * steps_per_epoch)),
        per_validation=max(1, int(steps_per_epoch / rate)) if rate else 0,
        batches_per_epoch=num_rows // batch_size,
        updates_per_batch=2 if config.training.refeeding == "detached" else 1,
    )
    check_update_count(steps.total_updates)
    return steps


def build_schedule(steps: Steps, steps_per_log: int) -> EventSchedule:
    """Return the schedule of events, in which every step is one execution."""
    validation = steps.per_validation * steps.updates_per_step
    return EventSchedule(
        updates_per_epoch=steps.batches_per_epoch * steps.updates_per_batch,
        total_updates=steps.total_updates,
        updates_per_execution=steps.updates_per_step,
        periods={
            "log": min(steps_per_log, steps.total) * steps.updates_per_step,
            "validate": validation,
            "checkpoint": validation,
        },
        warnings=[],
    )


def build_program(
    config: AutoencoderConfig, model: Model, steps: Steps, device: Any, unit: float = 1.0
) -> TrainingProgram:
    """Return the training program: the loss of the model, the optimizer and the plan.

    `unit` is what the values of the ratings are measured in.
    """
    learning_rate = build_learning_rate(config, config.initial_learning_rate, steps)
    loss_fn = build_loss(
        model, config.training.refeeding, config.num_replicas, platform=device.platform
    )
    return training_program(
        report_in_ratings(loss_fn, unit),
        build_optimizer(config, learning_rate),
        config.plan,
        extra_info={"learning_rate": learning_rate},
        devices=[device] if config.num_replicas == 1 else None,
        compiler_options=COMPILER_OPTIONS,
    )


def build_model(config: TrainingConfig, num_items: int) -> Model:
    """Return the model for rows of this many items."""
    options, size = config.model, config.resolved_size
    ranks = config.training.objective == "ranking"
    rate = options.dropout_rate
    if rate is None:
        rate = 0.0 if options.no_dropout else DROPOUT_RATES[size]
    return Model(
        num_items=num_items,
        size=size,
        dropout_rate=rate,
        selu=not options.no_selu,
        # Logits, and ratings without biases, are below 0 as often as above.
        linear_output=config.data.subtract_biases or ranks,
        tied=not options.untied_decoder,
        input_dropout_rate=options.input_dropout_rate,
        input_offset=options.input_offset,
        zero_output=options.zero_output_layer,
        positive_from=config.data.positive_from if ranks else None,
    )


def init_weights(
    config: TrainingConfig, model: Model, training: Ratings | None = None
) -> tuple[Any, Any]:
    """Return the weights and the model state before the first update.

    A model that ranks items starts with the popularity of those in `training`.
    """
    params = init_params(model, jax.random.key(config.run.seed))
    if model.positive_from is not None and training is not None:
        liked = training.items[np.asarray(training.values) >= model.positive_from]
        count = np.bincount(liked, minlength=model.num_items) + 1.0
        bias = np.log(count / count.mean()).astype(np.float32)
        params["decoder"]["fc_3"]["bias"] = jax.device_put(bias)
    model_state = init_model_state(
        model,
        config.training.refeeding,
        config.resolved_batch_size,
        config.plan.types.compute,
    )
    return params, model_state


def build_learning_rate(
    config: TrainingConfig, initial: float | np.ndarray, steps: Steps
) -> optax.Schedule:
    """Return the learning rate schedule; factors are constant within a step.

    `initial` is the learning rate at the start, or one per model.
    """
    if config.training.has_cosine_schedule:
        shape = optax.cosine_decay_schedule(1.0, steps.total_updates)
        return lambda update: shape(update) * jnp.asarray(initial, jnp.float32)
    factors = np.array(config.training.decay_factors, np.float32)
    switches = config.training.decay_switches
    last_steps = np.array([int(switch * steps.total) for switch in switches], np.int32)

    def schedule(update: Any) -> jax.Array:
        step = jnp.asarray(update, jnp.int32) // steps.updates_per_step
        passed = jnp.sum(step > last_steps)
        return jnp.asarray(factors)[passed] * jnp.asarray(initial, jnp.float32)

    return schedule


def build_optimizer(
    config: TrainingConfig,
    learning_rate: optax.Schedule,
    weight_decay: float | np.ndarray | None = None,
) -> optax.GradientTransformation:
    """Return SGD or Adam with weight decay and optional clipping.

    ``g <- clip(g + decay w); v <- 0.9 v + g; w <- w - lr v``. As in the reference, the
    decay applies to every parameter, biases included. Adam computes v in its own way.
    `weight_decay` is that of the configuration by default, or one per model.
    """
    training = config.training
    decay = training.weight_decay if weight_decay is None else weight_decay
    return optax.chain(
        _add_decayed_weights(jnp.asarray(decay, jnp.float32))
        if isinstance(decay, np.ndarray)
        else optax.add_decayed_weights(decay),
        optax.clip(_CLIP_AT) if training.gradient_clipping else optax.identity(),
        _DIRECTIONS[training.optimizer](),
        _scale_by_learning_rates(learning_rate),
    )


def _add_decayed_weights(decays: jax.Array) -> optax.GradientTransformation:
    """Add the weights times one factor per model along dim 0."""

    def update(updates: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g, p: g + align_dims(decays, p) * p, updates, params)

    return optax.stateless(update)


def align_dims(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """Return values with the dims of a leaf: none of them, or one per model along dim 0."""
    return values.reshape(*values.shape, *[1] * (leaf.ndim - values.ndim))


def _scale_by_learning_rates(learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Multiply by the negative learning rate, or by one per model along dim 0."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        rate = jnp.asarray(learning_rate(state.count))
        scaled = jax.tree.map(lambda leaf: -align_dims(rate, leaf) * leaf, updates)
        count = optax.safe_increment(state.count)
        return scaled, optax.ScaleByScheduleState(count)

    return optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(jnp.int32(0)), update
    )
