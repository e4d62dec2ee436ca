"""The gradient estimator against closed forms, and the control variate against NumPy.

A linear decoder makes all distributions Gaussian.
"""

import jax
import jax.numpy as jnp
import linear_gaussian as exact
import numpy as np
import pytest

from millrace.apps.vcd import objective
from millrace.apps.vcd.model import bernoulli_vae, init_params
from millrace.apps.vcd.objective import (
    ControlVariateSettings,
    Draws,
    control_variate_values,
    init_control_variate,
    update_control_variate,
)
from millrace.apps.vcd.sampler import HmcSettings, draw_noise, start_chains

MEAN, STD = np.array([0.1, -0.4]), np.array([0.9, 0.6])
STEP_SIZE = 0.2
SAMPLES = 50_000
NUM_SAMPLES, BATCH, UPDATES, SHARED = 12, 4, 9, 4  # of the control variate


def estimates(name="vcd", *, hmc, accept_all=False, control_variate=0.0, seed=0):
    """Return one-sample gradients in the mean and std of q, a row each, and the terms."""
    draws = objective.draw(jax.random.key(seed), name, hmc, (SAMPLES, 2))
    if accept_all:
        draws = draws._replace(
            steps=draws.steps._replace(uniform=jnp.zeros_like(draws.steps.uniform))
        )
    x = jnp.broadcast_to(jnp.asarray(exact.X, jnp.float32), (SAMPLES, 3))
    # One row per sample, so that the gradient has one per sample too.
    encoder = {
        "mean": jnp.broadcast_to(jnp.asarray(MEAN, jnp.float32), (SAMPLES, 2)),
        "std": jnp.broadcast_to(jnp.asarray(STD, jnp.float32), (SAMPLES, 2)),
    }

    @jax.jit
    def gradient(encoder, decoder):
        def loss(params):
            found = objective.estimate(
                exact.MODEL,
                params,
                x,
                draws,
                objective=name,
                hmc=hmc,
                control_variate=control_variate,
                step_size=jnp.float32(STEP_SIZE),
            )
            return (found.encoder_surrogate + found.decoder_loss).sum(), found

        return jax.grad(loss, has_aux=True)({"encoder": encoder, "decoder": decoder})

    slopes, found = gradient(encoder, exact.DECODER)
    return slopes, found


def chain_map(hmc):
    """Return A, c, V of z_t = A z_0 + c + noise if every move is accepted."""
    mean, precision = exact.posterior()
    eye = np.eye(2)
    half_kick = np.block([[eye, 0 * eye], [-STEP_SIZE / 2 * precision, eye]])
    drift = np.block([[eye, STEP_SIZE * eye], [0 * eye, eye]])
    step = np.linalg.matrix_power(half_kick @ drift @ half_kick, hmc.num_leapfrog_steps)
    along, across = step[:2, :2], step[:2, 2:]
    a, v = eye, np.zeros((2, 2))
    for _ in range(hmc.total_steps):
        a, v = along @ a, along @ v @ along.T + across @ across.T
    return a, mean - a @ mean, v


def expected_log_joint(mean, covariance):
    """Return E[log p(x, z)] for z with this mean and covariance, up to a constant."""
    error = exact.X - exact.W @ mean - exact.B
    spread = np.trace(exact.W @ covariance @ exact.W.T)
    likelihood = -0.5 * (error @ error + spread) / exact.S**2
    return likelihood - 0.5 * (mean @ mean + np.trace(covariance))


def divergence(theta, chain):
    """Return the VCD in closed form as a function of the mean and std of q."""
    a, c, v = chain
    mean, std = theta[:2], theta[2:]
    first = np.diag(std**2)
    end_mean, end = a @ mean + c, a @ first @ a.T + v
    distance = 0.5 * (((end_mean - mean) ** 2 + np.diag(end)) / std**2).sum()
    return -expected_log_joint(mean, first) + expected_log_joint(end_mean, end) + distance


def closed_form(function):
    """Return the gradient of a function at q, by central differences in float64."""
    theta, width = np.concatenate([MEAN, STD]), 1e-5
    steps = width * np.eye(4)
    return np.array([function(theta + d) - function(theta - d) for d in steps]) / (
        2 * width
    )


