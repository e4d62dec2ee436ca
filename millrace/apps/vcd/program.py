"""The recipe: the loss of a batch of indices, its optimizer, and what is carried along."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from millrace.apps.vcd import control_variate, objective
from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.control_variate import ControlVariateSettings
from millrace.apps.vcd.data import BinaryPictures
from millrace.apps.vcd.model import Model, Tree, bernoulli_vae, init_params
from millrace.apps.vcd.optimizer import rmsprop, stepped
from millrace.apps.vcd.sampler import Average, HmcSettings
from millrace.program.replicas import REPLICA_AXIS
from millrace.program.step import LossFn
from millrace.program.training import TrainingProgram, training_program

_MOST_UNROLLED = 16
"""HMC steps that are compiled one after the other; more become a loop."""


def program_of(
    config: VcdConfig, pictures: BinaryPictures, devices: list[Any]
) -> TrainingProgram:
    """Return the training loop; the pictures are a part of it."""
    batch_size = config.batching.global_batch_size
    every = config.updates_per_decay(len(pictures), batch_size)
    rates = {
        scope: stepped(base, config.learning_rate_decay, every)
        for scope, base in config.learning_rates(batch_size).items()
    }
    loss_fn = loss_of(config, pictures, unroll=devices[0].platform != "cpu")
    return training_program(
        loss_fn,
        rmsprop(rates),
        config,
        model_state_reduction=_how_replicas_combine,
        extra_info={"learning_rate": rates["decoder"]},
        devices=devices,
    )


def init(config: VcdConfig, pictures: BinaryPictures) -> tuple[Tree, Tree]:
    """Return the weights and the model state before the first update."""
    params = weights_of(config, pictures.num_pixels)
    model_state = {
        "step_size": jnp.float32(config.step_size),
        "control_variate": control_variate.init(_control_variate(config), len(pictures)),
    }
    return params, model_state


def weights_of(config: VcdConfig, num_pixels: int) -> Tree:
    """Return the weights before the first update."""
    return init_params(
        jax.random.key(config.seed),
        num_pixels=num_pixels,
        z_dim=config.z_dim,
        num_hidden=config.num_hidden,
    )


def hmc_of(config: VcdConfig, *, unroll: bool = False) -> HmcSettings:
    """Return how chains are run in training.

    Args:
        config: Gives the numbers.
        unroll: Compile the steps one after the other. Saves time where starting a kernel
            is what takes it; on a CPU it only takes longer to compile.
    """
    rate = config.step_size_adaption_rate * config.batching.global_batch_size / 100
    steps = config.num_burn_in_steps + config.num_hmc_steps
    return HmcSettings(
        num_burn_in_steps=config.num_burn_in_steps,
        num_steps=config.num_hmc_steps,
        num_leapfrog_steps=config.num_leapfrog_steps,
        acceptance_target=config.acceptance_target,
        adaption_rate=rate if config.step_size_adaption == "ruiz" else 0.0,
        unroll=unroll and steps <= _MOST_UNROLLED,
    )


def loss_of(config: VcdConfig, pictures: BinaryPictures, *, unroll: bool = False) -> LossFn:
    """Return the loss of ``{"index": ...}``, the pictures of a micro-batch."""
    return vcd_loss(
        bernoulli_vae(),
        pictures.at,
        z_dim=config.z_dim,
        name=config.resolved_objective,
        hmc=hmc_of(config, unroll=unroll),
        variate=_control_variate(config),
        scale=_loss_scale(config),
        average=average_over(config.num_replicas),
    )


def vcd_loss(
    model: Model,
    pictures: Callable[[jax.Array], jax.Array],
    *,
    z_dim: int,
    name: objective.ObjectiveName,
    hmc: HmcSettings,
    variate: ControlVariateSettings,
    scale: float,
    average: Average = jnp.mean,
) -> LossFn:
    """Turn the estimator into a loss function of the runtime's kind.

    Args:
        model: Encoder and decoder.
        pictures: Returns those at some indices.
        z_dim: Latent dims.
        name: The objective.
        hmc: How chains are run.
        variate: The control variate.
        scale: What the mean over the micro-batch is multiplied by.
        average: Means the acceptance over all chains that share the step size.
    """

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        index = batch["index"]
        c = control_variate.value(model_state["control_variate"], index)
        found = objective.estimate(
            model,
            params,
            pictures(index),
            objective.draw(key, name, hmc, (index.shape[0], z_dim)),
            objective=name,
            hmc=hmc,
            control_variate=c,
            step_size=model_state["step_size"],
            average=average,
        )
        model_state = {
            "step_size": found.step_size,
            "control_variate": control_variate.moved(
                model_state["control_variate"], index, found.g, variate
            ),
        }
        return _total(found, scale), (model_state, _info(found, c, scale, name))

    return loss_fn


def _total(found: objective.Estimate, scale: float) -> jax.Array:
    """Return what has the estimate's gradient, and the loss for its value."""
    descended = (found.encoder_surrogate + found.decoder_loss).mean() * scale
    value = (found.encoder_loss + found.decoder_loss).mean() * scale
    return descended + lax.stop_gradient(value - descended)


def _info(
    found: objective.Estimate, c: jax.Array, scale: float, name: objective.ObjectiveName
) -> dict[str, jax.Array]:
    info = {
        "encoder_loss": found.encoder_loss.mean() * scale,
        "decoder_loss": found.decoder_loss.mean() * scale,
        "elbo": found.elbo.mean(),
        "log_joint_start": found.log_joint_start.mean(),
    }
    if name != "standard_kl":
        info |= {
            "log_joint_end": found.log_joint_end.mean(),
            "acceptance": found.acceptance,
            "step_size": found.step_size,
        }
    if name == "vcd":
        info |= {
            "vcd": found.vcd.mean(),
            "g": found.g.mean(),
            "control_variate": c.mean(),
        }
    return info


def average_over(num_replicas: int) -> Average:
    """Return the mean over the chains of all replicas."""
    if num_replicas == 1:
        return jnp.mean
    return lambda values: lax.pmean(values.mean(), REPLICA_AXIS)


def _loss_scale(config: VcdConfig) -> float:
    """Make the runtime's mean over all samples of an update the sum over them."""
    batching = config.batching
    if config.gradient_accumulation_reduction == "sum":
        return float(batching.samples_per_step)
    return float(batching.global_batch_size)


def _control_variate(config: VcdConfig) -> ControlVariateSettings:
    return ControlVariateSettings(
        config.control_variate if config.resolved_objective == "vcd" else "none",
        config.control_variate_decay,
        config.independent_iterations,
    )


def _how_replicas_combine(path: str, value: Any) -> Literal["mean", "sum"]:
    """Rows of the table are changed by one replica each; the rest all have seen alike."""
    del value
    return "sum" if path.endswith(f"/{control_variate.LOCAL}") else "mean"
