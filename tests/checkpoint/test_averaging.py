"""Averages of checkpoints, compared with plain float64."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from millrace.checkpoint.averaging import (
    exponential_average,
    save_average,
    select_last_epochs,
    uniform_average,
)
from millrace.checkpoint.store import (
    CheckpointError,
    Checkpoints,
    checkpoints_in,
    read_manifest,
    restore_part,
    write_checkpoint,
)

COUNT = 5


class State(NamedTuple):
    params: Any
    model_state: Any
    optimizer_state: Any


class Weights(NamedTuple):
    params: Any
    model_state: Any


def weights(number):
    random = np.random.default_rng(number)
    kernel = random.standard_normal((3, 4)).astype(np.float32)
    half = random.standard_normal(6).astype(jnp.bfloat16)
    return Weights(
        {"a/conv": {"kernel": kernel, "half": half}},
        {"a/norm": {"mean": random.standard_normal(2).astype(np.float32)}},
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(folder, keep=COUNT)
    for number in range(1, COUNT + 1):
        state = State(*weights(number), {"momentum": np.full(3, number, np.float32)})
        checkpoints.save(state, 10 * number, epoch=number / 2, time=float(number))
    checkpoints.close()
    return checkpoints_in(folder)


def leaves(tree):
    params, model_state = tree
    conv = params["a/conv"]
    return [conv["kernel"], conv["half"], model_state["a/norm"]["mean"]]


def float64_leaves(number):
    return [np.asarray(leaf, np.float64) for leaf in leaves(weights(number))]


def assert_equal(found, wanted):
    for leaf, exact, like in zip(leaves(found), wanted, leaves(weights(1)), strict=True):
        assert leaf.dtype == like.dtype
        np.testing.assert_array_equal(leaf, exact.astype(like.dtype))  # rounded once


def test_an_exponential_average_starts_from_the_first_checkpoint(saved):
    wanted = float64_leaves(1)
    for number in range(2, COUNT + 1):
        wanted = [0.97 * a + (1 - 0.97) * w
                  for a, w in zip(wanted, float64_leaves(number), strict=True)]  # fmt: skip
    assert_equal(exponential_average(saved, weights(1), 0.97), wanted)


def test_a_uniform_average_is_over_the_checkpoints_of_the_last_epochs(saved):
    # Every half epoch: 2.5, 2.0 and 1.5 are within 1.5 epochs of the end, 1.0 is not.
    last = select_last_epochs(saved, 1.5)
    assert last == saved[-3:]
    wanted = [sum(each) / 3 for each in zip(*map(float64_leaves, (3, 4, 5)), strict=True)]
    assert_equal(uniform_average(last, weights(1)), wanted)
    assert select_last_epochs(saved, 0.1) == saved[-1:]
    assert select_last_epochs(saved, 100) == saved


def test_an_average_is_a_checkpoint_next_to_the_others(saved):
    folder = saved[0].parent
    average = uniform_average(saved, weights(1))
    for _ in range(2):  # twice, as a resumed run would
        metadata = save_average(folder / "weight_avg_N_9", average, saved)
    assert metadata == {
        "update": 50, "epoch": 2.5, "time": 5.0, "made_of": [p.name for p in saved]
    }  # fmt: skip
    assert checkpoints_in(folder) == saved  # an average is not resumed from
    restored, manifest = restore_part(folder / "weight_avg_N_9", weights(1))
    assert_equal(restored, leaves(average))
    assert manifest["made_of"] == read_manifest(folder / "weight_avg_N_9")["made_of"]


def test_a_checkpoint_without_an_epoch_is_refused(tmp_path):
    path = tmp_path / "update-000000001"
    write_checkpoint(path, weights(1), 1, {})
    with pytest.raises(CheckpointError, match="update-000000001 does not say its epoch"):
        select_last_epochs([path], 1)
    with pytest.raises(CheckpointError, match="not saved by a training run"):
        save_average(tmp_path / "average", weights(1), [path])
