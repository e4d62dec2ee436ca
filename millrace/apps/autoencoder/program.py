"""The recipe: the model and the optimizer that a configuration stands for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.apps.autoencoder.config import TrainingConfig
from millrace.apps.autoencoder.model import DROPOUT_RATES, Model
from millrace.apps.autoencoder.reference_steps import Steps

_MOMENTUM = 0.9
_CLIPPED_AT = 1.0

COMPILER_OPTIONS = {
    # Products with what surrounds them as one operation of the library: a tenth less time
    # (jax 0.10.2, two cores, size 128, batch 64, 17,736 items).
    "cpu": {
        "xla_cpu_experimental_ynn_fusion_type": (
            "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"
        )
    },
    # Kernels that do not wait for each other side by side: an update in 183 us instead of
    # 208, of sixteen models in 522 instead of 555 (jax 0.11.2, H200, the same sizes).
    "gpu": {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
}


def model_of(config: TrainingConfig, num_items: int) -> Model:
    """Return the model for so many items."""
    size = config.resolved_size
    rate = config.model.dropout_rate
    if rate is None:
        rate = 0.0 if config.model.no_dropout else DROPOUT_RATES[size]
    return Model(
        num_items=num_items,
        size=size,
        dropout_rate=rate,
        selu=not config.model.no_selu,
        # What is left of ratings without their biases is as often below 0 as above.
        linear_output=config.data.subtract_biases,
        tied=not config.model.untied_decoder,
        input_dropout_rate=config.model.input_dropout_rate,
    )


def learning_rate_of(
    config: TrainingConfig, first: float | np.ndarray, steps: Steps
) -> optax.Schedule:
    """Return the learning rate of each update: constant within a step, as the factors say.

    Args:
        config: Has the factors, and when they come.
        first: The learning rate at the start; an array where several models are trained.
        steps: How long the run is.
    """
    factors = np.array(config.training.decay_factors, np.float32)
    last_steps = np.array(
        [int(s * steps.total) for s in config.training.decay_switches], np.int32
    )

    def rate(update: Any) -> jax.Array:
        step = jnp.asarray(update, jnp.int32) // steps.updates_per_step
        passed = jnp.sum(step > last_steps)
        return jnp.asarray(factors)[passed] * jnp.asarray(first, jnp.float32)

    return rate


def optimizer_of(
    config: TrainingConfig, learning_rate: optax.Schedule
) -> optax.GradientTransformation:
    """Return ``g <- g + decay w``, clipped if asked for; ``v <- 0.9 v + g; w <- w - lr v``.

    The decay reaches every variable, biases included.
    """
    clip = (
        optax.clip(_CLIPPED_AT) if config.training.gradient_clipping else optax.identity()
    )
    momentum = _MOMENTUM if config.training.optimizer == "Momentum" else None
    return optax.chain(
        optax.add_decayed_weights(config.training.weight_decay),
        clip,
        optax.trace(momentum) if momentum else optax.identity(),
        scale_by_learning_rates(learning_rate),
    )


def scale_by_learning_rates(learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Multiply by minus the learning rate, or by one for each model along dim 0."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        rate = jnp.asarray(learning_rate(state.count))

        def scaled(leaf: jax.Array) -> jax.Array:
            shape = (*rate.shape, *[1] * (leaf.ndim - rate.ndim))
            return -rate.reshape(shape) * leaf

        count = optax.safe_increment(state.count)
        return jax.tree.map(scaled, updates), optax.ScaleByScheduleState(count)

    return optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(jnp.int32(0)), update
    )
