"""The optimizer against NumPy, and replicas against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from millrace.apps.vcd.config import VcdConfig
from millrace.apps.vcd.config.sections import TrainingOptions
from millrace.apps.vcd.data import ShuffledIndices, binarize
from millrace.apps.vcd.program import build_loss, init_state, rmsprop, step_decay
from millrace.config import build
from millrace.feeds.infeed import Infeed
from millrace.program.training import training_program

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


def test_updates_match_the_reference():
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((3, 2)) for _ in SCOPES]
    squares = [np.full((3, 2), 0.01) for _ in SCOPES]
    optimizer = rmsprop({s: step_decay(r, 0.9, 2) for s, r in RATES.items()})
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
    optimizer = rmsprop({"decoder": step_decay(0.1, 0.9, 2)})
    params = tree([np.ones(2)] * 3)
    with pytest.raises(ValueError, match="encoder/mean/w must belong to exactly one"):
        optimizer.update(params, optimizer.init(params), params)


def test_the_learning_rate_decays_as_in_the_paper():
    options = TrainingOptions()
    every = options.updates_per_decay(50_000, 100)
    assert every == 15_000
    rate = step_decay(5e-4, options.learning_rate_decay, every)
    for update, expected in (
        (0, 5e-4),
        (14_999, 5e-4),
        (15_000, 4.5e-4),
        (30_000, 4.05e-4),
    ):
        assert rate(jnp.int32(update)) == pytest.approx(expected, rel=1e-5)
    last = 5e-4 * 0.9**26
    assert rate(jnp.int32(399_999)) == pytest.approx(last, rel=1e-4)
    shorter = TrainingOptions(num_epochs=80)
    assert shorter.updates_per_decay(50_000, 100) == 1500


def gradients_over(num_replicas, updates=500):
    """Return the mean gradient over many updates of fixed weights, and its error."""
    options = {
        "z_dim": 2,
        "num_hidden": 4,
        "num_burn_in_steps": 2,
        "num_leapfrog_steps": 2,
        "control_variate": "global",
        "step_size_adaption": "constant",
        "micro_batch_size": 16 // num_replicas,
        "num_replicas": num_replicas,
    }
    config = build(VcdConfig, options)
    rng = np.random.default_rng(0)
    images = binarize(rng.integers(0, 2, (16, 2, 2, 1)).astype(np.uint8), 0)

    def init(params):
        return jax.tree.map(jnp.zeros_like, (params, params))

    def update(gradients, state, params=None):
        total, squares = state
        total = jax.tree.map(jnp.add, total, gradients)
        squares = jax.tree.map(lambda s, g: s + g**2, squares, gradients)
        return jax.tree.map(jnp.zeros_like, gradients), (total, squares)

    program = training_program(
        build_loss(config, images),
        optax.GradientTransformation(init, update),
        config.plan,
        devices=jax.devices(),
    )
    params, model_state = init_state(config, images)
    # A wide q: a narrow one has a few huge gradients that hide all others.
    params["encoder"]["std"]["output"]["bias"] = jnp.full(2, 1.0)
    params["encoder"]["std"]["output"]["kernel"] *= 0.05
    state = program.init(params, model_state, seed=num_replicas)
    infeed = Infeed(ShuffledIndices(16, 16, seed=0))
    state, info = program.run(state, infeed.chunk(updates, program.chunk_sharding).data)
    total, squares = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
        for tree in state.optimizer_state
    )
    mean = total / updates
    return mean, np.sqrt((squares / updates - mean**2) / updates), info


@pytest.mark.slow
def test_four_replicas_have_the_gradients_of_one_with_the_whole_batch():
    (one, error1, info1), (four, error4, info4) = gradients_over(1), gradients_over(4)
    error = np.sqrt(error1**2 + error4**2)
    moved = error > 0  # some hidden units never fire
    assert moved.mean() > 0.5 and (np.abs(one) > 10 * error1)[moved].any()
    np.testing.assert_array_less(np.abs(one - four)[moved], 5 * error[moved])
    for name in ("elbo", "g", "acceptance", "loss"):
        values = [np.asarray(info[name], np.float64) for info in (info1, info4)]
        spread = np.sqrt(sum(v.var() / len(v) for v in values))
        assert abs(values[0].mean() - values[1].mean()) < 4.5 * spread, name
