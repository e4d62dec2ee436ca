"""Programs on several devices, run as one."""

import jax
import numpy as np
import optax
import pytest

import millrace as mr
from millrace.apps.autoencoder import multi_device as spread_module
from millrace.apps.autoencoder.multi_device import SpreadProgram, parts_of

RATES = (0.1, 0.2)


def loss_fn(params, model_state, batch, key):
    del key
    loss = ((batch["x"] @ params - batch["y"]) ** 2).mean()
    count = batch["count"].mean()
    return loss, (model_state, {"lowest_rmse": loss**0.5, "finite_models": count})


pytestmark = pytest.mark.devices(2)


def program_on(device, rate):
    plan = mr.Plan(micro_batch_size=4, fp_exceptions=True)
    return mr.training_program(loss_fn, optax.sgd(rate), plan, devices=[device])


@pytest.fixture(scope="module")
def both():
    """Updates made by two programs as one, and by each alone."""
    random = np.random.default_rng(0)
    chunk = {
        "x": random.standard_normal((5, 4, 3)).astype(np.float32),
        "y": random.standard_normal((5, 4)).astype(np.float32),
        "count": np.full((5, 4), 3, np.float32),
    }
    weights = np.ones(3, np.float32)
    devices = jax.devices()[:2]
    alone = []
    for device, rate in zip(devices, RATES, strict=True):
        program = program_on(device, rate)
        placed = jax.device_put(chunk, program.chunk_sharding)
        alone.append(program.run(program.init(weights), placed))
    programs = [program_on(*pair) for pair in zip(devices, RATES, strict=True)]
    spread = SpreadProgram(programs)
    state = spread.join([program.init(weights) for program in programs])
    placed = jax.device_put(chunk, spread.chunk_sharding)
    spread.compile(state, placed)
    assert spread.compile_seconds > 0
    return spread, spread.run(state, placed), alone


def test_each_part_becomes_what_it_would_alone(both):
    spread, (state, _), alone = both
    assert int(state.update) == 5
    assert spread.devices == jax.devices()[:2]
    for part, (other, _) in zip(parts_of(state), alone, strict=True):
        np.testing.assert_array_equal(part.params, other.params)
    assert not np.array_equal(*(part.params for part in parts_of(state)))


def test_what_all_report_becomes_one_when_it_is_read(both):
    _, (_, info), alone = both
    infos = [jax.device_get(other) for _, other in alone]
    mean = (infos[0]["loss"] + infos[1]["loss"]) / 2
    np.testing.assert_allclose(np.asarray(info["loss"]), mean, rtol=1e-6)
    assert (np.asarray(info["finite_models"]) == 6).all()
    lowest = np.minimum(infos[0]["lowest_rmse"], infos[1]["lowest_rmse"])
    np.testing.assert_array_equal(np.asarray(info["lowest_rmse"]), lowest)
    assert (np.asarray(info["gradients_finite"]) == 1).all()


def test_a_state_is_placed_again_where_it_was(both):
    spread, (state, _), _ = both
    placed = spread.place_state(jax.device_get(state))
    for part, old in zip(parts_of(placed), parts_of(state), strict=True):
        assert part.params.devices() == old.params.devices()
        np.testing.assert_array_equal(part.params, old.params)


def test_the_mean_of_all_models_counts_those_that_have_not_diverged():
    nan = np.nan
    values = np.array([[[1.0, 4.0, nan], [2, 1, 0]], [[4.0, nan, nan], [1, 0, 0]]])
    mean, count = spread_module._mean(values, axis=0)
    np.testing.assert_array_equal(mean, [2.0, 4.0, nan])
    np.testing.assert_array_equal(count, [3, 1, 0])
    one_by_one = spread_module._mean(
        np.array([[mean, count], [[5.0] * 3, [1] * 3]]), axis=0
    )
    np.testing.assert_array_equal(one_by_one[0], [2.75, 4.5, 5.0])
