"""The variational contrastive divergence as one surrogate loss, and its two baselines.

With q0 the encoder's distribution, q_t that of a chain of t steps started from it and
f(z) = log p(x, z) - log q0(z|x), the divergence is E_qt[f] - E_q0[f]: it is 0 where q0 is
the posterior. The chain's end z_t is a constant to the gradient; how its distribution
depends on q0 comes in through the score of where the chain started.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from millrace.apps.vcd.model import Gaussian, Model
from millrace.apps.vcd.sampler import (
    Average,
    HmcSettings,
    Noise,
    Sampled,
    draw_noise,
    sample,
    start,
)

ObjectiveName = Literal["vcd", "hoffman", "standard_kl"]


class Draws(NamedTuple):
    """All randomness of one estimate."""

    start: jax.Array
    """(samples, dims), standard normal: where in q0 the chains start."""
    steps: Noise | None
    """Of the chains; None where there are none."""


class Estimate(NamedTuple):
    """One sample's terms each; what is descended is the sum of the two surrogates."""

    encoder_surrogate: jax.Array
    """Its gradient in the encoder's weights is the estimate; its value means nothing."""
    decoder_loss: jax.Array
    """-log p(x|z); its gradient in the decoder's weights is the estimate."""
    encoder_loss: jax.Array
    """The value that belongs to the encoder's gradient."""
    g: jax.Array
    """What the control variate follows: log p(x, z_t) plus half the squared distance of
    z_t from q0's mean, in its standard deviations."""
    vcd: jax.Array
    """The divergence, up to what is independent of the weights."""
    elbo: jax.Array
    log_joint_start: jax.Array
    log_joint_end: jax.Array
    step_size: jax.Array
    acceptance: jax.Array


def draw(
    key: jax.Array, objective: ObjectiveName, hmc: HmcSettings, shape: tuple[int, int]
) -> Draws:
    """Draw what an estimate over (samples, dims) needs."""
    if objective == "standard_kl":
        return Draws(jax.random.normal(key, shape), None)
    noise = draw_noise(key, 1 + hmc.total_steps, shape)
    return Draws(noise.momentum[0], jax.tree.map(lambda x: x[1:], noise))


def estimate(
    model: Model,
    params: Any,
    x: jax.Array,
    draws: Draws,
    *,
    objective: ObjectiveName,
    hmc: HmcSettings,
    control_variate: jax.Array | float,
    step_size: jax.Array,
    average: Average = jnp.mean,
) -> Estimate:
    """Estimate loss and gradient from one chain per sample.

    Args:
        model: Encoder and decoder.
        params: ``{"encoder": ..., "decoder": ...}``.
        x: One row per sample.
        draws: From ``draw``.
        objective: vcd; hoffman (the encoder by the ELBO, the decoder at the chain's
            end); standard_kl (both by the ELBO; there is no chain).
        hmc: How chains are run.
        control_variate: Taken off G in the score term; one per sample, or one.
        step_size: The chains'.
        average: Means the acceptance over all chains that share the step size.
    """
    q = model.encode(params["encoder"], x)
    z = q.at(draws.start)
    # Constants from here on: no gradient passes through the chain or its acceptance.
    decoder = lax.stop_gradient(params["decoder"])
    target = model.log_joint(decoder, x)
    begun = start(target, lax.stop_gradient(z))
    if objective == "standard_kl":
        ended = Sampled(begun, step_size, jnp.float32(1.0), begun.position[None])
    else:
        assert draws.steps is not None and hmc.total_steps, "the configuration sees to it"
        ended = sample(target, begun, draws.steps, step_size, hmc, average)
    end = lax.stop_gradient(ended.chain)
    g = lax.stop_gradient(end.log_density + q.scaled_distance(end.position))
    # -log p(x, z), whose gradient in z is known from the chain's start.
    at_start = -(lax.stop_gradient(begun.gradient) * z).sum(-1)
    if objective == "vcd":
        weight = lax.stop_gradient(g - control_variate)
        score = weight * q.log_density(lax.stop_gradient(z))
        surrogate = at_start + q.scaled_distance(end.position) + score
        encoder_loss = -begun.log_density + g + score
    else:
        surrogate = at_start - q.entropy()
        encoder_loss = -begun.log_density - q.entropy()
    return Estimate(
        encoder_surrogate=surrogate,
        decoder_loss=-model.log_likelihood(params["decoder"], x, end.position),
        encoder_loss=encoder_loss,
        g=g,
        vcd=g - begun.log_density - 0.5 * z.shape[-1],
        elbo=begun.log_density + q.entropy(),
        log_joint_start=begun.log_density,
        log_joint_end=end.log_density,
        step_size=ended.step_size,
        acceptance=ended.acceptance,
    )


def reconstruction_path(
    model: Model,
    params: Any,
    x: jax.Array,
    draws: Draws,
    step_size: jax.Array,
    hmc: HmcSettings,
) -> tuple[Gaussian, jax.Array]:
    """Return q(z|x), and where each sample's chain is from its start on."""
    q = model.encode(params["encoder"], x)
    target = model.log_joint(params["decoder"], x)
    begun = start(target, q.at(draws.start))
    assert draws.steps is not None
    positions = sample(target, begun, draws.steps, step_size, hmc).positions
    return q, jnp.concatenate([begun.position[None], positions])
