"""The model: its sizes, its densities, and its hand-written gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from millrace.apps.vcd.model import (
    Gaussian,
    encode,
    init_params,
    log_joint,
    log_likelihood,
    log_prior,
)
from millrace.nn.layers import num_parameters

PARAMS = init_params(jax.random.key(0), num_pixels=20, z_dim=3, num_hidden=16)
X = jnp.asarray(np.random.default_rng(0).integers(0, 2, (5, 20)), jnp.float32)
Z = jax.random.normal(jax.random.key(1), (5, 3))


def test_sizes_and_initial_weights_match_the_paper():
    params = init_params(jax.random.key(0), num_pixels=784, z_dim=10)
    assert num_parameters(params["decoder"]) == 199_984
    assert num_parameters(params["encoder"]["mean"]) == 199_210
    assert num_parameters(params) == 598_404
    first = params["encoder"]["std"]["hidden1"]["kernel"]
    assert first.shape == (784, 200)
    assert first.std() == pytest.approx(200**-0.5, rel=0.02)
    assert params["decoder"]["output"]["kernel"].std() == pytest.approx(1.0, rel=0.02)
    assert params["decoder"]["output"]["bias"].std() == pytest.approx(1.0, rel=0.1)


def test_the_hand_written_gradient_matches_autodiff():
    def total(z):
        return (log_likelihood(PARAMS["decoder"], X, z) + log_prior(z)).sum()

    (log_density, gradient), value, slope = jax.jit(
        lambda z: (log_joint(PARAMS["decoder"], X)(z), *jax.value_and_grad(total)(z))
    )(Z)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-5)
    assert log_density.sum() == pytest.approx(float(value), rel=1e-5)


def test_16_bit_weights_multiply_in_16_bits_and_accumulate_in_32():
    halves = jax.tree.map(lambda w: w.astype(jnp.bfloat16), PARAMS)
    both = jax.jit(lambda *some: [log_joint(each["decoder"], X)(Z) for each in some])
    (log_density, gradient), (whole, slope) = both(halves, PARAMS)
    assert log_density.dtype == gradient.dtype == jnp.float32
    np.testing.assert_allclose(log_density, whole, rtol=0.02)
    np.testing.assert_allclose(gradient, slope, atol=0.05 * float(jnp.abs(slope).max()))


def test_the_likelihood_is_that_of_independent_pixels():
    decoder = jax.tree.map(jnp.zeros_like, PARAMS["decoder"])
    logits = np.linspace(-30, 30, 20)
    decoder["output"]["bias"] = jnp.asarray(logits, jnp.float32)
    expected = stats.bernoulli(1 / (1 + np.exp(-logits))).logpmf(np.asarray(X)).sum(-1)
    np.testing.assert_allclose(log_likelihood(decoder, X, Z), expected, rtol=1e-5)


def test_the_encoder_keeps_standard_deviations_above_the_limit():
    encoder = jax.tree.map(lambda w: -50 * jnp.abs(w), PARAMS["encoder"])
    low = encode(encoder, X).std
    assert (low > 0).all() and jnp.isfinite(jnp.log(low)).all()
    encoder["std"]["output"]["bias"] = jnp.full(3, 7.0)
    encoder["std"]["output"]["kernel"] = jnp.zeros_like(encoder["std"]["output"]["kernel"])
    expected = np.log(np.exp(7.0) + np.exp(1e-4))
    np.testing.assert_allclose(encode(encoder, X).std, expected, rtol=1e-6)


def test_density_and_entropy_of_a_gaussian_match_scipy():
    mean, std = np.array([[0.5, -1.0]]), np.array([[0.3, 2.0]])
    q = Gaussian(jnp.asarray(mean, jnp.float32), jnp.asarray(std, jnp.float32))
    z = np.array([[0.1, 0.7]])
    same = stats.norm(mean, std)
    assert q.log_density(jnp.asarray(z, jnp.float32))[0] == pytest.approx(
        same.logpdf(z).sum(), rel=1e-5
    )
    assert q.entropy()[0] == pytest.approx(same.entropy().sum(), rel=1e-5)
    assert log_prior(jnp.asarray(z, jnp.float32))[0] == pytest.approx(
        stats.norm.logpdf(z).sum(), rel=1e-5
    )
