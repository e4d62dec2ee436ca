"""Programs on several devices run as one."""

import jax
import numpy as np
import optax
import pytest

import millrace as mr
from millrace.apps.autoencoder import multi_device
from millrace.apps.autoencoder.multi_device import MultiDeviceProgram, get_parts

RATES = (0.1, 0.2)


def loss_fn(params, model_state, batch, key):
    del key
    loss = ((batch["x"] @ params - batch["y"]) ** 2).mean()
    count = batch["count"].mean()
    return loss, (model_state, {"lowest_rmse": loss**0.5, "finite_models": count})


pytestmark = pytest.mark.devices(2)


def build_program(device, rate):
    plan = mr.Plan(micro_batch_size=4, fp_exceptions=True)
    return mr.training_program(loss_fn, optax.sgd(rate), plan, devices=[device])


@pytest.fixture(scope="module")
def both():
    """Updates by two programs that run as one, and by each alone."""
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
        program = build_program(device, rate)
        placed = jax.device_put(chunk, program.chunk_sharding)
        alone.append(program.run(program.init(weights), placed))
    programs = [build_program(*pair) for pair in zip(devices, RATES, strict=True)]
    joined = MultiDeviceProgram(programs)
    state = joined.join([program.init(weights) for program in programs])
    placed = jax.device_put(chunk, joined.chunk_sharding)
    joined.compile(state, placed)
    assert joined.compile_seconds > 0
    return joined, joined.run(state, placed), alone


def test_each_part_matches_its_program_run_alone(both):
    joined, (state, _), alone = both
    assert int(state.update) == 5
    assert joined.devices == jax.devices()[:2]
    for part, (other, _) in zip(get_parts(state), alone, strict=True):
        np.testing.assert_array_equal(part.params, other.params)
    assert not np.array_equal(*(part.params for part in get_parts(state)))


def test_infos_of_all_programs_are_combined_when_read(both):
    _, (_, info), alone = both
    infos = [jax.device_get(other) for _, other in alone]
    mean = (infos[0]["loss"] + infos[1]["loss"]) / 2
    np.testing.assert_allclose(np.asarray(info["loss"]), mean, rtol=1e-6)
    assert (np.asarray(info["finite_models"]) == 6).all()
    lowest = np.minimum(infos[0]["lowest_rmse"], infos[1]["lowest_rmse"])
    np.testing.assert_array_equal(np.asarray(info["lowest_rmse"]), lowest)
    assert (np.asarray(info["gradients_finite"]) == 1).all()


def test_a_state_is_placed_on_the_devices_it_came_from(both):
    joined, (state, _), _ = both
    placed = joined.place_state(jax.device_get(state))
    for part, old in zip(get_parts(placed), get_parts(state), strict=True):
        assert part.params.devices() == old.params.devices()
        np.testing.assert_array_equal(part.params, old.params)


def test_the_combined_mean_counts_models_that_have_not_diverged():
    nan = np.nan
    values = np.array([[[1.0, 4.0, nan], [2, 1, 0]], [[4.0, nan, nan], [1, 0, 0]]])
    mean, count = multi_device._combine_means(values, axis=0)
    np.testing.assert_array_equal(mean, [2.0, 4.0, nan])
    np.testing.assert_array_equal(count, [3, 1, 0])
    combined = multi_device._combine_means(
        np.array([[mean, count], [[5.0] * 3, [1] * 3]]), axis=0
    )
    np.testing.assert_array_equal(combined[0], [2.75, 4.5, 5.0])
