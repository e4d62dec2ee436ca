"""The training program: loss, optimizer and model state."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.config.sections import ObjectiveName
from millrace.apps.vcd.data import BinaryImages
from millrace.apps.vcd.model import Tree, bernoulli_vae, init_params
from millrace.apps.vcd.objective import (
    LOCAL,
    ControlVariateSettings,
    Estimate,
    control_variate_values,
    draw,
    estimate,
    init_control_variate,
    update_control_variate,
)
from millrace.apps.vcd.sampler import Average, HmcSettings
from millrace.plan import Plan
from millrace.program.accumulate import path_name
from millrace.program.replicas import REPLICA_AXIS
from millrace.program.step import LossFn
from millrace.program.training import TrainingProgram, training_program

_MAX_UNROLLED_STEPS = 16  # more HMC steps are compiled as a loop

# RMSProp of the reference implementations.
_DECAY, _FIRST_MEAN_SQUARE, _EPSILON = 0.9, 0.01, 1.0

COMPILER_OPTIONS = {
    # Run independent kernels concurrently: 1,153 updates per second instead of 1,042 at
    # batch 100, 1,254 instead of 1,166 in bfloat16 (jax 0.11.2, H200).
    "gpu": {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"},
}


def build_program(
    config: VcdConfig, images: BinaryImages, devices: list[Any]
) -> TrainingProgram:
    """Return the training program; the training images are constants in it."""
    batch_size = config.plan.batching.global_batch_size
    every = config.training.updates_per_decay(len(images), batch_size)
    rates = {
        scope: step_decay(base, config.training.learning_rate_decay, every)
        for scope, base in config.training.learning_rates(batch_size).items()
    }
    # Unrolled steps save the time between kernels; a CPU only compiles longer.
    unroll = devices[0].platform != "cpu"
    return training_program(
        build_loss(config, images, unroll=unroll),
        rmsprop(rates),
        config.plan,
        model_state_reduction=_reduce_over_replicas,
        extra_info={"learning_rate": rates["decoder"]},
        devices=devices,
        compiler_options=COMPILER_OPTIONS,
    )


def init_state(config: VcdConfig, images: BinaryImages) -> tuple[Tree, Tree]:
    """Return the initial weights and model state."""
    model_state = {
        "step_size": jnp.float32(config.model.step_size),
        "control_variate": init_control_variate(
            control_variate_settings(config), len(images)
        ),
    }
    return init_weights(config, images.num_pixels), model_state


def init_weights(config: VcdConfig, num_pixels: int) -> Tree:
    """Return the initial weights."""
    return init_params(
        jax.random.key(config.run.seed),
        num_pixels=num_pixels,
        z_dim=config.model.z_dim,
        num_hidden=config.model.num_hidden,
    )


def hmc_settings(config: VcdConfig, *, unroll: bool = False) -> HmcSettings:
    """Return the settings of the chains in training."""
    model = config.model
    # Scales with the batch size, as in the reference implementation.
    rate = model.step_size_adaption_rate * config.plan.batching.global_batch_size / 100
    num_steps = model.num_burn_in_steps + model.num_hmc_steps
    return HmcSettings(
        num_burn_in_steps=model.num_burn_in_steps,
        num_steps=model.num_hmc_steps,
        num_leapfrog_steps=model.num_leapfrog_steps,
        acceptance_target=model.acceptance_target,
        adaption_rate=rate if model.step_size_adaption == "ruiz" else 0.0,
        unroll=unroll and num_steps <= _MAX_UNROLLED_STEPS,
    )


def control_variate_settings(config: VcdConfig) -> ControlVariateSettings:
    """Return the settings of the control variate; only vcd has one."""
    model = config.model
    return ControlVariateSettings(
        model.control_variate if model.resolved_objective == "vcd" else "none",
        model.control_variate_decay,
        model.independent_iterations,
    )


def build_loss(config: VcdConfig, images: BinaryImages, *, unroll: bool = False) -> LossFn:
    """Return the loss of a micro-batch ``{"index": (samples,)}`` of the images."""
    model, objective = bernoulli_vae(), config.model.resolved_objective
    hmc = hmc_settings(config, unroll=unroll)
    control_variate = control_variate_settings(config)
    scale = _loss_scale(config.plan)
    average = mean_over_replicas(config.plan.num_replicas)

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        index = batch["index"]
        c = control_variate_values(model_state["control_variate"], index)
        terms = estimate(
            model,
            params,
            images.gather(index),
            draw(key, objective, hmc, (index.shape[0], config.model.z_dim)),
            objective=objective,
            hmc=hmc,
            control_variate=c,
            step_size=model_state["step_size"],
            average=average,
        )
        model_state = {
            "step_size": terms.step_size,
            "control_variate": update_control_variate(
                model_state["control_variate"], index, terms.g, control_variate
            ),
        }
        return _total(terms, scale), (model_state, _info(terms, c, scale, objective))

    return loss_fn


def _loss_scale(plan: Plan) -> float:
    """Return the factor that turns the mean over a micro-batch into the sum over an update.

    The runtime averages gradients over replicas, and over micro-batches as well unless the
    reduction is "sum".
    """
    if plan.gradient_accumulation_reduction == "sum":
        return float(plan.batching.samples_per_step)
    return float(plan.batching.global_batch_size)


def _total(terms: Estimate, scale: float) -> jax.Array:
    """Return a scalar with the gradient of the surrogate and the value of the loss."""
    surrogate = (terms.encoder_surrogate + terms.decoder_loss).mean() * scale
    value = (terms.encoder_loss + terms.decoder_loss).mean() * scale
    return surrogate + lax.stop_gradient(value - surrogate)


def _info(
    terms: Estimate, c: jax.Array, scale: float, objective: ObjectiveName
) -> dict[str, jax.Array]:
    info = {
        "encoder_loss": terms.encoder_loss.mean() * scale,
        "decoder_loss": terms.decoder_loss.mean() * scale,
        "elbo": terms.elbo.mean(),
        "log_joint_start": terms.log_joint_start.mean(),
    }
    if objective != "standard_kl":
        info |= {
            "log_joint_end": terms.log_joint_end.mean(),
            "acceptance": terms.acceptance,
            "step_size": terms.step_size,
        }
    if objective == "vcd":
        info |= {
            "vcd": terms.vcd.mean(),
            "g": terms.g.mean(),
            "control_variate": c.mean(),
        }
    return info


def mean_over_replicas(num_replicas: int) -> Average:
    """Return a function that averages over the chains of all replicas."""
    if num_replicas == 1:
        return jnp.mean
    return lambda values: lax.pmean(values.mean(), REPLICA_AXIS)


def _reduce_over_replicas(path: str, value: Any) -> Literal["mean", "sum"]:
    """Choose how the model states of replicas are combined.

    A row of the local control variates changes on one replica only, so changes are added
    up. Everything else is averaged.
    """
    del value
    return "sum" if path.endswith(f"/{LOCAL}") else "mean"


class RmsPropState(NamedTuple):
    """The number of updates, and the moving mean of each squared gradient."""

    updates: jax.Array
    mean_square: Any


def rmsprop(learning_rates: Mapping[str, optax.Schedule]) -> optax.GradientTransformation:
    """Return ``m <- 0.9 m + 0.1 g^2; w <- w - lr g / (1 + sqrt(m))``, with m = 0.01 first.

    The 1 is outside the root and large: small gradients give plain gradient descent, which
    is why the loss is a sum over the batch and not a mean.

    Args:
        learning_rates: Schedules by scope, which is how the path of a weight begins.
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
            scope: jnp.asarray(schedule(state.updates))
            for scope, schedule in learning_rates.items()
        }

        def step(path: Any, gradient: jax.Array, square: jax.Array) -> jax.Array:
            rate = rates[_find_scope(path_name(path), rates)]
            return -rate * gradient / (_EPSILON + jnp.sqrt(square))

        updates = jax.tree_util.tree_map_with_path(step, gradients, mean_square)
        return updates, RmsPropState(state.updates + 1, mean_square)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _find_scope(path: str, scopes: Mapping[str, Any]) -> str:
    matching = [scope for scope in scopes if path.startswith(f"{scope}/")]
    if len(matching) != 1:
        raise ValueError(
            f"The weight {path} must belong to exactly one of {', '.join(scopes)}; it "
            f"belongs to {', '.join(matching) or 'none'}."
        )
    return matching[0]


def step_decay(base: float, decay: float, updates_per_step: int) -> optax.Schedule:
    """Return the schedule ``base * decay ** floor(update / updates_per_step)``."""

    def schedule(update: Any) -> jax.Array:
        return base * jnp.float32(decay) ** jnp.floor_divide(update, updates_per_step)

    return schedule
