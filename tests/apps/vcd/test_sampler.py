"""HMC: invariance of the target, step size adaption, and agreement with BlackJAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from millrace.apps.vcd.program import mean_over_replicas
from millrace.apps.vcd.sampler import (
    HmcSettings,
    Noise,
    adapt_step_size,
    draw_noise,
    hmc_step,
    leapfrog,
    run_chains,
    start_chains,
)
from millrace.program.replicas import REPLICA_AXIS, replica_mesh

COVARIANCE = np.array([[1.0, 0.6], [0.6, 2.0]])
MEAN = np.array([0.5, -1.0])
CHAINS = 20_000


def differentiated(log_density):
    def target(z):
        def total(z):
            each = log_density(z)
            return each.sum(), each

        gradient, each = jax.grad(total, has_aux=True)(z)
        return each, gradient

    return target


@differentiated
def gaussian(z):
    precision = jnp.asarray(np.linalg.inv(COVARIANCE), jnp.float32)
    centered = z - jnp.asarray(MEAN, jnp.float32)
    return -0.5 * jnp.einsum("ni,ij,nj->n", centered, precision, centered)


@differentiated
def banana(z):
    """A Gaussian bent along a parabola: z1 is N(z0^2, 0.5^2) given z0 of N(0, 1)."""
    return -0.5 * z[:, 0] ** 2 - 0.5 * jnp.square((z[:, 1] - z[:, 0] ** 2) / 0.5)


def within_errors(values, expected, errors=4.5):
    """Check that the mean of `values` is `expected` within their standard error."""
    error = values.std(0) / np.sqrt(len(values))
    np.testing.assert_array_less(np.abs(values.mean(0) - expected), errors * error)


def after_steps(target, exact, step_size, seed):
    """Start chains at samples of the target and run them."""
    settings = HmcSettings(num_burn_in_steps=0, num_steps=5)
    noise = draw_noise(jax.random.key(seed), 5, exact.shape)
    run = jax.jit(
        lambda z: run_chains(target, start_chains(target, z), noise, step_size, settings)
    )
    found = run(exact)
    moved = jnp.abs(found.chain.position - exact).max(-1) > 0
    assert 0.6 < found.acceptance < 0.999 and moved.mean() > 0.95  # the chains do move
    return np.asarray(found.chain.position, np.float64)


def test_hmc_leaves_a_gaussian_invariant():
    noise = np.random.default_rng(0).standard_normal((CHAINS, 2))
    exact = MEAN + noise @ np.linalg.cholesky(COVARIANCE).T
    z = after_steps(gaussian, jnp.asarray(exact, jnp.float32), jnp.float32(0.6), 1)
    within_errors(z, MEAN)
    centered = z - MEAN
    products = np.stack([centered[:, 0] ** 2, centered[:, 1] ** 2, centered.prod(1)], 1)
    within_errors(products, [1.0, 2.0, 0.6])


def test_hmc_leaves_a_banana_invariant():
    rng = np.random.default_rng(1)
    z0 = rng.standard_normal(CHAINS)
    exact = np.stack([z0, z0**2 + 0.5 * rng.standard_normal(CHAINS)], 1)
    z = after_steps(banana, jnp.asarray(exact, jnp.float32), jnp.float32(0.2), 2)
    within_errors(z, [0.0, 1.0])
    moments = np.stack([z[:, 0] ** 2, z[:, 1] ** 2, z[:, 0] ** 2 * z[:, 1]], 1)
    within_errors(moments, [1.0, 3.25, 3.0])


def test_the_checks_fail_if_every_move_is_accepted():
    """Proves that the tests above can fail."""
    noise = np.random.default_rng(0).standard_normal((CHAINS, 2))
    z = jnp.asarray(MEAN + noise @ np.linalg.cholesky(COVARIANCE).T, jnp.float32)
    chain = start_chains(gaussian, z)
    always = draw_noise(jax.random.key(1), 5, z.shape)._replace(
        uniform=jnp.zeros((5, CHAINS))
    )
    settings = HmcSettings(num_burn_in_steps=0, num_steps=5)
    run = jax.jit(lambda: run_chains(gaussian, chain, always, jnp.float32(0.9), settings))
    found = run()
    assert found.acceptance == 1
    with pytest.raises(AssertionError):
        centered = np.asarray(found.chain.position, np.float64) - MEAN
        within_errors(np.stack([centered[:, 0] ** 2, centered[:, 1] ** 2], 1), [1.0, 2.0])


@pytest.mark.parametrize("first", [0.05, 2.0])
def test_adaption_brings_the_acceptance_rate_to_its_target(first):
    settings = HmcSettings(num_burn_in_steps=400, num_steps=100, adaption_rate=0.2)
    noise = draw_noise(jax.random.key(0), 500, (200, 2))
    z = jnp.zeros((200, 2))
    run = jax.jit(
        lambda size: run_chains(gaussian, start_chains(gaussian, z), noise, size, settings)
    )
    found = run(jnp.float32(first))
    frozen = settings._replace(num_burn_in_steps=0, num_steps=500)
    again = jax.jit(
        lambda chain, size: run_chains(gaussian, chain, noise, size, frozen).acceptance
    )
    assert again(found.chain, found.step_size) == pytest.approx(0.9, abs=0.03)


def test_the_adaption_rule_matches_the_paper():
    for acceptance in (0.0, 0.5, 0.9, 1.0):
        expected = 0.05 + 0.01 * 0.05 * (acceptance - 0.9) / 0.9
        found = adapt_step_size(jnp.float32(0.05), jnp.float32(acceptance), 0.01, 0.9)
        assert found == pytest.approx(expected, rel=1e-6)


def test_only_burn_in_steps_with_a_positive_rate_change_the_step_size():
    noise = draw_noise(jax.random.key(0), 6, (50, 2))
    chain = start_chains(gaussian, jnp.zeros((50, 2)))
    kinds = ((3, 0, 0.01), (3, 3, 0.01), (3, 0, 0.0), (0, 6, 0.01))

    @jax.jit
    def step_sizes(noise):
        return [
            run_chains(
                gaussian,
                chain,
                jax.tree.map(lambda x, n=burn_in + kept: x[:n], noise),
                jnp.float32(0.05),
                HmcSettings(num_burn_in_steps=burn_in, num_steps=kept, adaption_rate=rate),
            ).step_size
            for burn_in, kept, rate in kinds
        ]

    sizes = step_sizes(noise)
    assert sizes[0] == sizes[1] != jnp.float32(0.05)
    assert sizes[2] == sizes[3] == jnp.float32(0.05)


def test_the_gradient_at_a_position_is_computed_once():
    seen = []

    def counted(z):
        seen.append(z.shape)
        return gaussian(z)

    settings = HmcSettings(num_burn_in_steps=3, num_leapfrog_steps=5, unroll=True)
    noise = draw_noise(jax.random.key(0), 3, (4, 2))
    size = jnp.float32(1.5)  # some moves are accepted, some are not
    first = 3 * jax.random.normal(jax.random.key(1), (4, 2))

    @jax.jit
    def run(z):
        found = run_chains(counted, start_chains(counted, z), noise, size, settings)
        return found, *gaussian(found.chain.position)

    found, log_density, gradient = run(first)
    np.testing.assert_allclose(found.chain.log_density, log_density, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.chain.gradient, gradient, rtol=1e-4, atol=1e-5)
    assert 0 < found.acceptance < 1
    assert len(seen) == 1 + settings.num_leapfrog_steps  # a step is traced once


def test_unrolled_steps_equal_a_loop():
    noise = draw_noise(jax.random.key(0), 4, (8, 2))
    settings = HmcSettings(num_burn_in_steps=4, num_leapfrog_steps=2)

    @jax.jit
    def both(z):
        chain, size = start_chains(banana, z), jnp.float32(0.2)
        kinds = (settings, settings._replace(unroll=True))
        return [run_chains(banana, chain, noise, size, kind) for kind in kinds]

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        *both(jnp.ones((8, 2))),
    )


def test_a_diverging_trajectory_is_rejected():
    z = jnp.ones((3, 2))
    noise = Noise(jnp.full((3, 2), 1e3), jnp.full(3, 0.5))
    follow = functools.partial(leapfrog, banana, num_steps=5)
    chain, accepted = hmc_step(follow, start_chains(banana, z), noise, jnp.float32(50.0))
    assert not accepted.any()
    assert jnp.isfinite(chain.gradient).all()
    np.testing.assert_array_equal(chain.position, z)


@pytest.mark.devices(4)
def test_replicas_adapt_to_their_common_acceptance_rate():
    """With the same noise, four replicas of 8 chains equal one of 32."""
    settings = HmcSettings(num_burn_in_steps=6, adaption_rate=0.3)
    noise = draw_noise(jax.random.key(3), 6, (32, 2))
    z = jax.random.normal(jax.random.key(4), (32, 2))
    size = jnp.float32(0.9)

    def run(z, noise, average):
        found = run_chains(banana, start_chains(banana, z), noise, size, settings, average)
        return found.chain.position, found.step_size[None]

    whole = jax.jit(lambda: run(z, noise, jnp.mean))()
    split = PartitionSpec(REPLICA_AXIS)
    steps_first = Noise(
        PartitionSpec(None, REPLICA_AXIS), PartitionSpec(None, REPLICA_AXIS)
    )
    mapped = jax.shard_map(
        lambda z, noise: run(z, noise, mean_over_replicas(4)),
        mesh=replica_mesh(4),
        in_specs=(split, steps_first),
        out_specs=(split, split),
        check_vma=False,
    )
    position, sizes = jax.jit(mapped)(z, noise)
    np.testing.assert_allclose(sizes, np.broadcast_to(whole[1], 4), rtol=1e-5)
    np.testing.assert_allclose(position, whole[0], rtol=1e-3, atol=1e-4)
    # Replicas that adapt on their own would differ.
    alone = jax.jit(lambda: run(z[:8], jax.tree.map(lambda x: x[:, :8], noise), jnp.mean))()
    assert abs(float(alone[1][0] - whole[1][0])) > 1e-3


def test_steps_agree_with_blackjax_for_the_same_momenta():
    blackjax = pytest.importorskip("blackjax")
    from blackjax.mcmc import integrators

    def log_density(z):
        return banana(z[None])[0][0]

    metric = blackjax.mcmc.metrics.default_metric(jnp.ones(2))
    follow = integrators.velocity_verlet(log_density, metric.kinetic_energy)

    def theirs(position, momentum, uniform):
        start = blackjax.hmc.init(position, log_density)
        state = integrators.IntegratorState(
            position, momentum, start.logdensity, start.logdensity_grad
        )
        first = -state.logdensity + metric.kinetic_energy(momentum)
        for _ in range(5):
            state = follow(state, 0.25)
        last = -state.logdensity + metric.kinetic_energy(state.momentum)
        accepts = jnp.log(uniform) < first - last
        return jnp.where(accepts, state.position, position), accepts

    follow_ours = functools.partial(leapfrog, banana, num_steps=5)
    noise = jax.tree.map(lambda x: x[0], draw_noise(jax.random.key(5), 1, (256, 2)))
    z = jax.random.normal(jax.random.key(6), (256, 2))
    expected, accepts = jax.jit(jax.vmap(theirs))(z, noise.momentum, noise.uniform)
    chain, accepted = jax.jit(
        lambda: hmc_step(follow_ours, start_chains(banana, z), noise, jnp.float32(0.25))
    )()
    assert 0.5 < accepts.mean() < 1
    np.testing.assert_array_equal(accepted, accepts)
    np.testing.assert_allclose(chain.position, expected, rtol=1e-4, atol=1e-5)
