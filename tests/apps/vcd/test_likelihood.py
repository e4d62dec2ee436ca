"""Importance sampling against exact likelihoods."""

import jax
import jax.numpy as jnp
import linear_gaussian as exact
import numpy as np
import pytest

from millrace.apps.vcd import likelihood
from millrace.apps.vcd.config.sections import LikelihoodOptions
from millrace.apps.vcd.data import BinaryImages, binarize
from millrace.apps.vcd.likelihood import (
    PROPOSALS,
    add_groups,
    build_proposals,
    estimate_log_likelihoods,
)
from millrace.apps.vcd.model import Gaussian, init_params
from millrace.apps.vcd.sampler import HmcSettings

OPTIONS = LikelihoodOptions(
    num_importance_samples=3000,
    importance_group_size=100,
    test_micro_batch_size=4,
    num_test_burn_in_steps=60,
    num_test_hmc_steps=200,
    test_step_size=0.3,
)


def random_images(count, shape=(2, 3)) -> BinaryImages:
    drawn = np.random.default_rng(0).integers(0, 2, (count, *shape, 1))
    return binarize(drawn.astype(np.uint8), 0)


def test_the_estimate_agrees_with_the_exact_likelihood_of_a_linear_model():
    encoder = {"mean": jnp.full((4, 2), 0.2), "std": jnp.full((4, 2), 0.8)}
    params = {"encoder": encoder, "decoder": exact.DECODER}
    x = jnp.broadcast_to(jnp.asarray(exact.X, jnp.float32), (4, 3))
    valid = jnp.array([True, True, True, False])
    hmc = HmcSettings(num_burn_in_steps=60, num_steps=200)
    propose = jax.jit(
        lambda key: build_proposals(exact.MODEL, params, x, valid, hmc, 0.3, key)[0]
    )
    proposed = propose(jax.random.key(0))
    mean, precision = exact.posterior()
    std = np.sqrt(np.diag(np.linalg.inv(precision)))
    np.testing.assert_allclose(proposed.mean[1], np.broadcast_to(mean, (4, 2)), atol=0.2)
    np.testing.assert_allclose(
        proposed.std[2], 1.2 * np.broadcast_to(std, (4, 2)), rtol=0.5
    )
    np.testing.assert_allclose(proposed.std[0], 1.2 * encoder["std"], rtol=1e-6)
    keys = jax.random.split(jax.random.key(1), 200)
    found = add_groups(
        exact.MODEL, params, x, proposed, jnp.full((3, 4), -jnp.inf), keys, 100
    )
    np.testing.assert_allclose(found - np.log(20_000), exact.log_marginal(), atol=0.03)


def test_streaming_groups_of_samples_equals_using_them_at_once():
    q = Gaussian(jnp.zeros((1, 4, 2)), jnp.ones((1, 4, 2)))
    params = {"decoder": exact.DECODER}
    x = jnp.broadcast_to(jnp.asarray(exact.X, jnp.float32), (4, 3))
    keys = jax.random.split(jax.random.key(0), 6)
    nothing = jnp.full((1, 4), -jnp.inf)

    @jax.jit
    def both(keys):
        streamed = nothing
        for part in (keys[:1], keys[1:4], keys[4:]):
            streamed = add_groups(exact.MODEL, params, x, q, streamed, part, 5)
        return add_groups(exact.MODEL, params, x, q, nothing, keys, 5), streamed

    at_once, streamed = both(keys)
    np.testing.assert_allclose(streamed, at_once, rtol=1e-5)


def test_the_likelihood_of_a_decoder_that_ignores_its_latents_is_exact():
    params = init_params(jax.random.key(0), num_pixels=6, z_dim=2, num_hidden=4)
    kernel = params["decoder"]["output"]["kernel"]
    params["decoder"]["output"]["kernel"] = jnp.zeros_like(kernel)
    images = random_images(7)  # two batches, the second one partial
    seen = []
    found = estimate_log_likelihoods(
        params, images, OPTIONS, progress=lambda *progress: seen.append(progress)
    )
    metrics, statistics = found.metrics("test"), found.statistics()
    logits = np.asarray(params["decoder"]["output"]["bias"], np.float64)
    signs = 2.0 * np.unpackbits(images.packed, axis=1, count=6) - 1
    expected = -np.log1p(np.exp(-signs * logits)).sum(1)
    assert list(found.values) == list(PROPOSALS)
    # The chains sample the prior here, so only their proposal fits it.
    np.testing.assert_allclose(found.values["hmc"], expected, atol=0.15)
    assert found.best.shape == (7,)
    np.testing.assert_array_equal(found.best, np.max(list(found.values.values()), 0))
    assert seen[-1] == (4, 4) and [done for done, _ in seen] == [1, 2, 3, 4]
    best = metrics.pop("test_log_likelihood")
    # The target is the prior, a normal distribution: the chains mix well.
    rhat, ess = metrics.pop("test_chain_rhat"), metrics.pop("test_chain_ess")
    assert 0.99 < rhat < 1.1 and 20 < ess <= 200 * np.log10(200)
    assert found.chains.rhat.shape == (7,)
    assert statistics["chains"]["rhat_median"] == rhat
    assert len(metrics) == 3 and all(best >= value for value in metrics.values())
    assert statistics["num_pictures"] == 7 and statistics["num_batches"] == 2
    assert statistics["best"]["mean"] == pytest.approx(best)


def test_padding_does_not_influence_the_chains_of_the_other_images():
    encoder = {"mean": jnp.full((4, 2), 0.2), "std": jnp.full((4, 2), 0.8)}
    params = {"encoder": encoder, "decoder": exact.DECODER}
    hmc = HmcSettings(num_burn_in_steps=20, num_steps=5, adaption_rate=0.5)

    @jax.jit
    def means(x, valid):
        key = jax.random.key(0)
        return build_proposals(exact.MODEL, params, x, valid, hmc, 0.3, key)[0].mean

    rows = jnp.broadcast_to(jnp.asarray(exact.X, jnp.float32), (4, 3))
    valid = jnp.array([True, True, True, False])
    # The chain of the second padding accepts almost nothing.
    found = [np.asarray(means(rows.at[3].set(value), valid)) for value in (0.0, 100.0)]
    np.testing.assert_array_equal(found[0][:, :3], found[1][:, :3])
    counted = means(rows.at[3].set(100.0), jnp.ones(4, bool))
    assert not np.array_equal(counted[:, :3], found[1][:, :3])


def test_the_acceptance_is_averaged_over_valid_images(monkeypatch):
    class Seen(Exception):
        pass

    def run_chains(*arguments, average, **options):
        raise Seen(average(jnp.array([0.5, 0.75, 1.0, 0.0])))

    monkeypatch.setattr(likelihood, "run_chains", run_chains)
    encoder = {"mean": jnp.zeros((4, 2)), "std": jnp.ones((4, 2))}
    params = {"encoder": encoder, "decoder": exact.DECODER}
    valid = jnp.array([True, True, True, False])
    x, key = jnp.zeros((4, 3)), jax.random.key(0)
    hmc = HmcSettings(num_burn_in_steps=1, num_steps=1)
    with jax.disable_jit(), pytest.raises(Seen) as caught:
        build_proposals(exact.MODEL, params, x, valid, hmc, 0.3, key)
    assert caught.value.args[0] == 0.75
