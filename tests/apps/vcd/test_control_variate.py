"""The control variate against the published rule, written plainly in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.apps.vcd.control_variate import (
    ControlVariateSettings,
    init,
    moved,
    value,
)

NUM_SAMPLES, BATCH, UPDATES, SHARED = 12, 4, 9, 4


def batches():
    rng = np.random.default_rng(0)
    for _ in range(UPDATES):
        index = rng.permutation(NUM_SAMPLES)[:BATCH]
        yield index, rng.standard_normal(BATCH).astype(np.float32) * 10


def run(settings):
    """Return the value of every sample before and after each update."""
    model_state = init(settings, NUM_SAMPLES)
    everyone = jnp.arange(NUM_SAMPLES)
    values = [np.asarray(value(model_state, everyone))]
    for index, g in batches():
        model_state = moved(model_state, jnp.asarray(index), jnp.asarray(g), settings)
        values.append(np.asarray(value(model_state, everyone)))
    return np.array(values)


def test_a_local_one_is_first_the_same_for_all_and_then_each_samples_own():
    c = np.zeros(NUM_SAMPLES)
    expected = [c.copy()]
    for number, (index, g) in enumerate(batches(), 1):
        if number <= SHARED:
            c[:] = 0.9 * c[0] + 0.1 * g.mean()
        else:
            c[index] = 0.9 * c[index] + 0.1 * g
        expected.append(c.copy())
    found = run(ControlVariateSettings("local", 0.9, SHARED))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.unique(found[SHARED]).size == 1 < np.unique(found[-1]).size


def test_a_global_one_follows_the_batches_means():
    expected = [0.0]
    for _, g in batches():
        expected.append(0.8 * expected[-1] + 0.2 * g.mean())
    found = run(ControlVariateSettings("global", 0.8))
    np.testing.assert_allclose(
        found, np.repeat(np.array(expected)[:, None], NUM_SAMPLES, 1), rtol=1e-5
    )


def test_none_is_nothing():
    settings = ControlVariateSettings("none")
    assert jax.tree.leaves(init(settings, NUM_SAMPLES)) == []
    assert not run(settings).any()


def test_the_count_stops_where_it_no_longer_matters():
    settings = ControlVariateSettings("local", 0.9, SHARED)
    model_state = init(settings, NUM_SAMPLES)
    for index, g in batches():
        model_state = moved(model_state, jnp.asarray(index), jnp.asarray(g), settings)
    assert model_state["updates"] == pytest.approx(SHARED)
