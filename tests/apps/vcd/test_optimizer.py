"""RMSProp as published, against NumPy; learning rates by scope and by update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.optimizer import rmsprop, stepped

SCOPES = ("encoder/mean", "encoder/std", "decoder")
RATES = {"encoder/mean": 0.5, "encoder/std": 0.25, "decoder": 1.5}


def tree(values):
    mean, std, decoder = (np.asarray(value, np.float32) for value in values)
    return {
        "encoder": {"mean": {"w": jnp.asarray(mean)}, "std": {"w": jnp.asarray(std)}},
        "decoder": {"output": {"w": jnp.asarray(decoder)}},
    }


def leaves(params):
    encoder = params["encoder"]
    return encoder["mean"]["w"], encoder["std"]["w"], params["decoder"]["output"]["w"]


def test_updates_are_those_of_the_reference():
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((3, 2)) for _ in SCOPES]
    squares = [np.full((3, 2), 0.01) for _ in SCOPES]
    optimizer = rmsprop({s: stepped(r, 0.9, 2) for s, r in RATES.items()})
    params = tree(weights)
    state = optimizer.init(params)
    for update in range(5):
        gradients = [rng.standard_normal((3, 2)) * 10.0**update for _ in SCOPES]
        for n, scope in enumerate(SCOPES):
            rate = RATES[scope] * 0.9 ** (update // 2)
            squares[n] = 0.9 * squares[n] + 0.1 * gradients[n] ** 2
            weights[n] = weights[n] - rate * gradients[n] / (1 + np.sqrt(squares[n]))
        changes, state = optimizer.update(tree(gradients), state, params)
        params = jax.tree.map(jnp.add, params, changes)
        for found, expected in zip(leaves(params), weights, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_weight_that_belongs_to_no_scope_is_an_error():
    optimizer = rmsprop({"decoder": stepped(0.1, 0.9, 2)})
    params = tree([np.ones(2)] * 3)
    with pytest.raises(ValueError, match="encoder/mean/w must belong to exactly one"):
        optimizer.update(params, optimizer.init(params), params)


def test_the_learning_rate_falls_as_in_the_paper():
    config = VcdConfig()
    every = config.updates_per_decay(50_000, 100)
    assert every == 15_000
    rate = stepped(5e-4, config.learning_rate_decay, every)
    for update, expected in (
        (0, 5e-4),
        (14_999, 5e-4),
        (15_000, 4.5e-4),
        (30_000, 4.05e-4),
    ):
        assert rate(jnp.int32(update)) == pytest.approx(expected, rel=1e-5)
    last = 5e-4 * 0.9**26
    assert rate(jnp.int32(399_999)) == pytest.approx(last, rel=1e-4)
    shorter = VcdConfig(num_epochs=80)
    assert shorter.updates_per_decay(50_000, 100) == 1500


def test_the_rates_of_the_scopes():
    assert VcdConfig().learning_rates(100) == {
        "encoder/mean": 5e-4,
        "encoder/std": 2.5e-4,
        "decoder": 5e-4,
    }
    assert VcdConfig(learning_rate=0.01).learning_rates(64) == {
        "encoder/mean": 0.01,
        "encoder/std": 0.005,
        "decoder": 0.01,
    }
