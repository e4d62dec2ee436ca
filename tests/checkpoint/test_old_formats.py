"""Checkpoints of earlier versions can be read."""

from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from every_kind import every_kind, exact_value
from old_checkpoints import write_format_1, write_process_files
from small_checkpoints import Params, small_state, value

from millrace.checkpoint.store import Checkpoints, restore, restore_part
from millrace.checkpoint.weights import restore_weights


class Format1State(NamedTuple):
    """A training state with the field names of checkpoint format 1."""

    update: np.ndarray
    params: dict
    carried: dict
    optimiser_state: tuple


class CurrentState(NamedTuple):
    update: np.ndarray
    params: dict
    model_state: dict
    optimizer_state: tuple


class JoinedState(NamedTuple):
    update: np.ndarray
    parts: tuple


class Weights(NamedTuple):
    params: dict
    model_state: dict


VALUES = (
    np.int32(3),
    {"carried": np.arange(3.0), "w": np.ones((2, 2))},
    {"mean": np.full(2, 5.0)},
    (optax.TraceState({"w": np.full((2, 2), 7.0)}), np.int32(9)),
)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("joined", [False, True])
def test_a_checkpoint_of_format_1_can_be_read(tmp_path, processes, joined):
    old, current = Format1State(*VALUES), CurrentState(*VALUES)
    if joined:
        old, current = (JoinedState(np.int32(3), (x, x)) for x in (old, current))
    path = tmp_path / "update-000000003"
    if processes == 1:
        write_format_1(path, old, 3)
    else:
        write_process_files(path, old, 3, processes, version=1)
    restored = restore(path, current).state
    assert jax.tree.structure(restored) == jax.tree.structure(current)
    jax.tree.map(np.testing.assert_array_equal, restored, current)
    if not joined:
        part = restore_part(path, Weights(current.params, current.model_state)).state
        jax.tree.map(np.testing.assert_array_equal, part, Weights(*VALUES[1:3]))


@pytest.mark.parametrize("processes", [2, 4])
def test_a_checkpoint_with_a_file_for_each_process_can_be_read(tmp_path, processes):
    kinds = every_kind()
    state = JoinedState(np.int32(3), (kinds,))
    path = tmp_path / "update-000000003"
    write_process_files(path, state, 3, processes)
    found = restore(path, state).state.parts[0]
    assert {name: exact_value(leaf) for name, leaf in found.items()} == {
        name: exact_value(leaf) for name, leaf in kinds.items()
    }


def test_weights_in_a_file_for_each_process_need_no_model(tmp_path):
    path = tmp_path / "update-000000003"
    write_process_files(path, CurrentState(*VALUES), 3, 2)
    found = restore_weights(path)
    jax.tree.map(np.testing.assert_array_equal, tuple(found), VALUES[1:3])


def test_a_run_continues_from_files_of_processes_and_then_saves_in_the_current_format(
    folder,
):
    write_process_files(folder / "update-000000001", small_state(1), 1, 2)
    checkpoints = Checkpoints(folder)
    assert value(checkpoints.restore_newest(small_state())) == 1
    checkpoints.save(small_state(2), 2)
    checkpoints.close()
    assert value(checkpoints.restore_newest(small_state())) == 2
    assert list((folder / "update-000000002").rglob("*.npz")) == []


def test_only_the_files_of_processes_in_the_manifest_are_read(folder):
    path = folder / "update-000000001"
    write_process_files(path, Params(small_state()), 1, 2)
    stray = {"0": np.full(4, 9, np.uint8), "1": np.full(48, 9, np.uint8)}
    np.savez(path / "state" / "00002.npz", **stray)
    found = restore(path, Params(small_state())).state.params
    np.testing.assert_array_equal(found["weights"], small_state()["weights"])
