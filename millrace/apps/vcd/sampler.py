"""Hamiltonian Monte Carlo as pure functions: many chains, one step size.

Only ``draw_noise`` draws random numbers: given the noise, a chain is a deterministic
function of its start.
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
"""``(chains,) -> ()``: the mean over all chains that share a step size."""


class Chain(NamedTuple):
    """Positions of the chains, and the target there, so that it is computed only once."""

    position: jax.Array
    """(chains, z_dim)."""
    log_density: jax.Array
    """(chains,)."""
    gradient: jax.Array
    """(chains, z_dim)."""


class Noise(NamedTuple):
    """The random numbers of some HMC steps."""

    momentum: jax.Array
    """(steps, chains, z_dim), standard normal."""
    uniform: jax.Array
    """(steps, chains), in (0, 1): a proposal with a higher probability is accepted."""


class HmcSettings(NamedTuple):
    """Settings of the chains."""

    num_burn_in_steps: int = 8
    """Steps that adapt the step size."""
    num_steps: int = 0
    """Steps after burn-in, with a constant step size."""
    num_leapfrog_steps: int = 5
    acceptance_target: float = 0.9
    adaption_rate: float = 0.01
    """How fast the step size follows the acceptance rate; 0 keeps it constant."""
    unroll: bool = False
    """Compile the steps one after the other instead of as loops."""

    @property
    def total_steps(self) -> int:
        """Steps of both kinds."""
        return self.num_burn_in_steps + self.num_steps


class ChainResult(NamedTuple):
    """The chains after their last step."""

    chain: Chain
    step_size: jax.Array
    acceptance: jax.Array
    """Mean acceptance rate over all steps."""
    positions: jax.Array
    """(steps, chains, z_dim), burn-in first."""


Trajectory = Callable[[Chain, jax.Array, jax.Array], tuple[Chain, jax.Array]]
"""``(chain, momentum, step size) -> (chain, momentum)`` at the end of a trajectory."""


def draw_noise(key: jax.Array, num_steps: int, shape: tuple[int, int]) -> Noise:
    """Draw the noise for `num_steps` steps of (chains, z_dim).

    One call draws everything, which is a single kernel on a GPU: the normal numbers are
    transformed uniform ones.
    """
    num_chains, z_dim = shape
    # The inverse error function is infinite at -1.
    drawn = jax.random.uniform(
        key, (num_steps, num_chains, z_dim + 1), minval=_ABOVE_MINUS_1, maxval=1.0
    )
    return Noise(
        math.sqrt(2) * lax.erf_inv(drawn[..., :z_dim]), 0.5 * (drawn[..., z_dim] + 1)
    )


def start_chains(target: Target, position: jax.Array) -> Chain:
    """Start chains at `position`."""
    return Chain(position, *target(position))


def run_chains(
    target: Target,
    chain: Chain,
    noise: Noise,
    step_size: jax.Array,  # ()
    settings: HmcSettings,
    average: Average = jnp.mean,
) -> ChainResult:
    """Run the chains for all their steps.

    Args:
        target: The log density to sample from, and its gradient.
        chain: From ``start_chains`` or an earlier call.
        noise: For `settings.total_steps` steps.
        step_size: Shared by all chains.
        settings: The number and kind of steps.
        average: Averages the acceptance over all chains that share the step size.
    """
    trajectory = functools.partial(
        leapfrog, target, num_steps=settings.num_leapfrog_steps, unroll=settings.unroll
    )
    # One loop for both kinds of steps: after burn-in the adaption rate is 0.
    is_burn_in = np.arange(settings.total_steps) < settings.num_burn_in_steps
    rates = np.where(is_burn_in, settings.adaption_rate, 0.0).astype(np.float32)

    def step(
        carry: tuple[Chain, jax.Array], item: tuple[Noise, jax.Array]
    ) -> tuple[tuple[Chain, jax.Array], tuple[jax.Array, jax.Array]]:
        chain, step_size = carry
        noise, rate = item
        chain, accepted = hmc_step(trajectory, chain, noise, step_size)
        acceptance = average(accepted.astype(jnp.float32))
        step_size = adapt_step_size(step_size, acceptance, rate, settings.acceptance_target)
        return (chain, step_size), (chain.position, acceptance)

    carry, (positions, acceptance) = lax.scan(
        step, (chain, step_size), (noise, jnp.asarray(rates)), unroll=settings.unroll or 1
    )
    return ChainResult(*carry, acceptance.mean(), positions)


def hmc_step(
    trajectory: Trajectory,
    chain: Chain,
    noise: Noise,  # of one step
    step_size: jax.Array,  # ()
) -> tuple[Chain, jax.Array]:
    """Propose the end of a trajectory; return the chains and which of them accepted."""
    proposal, momentum = trajectory(chain, noise.momentum, step_size)
    log_probability = (
        (proposal.log_density - chain.log_density)
        + 0.5 * jnp.square(noise.momentum).sum(-1)
        - 0.5 * jnp.square(momentum).sum(-1)
    )
    # A trajectory that diverged gives NaN, which compares false: it is rejected.
    accepted = jnp.log(noise.uniform) < log_probability

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(accepted if new.ndim == 1 else accepted[:, None], new, old)

    return jax.tree.map(choose, proposal, chain), accepted


def leapfrog(
    target: Target,
    chain: Chain,
    momentum: jax.Array,  # (chains, z_dim)
    step_size: jax.Array,  # ()
    *,
    num_steps: int,
    unroll: bool = True,
) -> tuple[Chain, jax.Array]:
    """Integrate the dynamics with the leapfrog method.

    The gradient at the start is taken from the chain. The log density is used only at the
    end; the compiler drops the rest.
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
    chain = start_chains(target, position + step_size * momentum)
    return chain, momentum + 0.5 * step_size * chain.gradient


def adapt_step_size(
    step_size: jax.Array, acceptance: jax.Array, rate: jax.Array | float, target: float
) -> jax.Array:
    """Apply the rule of Ruiz and Titsias: in proportion to the deviation from `target`."""
    return step_size * (1 + rate * (acceptance - target) / target)