def check(slopes, expected):
    rows = np.concatenate(
        [np.asarray(slopes["encoder"][name], np.float64) for name in ("mean", "std")], 1
    )
    error = rows.std(0) / np.sqrt(SAMPLES)
    np.testing.assert_array_less(np.abs(rows.mean(0) - expected), 4 * error)
    assert (error < 0.05 * np.abs(expected).max()).all()  # otherwise the test is too weak
    return rows


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_mean_of_one_sample_gradients_is_the_closed_form(steps):
    hmc = HmcSettings(
        num_burn_in_steps=0, num_steps=steps, num_leapfrog_steps=2, adaption_rate=0.0
    )
    chain = chain_map(hmc)
    expected = closed_form(lambda theta: divergence(theta, chain))
    slopes, found = estimates(hmc=hmc, accept_all=True, control_variate=-2.0)
    check(slopes, expected)
    # The constants of log p(x, z) cancel.
    value = divergence(np.concatenate([MEAN, STD]), chain) - exact.Z_DIM / 2
    mean, error = found.vcd.mean(), found.vcd.std() / SAMPLES**0.5
    assert abs(float(mean - value)) < 4 * float(error)


def test_the_check_fails_without_the_score_term():
    hmc = HmcSettings(num_burn_in_steps=0, num_steps=1, num_leapfrog_steps=2)
    chain = chain_map(hmc)
    expected = closed_form(lambda theta: divergence(theta, chain))
    slopes, found = estimates(hmc=hmc, accept_all=True)
    g = np.asarray(found.g, np.float64)[:, None]
    draws = objective.draw(jax.random.key(0), "vcd", hmc, (SAMPLES, 2))
    noise = np.asarray(draws.start, np.float64)
    without = {
        "encoder": {
            "mean": slopes["encoder"]["mean"] - g * noise / STD,
            "std": slopes["encoder"]["std"] - g * (noise**2 - 1) / STD,
        }
    }
    with pytest.raises(AssertionError):
        check(without, expected)


def test_each_gradient_has_the_published_form():
    """It is -s + (G - C) e / std - d / std, and similar for the std."""
    hmc = HmcSettings(num_burn_in_steps=2, num_leapfrog_steps=3)
    slopes, found = estimates(hmc=hmc, control_variate=1.5)
    draws = objective.draw(jax.random.key(0), "vcd", hmc, (SAMPLES, 2))
    x = jnp.broadcast_to(jnp.asarray(exact.X, jnp.float32), (SAMPLES, 3))
    e = np.asarray(draws.start)
    target = exact.log_joint(exact.DECODER, x)
    start = start_chains(target, jnp.asarray(MEAN + STD * e, jnp.float32))
    s = np.asarray(start.gradient)
    # The rest is -d / std in the gradient of the mean and -d^2 / std in that of the std.
    weight = np.asarray(found.g - 1.5)[:, None]
    d = -STD * (np.asarray(slopes["encoder"]["mean"]) + s - weight * e / STD)
    expected = -s * e + weight * (e**2 - 1) / STD - d**2 / STD
    np.testing.assert_allclose(slopes["encoder"]["std"], expected, rtol=2e-3, atol=2e-3)
    # d is the end of the chain, which differs from its start.
    log_joint = target(jnp.asarray(MEAN + STD * d, jnp.float32))[0]
    np.testing.assert_allclose(log_joint, found.log_joint_end, rtol=1e-2, atol=2e-3)
    assert np.abs(d - e).mean() > 0.1


def test_the_decoder_gradient_is_taken_at_the_end_of_the_chain():
    hmc = HmcSettings(num_burn_in_steps=0, num_steps=2, num_leapfrog_steps=2)
    a, c, v = chain_map(hmc)
    slopes, _ = estimates(hmc=hmc, accept_all=True)
    end_mean = a @ MEAN + c
    second = a @ np.diag(STD**2) @ a.T + v + np.outer(end_mean, end_mean)
    error = (exact.X - exact.B)[:, None] * end_mean - exact.W @ second
    expected = -error / exact.S**2
    found = np.asarray(slopes["decoder"]["w"], np.float64) / SAMPLES
    np.testing.assert_allclose(found, expected, atol=0.03)
    plain, _ = estimates("standard_kl", hmc=hmc)
    assert np.abs(np.asarray(plain["decoder"]["w"]) / SAMPLES - expected).max() > 0.1


@pytest.mark.parametrize("name", ["hoffman", "standard_kl"])
def test_the_encoders_of_the_baselines_minimize_the_negative_elbo(name):
    hmc = HmcSettings(num_burn_in_steps=2, num_leapfrog_steps=2)

    def negative_elbo(theta):
        mean, std = theta[:2], theta[2:]
        return -expected_log_joint(mean, np.diag(std**2)) - np.log(std).sum()

    slopes, found = estimates(name, hmc=hmc)
    check(slopes, closed_form(negative_elbo))
    assert (found.acceptance == 1.0) == (name == "standard_kl")


