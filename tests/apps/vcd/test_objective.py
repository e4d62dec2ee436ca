"""The gradient estimator against closed forms: a linear decoder makes all Gaussian."""

import jax
import jax.numpy as jnp
import linear_gaussian as exact
import numpy as np
import pytest

from millrace.apps.vcd import objective
from millrace.apps.vcd.model import bernoulli_vae, init_params
from millrace.apps.vcd.objective import Draws
from millrace.apps.vcd.sampler import HmcSettings, draw_noise, start

MEAN, STD = np.array([0.1, -0.4]), np.array([0.9, 0.6])
STEP_SIZE = 0.2
SAMPLES = 50_000


def estimates(name="vcd", *, hmc, accept_all=False, control_variate=0.0, seed=0):
    """One-sample gradients in q's mean and std, one row per sample; and the estimate."""
    draws = objective.draw(jax.random.key(seed), name, hmc, (SAMPLES, 2))
    if accept_all:
        draws = draws._replace(
            steps=draws.steps._replace(uniform=jnp.zeros_like(draws.steps.uniform))
        )
    x = jnp.broadcast_to(jnp.asarray(exact.X, jnp.float32), (SAMPLES, 3))
    # A row of its own for every sample, so that the gradient has one, too.
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
    """z_t = A z_0 + c + noise of covariance V, where every move is accepted."""
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
    """Of z with this mean and covariance, less a constant."""
    error = exact.X - exact.W @ mean - exact.B
    spread = np.trace(exact.W @ covariance @ exact.W.T)
    likelihood = -0.5 * (error @ error + spread) / exact.S**2
    return likelihood - 0.5 * (mean @ mean + np.trace(covariance))


def divergence(theta, chain):
    """The VCD in closed form, as a function of q's mean and std."""
    a, c, v = chain
    mean, std = theta[:2], theta[2:]
    first = np.diag(std**2)
    end_mean, end = a @ mean + c, a @ first @ a.T + v
    distance = 0.5 * (((end_mean - mean) ** 2 + np.diag(end)) / std**2).sum()
    return -expected_log_joint(mean, first) + expected_log_joint(end_mean, end) + distance


def closed_form(function):
    """Its gradient at q's parameters, by central differences in float64."""
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
    assert (error < 0.05 * np.abs(expected).max()).all()  # or it would say nothing
    return rows


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_mean_of_one_sample_gradients_is_the_closed_forms(steps):
    hmc = HmcSettings(
        num_burn_in_steps=0, num_steps=steps, num_leapfrog_steps=2, adaption_rate=0.0
    )
    chain = chain_map(hmc)
    expected = closed_form(lambda theta: divergence(theta, chain))
    slopes, found = estimates(hmc=hmc, accept_all=True, control_variate=-2.0)
    check(slopes, expected)
    # The constants of log p(x, z) are in both of its terms, and go.
    value = divergence(np.concatenate([MEAN, STD]), chain) - exact.Z_DIM / 2
    mean, error = found.vcd.mean(), found.vcd.std() / SAMPLES**0.5
    assert abs(float(mean - value)) < 4 * float(error)


def test_without_its_score_term_the_gradient_would_be_seen_to_be_wrong():
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
    """-s + (G - C) e / std - d / std, and the like for the std."""
    hmc = HmcSettings(num_burn_in_steps=2, num_leapfrog_steps=3)
    slopes, found = estimates(hmc=hmc, control_variate=1.5)
    draws = objective.draw(jax.random.key(0), "vcd", hmc, (SAMPLES, 2))
    x = jnp.broadcast_to(jnp.asarray(exact.X, jnp.float32), (SAMPLES, 3))
    e = np.asarray(draws.start)
    target = exact.log_joint(exact.DECODER, x)
    begun = start(target, jnp.asarray(MEAN + STD * e, jnp.float32))
    s = np.asarray(begun.gradient)
    # What is left of the mean's gradient must be -d / std, and of the std's -d^2 / std.
    weight = np.asarray(found.g - 1.5)[:, None]
    d = -STD * (np.asarray(slopes["encoder"]["mean"]) + s - weight * e / STD)
    expected = -s * e + weight * (e**2 - 1) / STD - d**2 / STD
    np.testing.assert_allclose(slopes["encoder"]["std"], expected, rtol=2e-3, atol=2e-3)
    # And d is where the chain has ended, which is not where it began.
    log_joint = target(jnp.asarray(MEAN + STD * d, jnp.float32))[0]
    np.testing.assert_allclose(log_joint, found.log_joint_end, rtol=1e-2, atol=2e-3)
    assert np.abs(d - e).mean() > 0.1


def test_the_decoders_gradient_is_that_of_the_chains_end():
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
def test_the_baselines_encoders_descend_the_negative_elbo(name):
    hmc = HmcSettings(num_burn_in_steps=2, num_leapfrog_steps=2)

    def negative_elbo(theta):
        mean, std = theta[:2], theta[2:]
        return -expected_log_joint(mean, np.diag(std**2)) - np.log(std).sum()

    slopes, found = estimates(name, hmc=hmc)
    check(slopes, closed_form(negative_elbo))
    assert (found.acceptance == 1.0) == (name == "standard_kl")


def test_a_control_variate_lowers_the_variance_and_leaves_the_mean():
    hmc = HmcSettings(num_burn_in_steps=0, num_steps=2, num_leapfrog_steps=2)
    expected = closed_form(lambda theta: divergence(theta, chain_map(hmc)))
    plain, found = estimates(hmc=hmc, accept_all=True)
    level = float(found.g.mean())
    assert abs(level) > 1
    better, _ = estimates(hmc=hmc, accept_all=True, control_variate=level)
    rows = [check(slopes, expected) for slopes in (plain, better)]
    assert rows[1].var(0).sum() < 0.5 * rows[0].var(0).sum()


def test_no_gradient_passes_through_the_chain():
    """Moving the decoder's weights moves the chain, but the encoder's loss ignores it."""
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
