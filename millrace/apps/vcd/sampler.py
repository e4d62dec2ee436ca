"""Hamiltonian Monte Carlo as pure functions: many chains at once, one step size.

Nothing here draws random numbers but ``draw_noise``: given the same noise, a chain is a
deterministic function of where it starts.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millrace.apps.vcd.model import Target

_ABOVE_MINUS_1 = float(np.nextafter(np.float32(-1.0), np.float32(0.0)))

Average = Callable[[jax.Array], jax.Array]
"""Turns one number per chain into their mean, over all chains that share a step size."""


class Chain(NamedTuple):
    """Where the chains are, and what is known of the target there: never computed anew."""

    position: jax.Array
    log_density: jax.Array
    gradient: jax.Array


class Noise(NamedTuple):
    """All randomness of a number of steps."""

    momentum: jax.Array
    """(steps, chains, dims), standard normal."""
    uniform: jax.Array
    """(steps, chains), between 0 and 1: what a proposal's probability must exceed."""


class HmcSettings(NamedTuple):
    """How chains are run."""

    num_burn_in_steps: int = 8
    """Steps after each of which the step size is adapted."""
    num_steps: int = 0
    """Steps after them, with the step size they have led to."""
    num_leapfrog_steps: int = 5
    acceptance_target: float = 0.9
    adaption_rate: float = 0.01
    """By how much the step size follows the acceptance; 0 keeps it constant."""
    unroll: bool = False
    """Compile all steps one after the other instead of as loops."""

    @property
    def total_steps(self) -> int:
        """Steps of both kinds."""
        return self.num_burn_in_steps + self.num_steps


class Sampled(NamedTuple):
    """What became of the chains."""

    chain: Chain
    step_size: jax.Array
    acceptance: jax.Array
    """The mean over all steps."""
    positions: jax.Array
    """(steps, chains, dims), those of burn-in first."""


Follow = Callable[[Chain, jax.Array, jax.Array], tuple[Chain, jax.Array]]
"""``(chain, momentum, step size) -> (chain, momentum)``: the end of a trajectory."""


def draw_noise(key: jax.Array, num_steps: int, shape: tuple[int, int]) -> Noise:
    """Draw what `num_steps` steps of (chains, dims) need.

    All in one call, which on a GPU is one kernel: normal and uniform numbers are both
    made from the same uniform ones.
    """
    num_chains, num_dims = shape
    # Above -1, where the inverse error function is still finite.
    drawn = jax.random.uniform(
        key, (num_steps, num_chains, num_dims + 1), minval=_ABOVE_MINUS_1, maxval=1.0
    )
    return Noise(
        math.sqrt(2) * lax.erf_inv(drawn[..., :num_dims]),
        0.5 * (drawn[..., num_dims] + 1),
    )


def start(target: Target, position: jax.Array) -> Chain:
    """Begin chains at `position`."""
    return Chain(position, *target(position))


def sample(
    target: Target,
    chain: Chain,
    noise: Noise,
    step_size: jax.Array,
    settings: HmcSettings,
    average: Average = jnp.mean,
) -> Sampled:
    """Run chains through all their steps.

    Args:
        target: The log density to sample from, and its gradient.
        chain: From ``start`` or an earlier call.
        noise: For `settings.total_steps` steps.
        step_size: A scalar.
        settings: How many steps of which kind.
        average: Means the acceptance over all chains that share the step size.
    """
    follow = functools.partial(
        leapfrog, target, num_steps=settings.num_leapfrog_steps, unroll=settings.unroll
    )

    # One loop for both kinds of steps: after burn-in the rate is 0.
    burns_in = np.arange(settings.total_steps) < settings.num_burn_in_steps
    rates = np.where(burns_in, settings.adaption_rate, 0.0).astype(np.float32)

    def step(
        carry: tuple[Chain, jax.Array], item: tuple[Noise, jax.Array]
    ) -> tuple[tuple[Chain, jax.Array], tuple[jax.Array, jax.Array]]:
        chain, step_size = carry
        noise, rate = item
        chain, accepted = hmc_step(follow, chain, noise, step_size)
        acceptance = average(accepted.astype(jnp.float32))
        step_size = adapt(step_size, acceptance, rate, settings.acceptance_target)
        return (chain, step_size), (chain.position, acceptance)

    carry, (positions, acceptance) = lax.scan(
        step, (chain, step_size), (noise, jnp.asarray(rates)), unroll=settings.unroll or 1
    )
    return Sampled(*carry, acceptance.mean(), positions)


def hmc_step(
    follow: Follow, chain: Chain, noise: Noise, step_size: jax.Array
) -> tuple[Chain, jax.Array]:
    """Propose a move along a trajectory; return the new state and who accepted it."""
    proposal, momentum = follow(chain, noise.momentum, step_size)
    log_probability = (
        (proposal.log_density - chain.log_density)
        + 0.5 * jnp.square(noise.momentum).sum(-1)
        - 0.5 * jnp.square(momentum).sum(-1)
    )
    # A trajectory that ran away gives NaN, which compares false.
    accepted = jnp.log(noise.uniform) < log_probability

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(accepted if new.ndim == 1 else accepted[:, None], new, old)

    return jax.tree.map(choose, proposal, chain), accepted


def leapfrog(
    target: Target,
    chain: Chain,
    momentum: jax.Array,
    step_size: jax.Array,
    *,
    num_steps: int,
    unroll: bool = True,
) -> tuple[Chain, jax.Array]:
    """Follow the dynamics; the gradient at the start is the chain's own.

    The log density is used of the last position only.
    """

    def move(_: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        position, momentum = state
        position = position + step_size * momentum
        gradient = target(position)[1]
        return position, momentum + step_size * gradient

    state = chain.position, momentum + 0.5 * step_size * chain.gradient
    if unroll:
        for number in range(num_steps - 1):
            state = move(number, state)
    elif num_steps > 1:
        state = lax.fori_loop(0, num_steps - 1, move, state)
    position, momentum = state
    chain = start(target, position + step_size * momentum)
    return chain, momentum + 0.5 * step_size * chain.gradient


def adapt(
    step_size: jax.Array, acceptance: jax.Array, rate: jax.Array | float, target: float
) -> jax.Array:
    """Apply the rule of Ruiz and Titsias: in proportion to what the acceptance is off."""
    return step_size * (1 + rate * (acceptance - target) / target)