def test_a_control_variate_reduces_the_variance_and_keeps_the_mean():
    hmc = HmcSettings(num_burn_in_steps=0, num_steps=2, num_leapfrog_steps=2)
    expected = closed_form(lambda theta: divergence(theta, chain_map(hmc)))
    plain, found = estimates(hmc=hmc, accept_all=True)
    level = float(found.g.mean())
    assert abs(level) > 1
    better, _ = estimates(hmc=hmc, accept_all=True, control_variate=level)
    rows = [check(slopes, expected) for slopes in (plain, better)]
    assert rows[1].var(0).sum() < 0.5 * rows[0].var(0).sum()


def test_no_gradient_passes_through_the_chain():
    """The weights of the decoder move the chain, but the encoder loss ignores that."""
    params = init_params(jax.random.key(0), num_pixels=6, z_dim=2, num_hidden=5)
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 6)), jnp.float32)
    hmc = HmcSettings(num_burn_in_steps=2, num_leapfrog_steps=2, unroll=True)
    draws = Draws(
        jax.random.normal(jax.random.key(1), (4, 2)),
        draw_noise(jax.random.key(2), 2, (4, 2)),
    )

    def part(params, which):
        found = objective.estimate(
            bernoulli_vae(),
            params,
            x,
            draws,
            objective="vcd",
            hmc=hmc,
            control_variate=0.0,
            step_size=jnp.float32(0.1),
        )
        return getattr(found, which).sum()

    slope = jax.jit(jax.grad(part), static_argnums=1)
    of_encoder, of_decoder = (
        slope(params, w) for w in ("encoder_surrogate", "decoder_loss")
    )

    def largest(tree):
        return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))

    assert largest(of_encoder["decoder"]) == largest(of_decoder["encoder"]) == 0
    assert largest(of_encoder["encoder"]) > 0 and largest(of_decoder["decoder"]) > 0


# The control variate


def batches():
    rng = np.random.default_rng(0)
    for _ in range(UPDATES):
        index = rng.permutation(NUM_SAMPLES)[:BATCH]
        yield index, rng.standard_normal(BATCH).astype(np.float32) * 10


def run_updates(settings):
    """Return the values of all samples before and after each update."""
    state = init_control_variate(settings, NUM_SAMPLES)
    everyone = jnp.arange(NUM_SAMPLES)
    values = [np.asarray(control_variate_values(state, everyone))]
    for index, g in batches():
        state = update_control_variate(state, jnp.asarray(index), jnp.asarray(g), settings)
        values.append(np.asarray(control_variate_values(state, everyone)))
    return np.array(values)


def test_a_local_control_variate_is_shared_at_first_and_per_sample_later():
    c = np.zeros(NUM_SAMPLES)
    expected = [c.copy()]
    for number, (index, g) in enumerate(batches(), 1):
        if number <= SHARED:
            c[:] = 0.9 * c[0] + 0.1 * g.mean()
        else:
            c[index] = 0.9 * c[index] + 0.1 * g
        expected.append(c.copy())
    found = run_updates(ControlVariateSettings("local", 0.9, SHARED))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.unique(found[SHARED]).size == 1 < np.unique(found[-1]).size


def test_a_global_control_variate_tracks_the_batch_means():
    expected = [0.0]
    for _, g in batches():
        expected.append(0.8 * expected[-1] + 0.2 * g.mean())
    found = run_updates(ControlVariateSettings("global", 0.8))
    np.testing.assert_allclose(
        found, np.repeat(np.array(expected)[:, None], NUM_SAMPLES, 1), rtol=1e-5
    )


def test_control_variate_none_is_zero_without_state():
    settings = ControlVariateSettings("none")
    assert jax.tree.leaves(init_control_variate(settings, NUM_SAMPLES)) == []
    assert not run_updates(settings).any()


def test_counting_updates_stops_when_it_no_longer_matters():
    settings = ControlVariateSettings("local", 0.9, SHARED)
    state = init_control_variate(settings, NUM_SAMPLES)
    for index, g in batches():
        state = update_control_variate(state, jnp.asarray(index), jnp.asarray(g), settings)
    assert state["updates"] == pytest.approx(SHARED)
