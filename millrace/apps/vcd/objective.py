"""The variational contrastive divergence as a surrogate loss, with its control variate.

Let q0 be the distribution of the encoder, q_t that of a chain of t steps started from it,
and f(z) = log p(x, z) - log q0(z|x). The divergence E_qt[f] - E_q0[f] is 0 where q0 is the
posterior. The gradient treats the end of the chain, z_t, as a constant; how its
distribution depends on q0 enters through the score of the start of the chain.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from millrace.apps.vcd.config.sections import ControlVariateName, ObjectiveName
from millrace.apps.vcd.model import Gaussian, Model
from millrace.apps.vcd.sampler import (
    Average,
    ChainResult,
    HmcSettings,
    Noise,
    draw_noise,
    run_chains,
    start_chains,
)

LOCAL = "local"
"""Key of the control variates that have a row per training sample."""


class Draws(NamedTuple):
    """The random numbers of one estimate."""

    start: jax.Array
    """(samples, z_dim), standard normal: where in q0 the chains start."""
    steps: Noise | None
    """The noise of the chains; None if there are none."""


class Estimate(NamedTuple):
    """Terms of the estimate, (samples,) each. Training minimizes the first two.

    Only the gradients of these two are estimates: the first has no meaningful value.
    """

    encoder_surrogate: jax.Array
    """Its gradient in the encoder weights is the estimate."""
    decoder_loss: jax.Array
    """-log p(x|z_t)."""
    encoder_loss: jax.Array
    """The value that belongs to the gradient of the encoder."""
    g: jax.Array
    """What the control variate tracks: log p(x, z_t) plus half the squared distance of z_t
    from the mean of q0, in standard deviations."""
    vcd: jax.Array
    """The divergence, up to terms that do not depend on the weights."""
    elbo: jax.Array
    log_joint_start: jax.Array
    log_joint_end: jax.Array
    step_size: jax.Array
    """()."""
    acceptance: jax.Array
    """()."""


def draw(
    key: jax.Array, objective: ObjectiveName, hmc: HmcSettings, shape: tuple[int, int]
) -> Draws:
    """Draw the random numbers of an estimate over (samples, z_dim)."""
    if objective == "standard_kl":
        return Draws(jax.random.normal(key, shape), None)
    noise = draw_noise(key, 1 + hmc.total_steps, shape)
    return Draws(noise.momentum[0], jax.tree.map(lambda x: x[1:], noise))


def estimate(
    model: Model,
    params: Any,
    x: jax.Array,  # (samples, pixels)
    draws: Draws,
    *,
    objective: ObjectiveName,
    hmc: HmcSettings,
    control_variate: jax.Array | float,  # (samples,) or ()
    step_size: jax.Array,  # ()
    average: Average = jnp.mean,
) -> Estimate:
    """Estimate the loss and its gradient from one chain per sample.

    Args:
        model: Encoder and decoder.
        params: ``{"encoder": ..., "decoder": ...}``.
        x: One row per sample.
        draws: From ``draw``.
        objective: vcd; hoffman (the ELBO trains the encoder, the end of the chain the
            decoder); standard_kl (the ELBO trains both; there is no chain).
        hmc: Settings of the chains.
        control_variate: Subtracted from G in the score term.
        step_size: HMC step size.
        average: Averages the acceptance over all chains that share the step size.
    """
    q = model.encode(params["encoder"], x)
    z = q.at(draws.start)
    # From here on constants: no gradient flows through the chain or its acceptance.
    decoder = lax.stop_gradient(params["decoder"])
    target = model.log_joint(decoder, x)
    start = start_chains(target, lax.stop_gradient(z))
    if objective == "standard_kl":
        result = ChainResult(start, step_size, jnp.float32(1.0), start.position[None])
    else:
        assert draws.steps is not None and hmc.total_steps, "checked by ModelOptions"
        result = run_chains(target, start, draws.steps, step_size, hmc, average)
    end = lax.stop_gradient(result.chain)
    g = lax.stop_gradient(end.log_density + q.scaled_distance(end.position))
    # Has the gradient of -log p(x, z) in the encoder, by the gradient in z of the chain.
    at_start = -(lax.stop_gradient(start.gradient) * z).sum(-1)
    if objective == "vcd":
        weight = lax.stop_gradient(g - control_variate)
        score = weight * q.log_density(lax.stop_gradient(z))
        surrogate = at_start + q.scaled_distance(end.position) + score
        encoder_loss = -start.log_density + g + score
    else:
        surrogate = at_start - q.entropy()
        encoder_loss = -start.log_density - q.entropy()
    return Estimate(
        encoder_surrogate=surrogate,
        decoder_loss=-model.log_likelihood(params["decoder"], x, end.position),
        encoder_loss=encoder_loss,
        g=g,
        vcd=g - start.log_density - 0.5 * z.shape[-1],
        elbo=start.log_density + q.entropy(),
        log_joint_start=start.log_density,
        log_joint_end=end.log_density,
        step_size=result.step_size,
        acceptance=result.acceptance,
    )


def reconstruction_path(
    model: Model,
    params: Any,
    x: jax.Array,  # (samples, pixels)
    draws: Draws,
    step_size: jax.Array,  # ()
    hmc: HmcSettings,
) -> tuple[Gaussian, jax.Array]:
    """Return q(z|x) and the positions of the chains, (1 + steps, samples, z_dim)."""
    q = model.encode(params["encoder"], x)
    target = model.log_joint(params["decoder"], x)
    start = start_chains(target, q.at(draws.start))
    assert draws.steps is not None
    positions = run_chains(target, start, draws.steps, step_size, hmc).positions
    return q, jnp.concatenate([start.position[None], positions])


class ControlVariateSettings(NamedTuple):
    """Settings of the control variate, a moving average of G."""

    kind: ControlVariateName = "local"
    decay: float = 0.9
    shared_updates: int = 3000
    """Updates during which a local control variate is shared by all samples."""


def init_control_variate(
    settings: ControlVariateSettings, num_samples: int
) -> dict[str, jax.Array]:
    """Return the control variate before the first update.

    The value of a sample is stored as its difference from the shared value, which is
    frozen once samples have values of their own. So an update touches only the rows of its
    samples, and the changes of several replicas can be added up.
    """
    if settings.kind == "none":
        return {}
    state = {"shared": jnp.float32(0.0)}
    if settings.kind == "local":
        state |= {LOCAL: jnp.zeros(num_samples), "updates": jnp.float32(0.0)}
    return state


def control_variate_values(
    state: dict[str, jax.Array],
    index: jax.Array,  # (samples,)
) -> jax.Array:
    """Return the control variates of the samples at `index`."""
    if not state:
        return jnp.zeros(index.shape)
    shared = jnp.broadcast_to(state["shared"], index.shape)
    return shared + state[LOCAL][index] if LOCAL in state else shared


def update_control_variate(
    state: dict[str, jax.Array],
    index: jax.Array,  # (samples,), without repetitions
    g: jax.Array,  # (samples,)
    settings: ControlVariateSettings,
) -> dict[str, jax.Array]:
    """Move the control variate toward the G of a micro-batch."""
    if not state:
        return {}
    rate = 1.0 - settings.decay
    shared_change = rate * (g.mean() - state["shared"])
    if LOCAL not in state:
        return {"shared": state["shared"] + shared_change}
    is_shared = state["updates"] < settings.shared_updates
    own_change = rate * (g - control_variate_values(state, index))
    own_change = jnp.where(is_shared, 0.0, own_change)
    return {
        "shared": state["shared"] + jnp.where(is_shared, shared_change, 0.0),
        LOCAL: state[LOCAL].at[index].add(own_change, unique_indices=True),
        # Counting stops when it no longer matters: a float32 is exact only up to 2**24.
        "updates": jnp.minimum(state["updates"] + 1, settings.shared_updates),
    }
