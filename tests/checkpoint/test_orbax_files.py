"""The arrays of a checkpoint are one that orbax reads alone, whoever wrote it."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from every_kind import every_kind
from several_processes import as_processes

from millrace.checkpoint import orbax_files
from millrace.checkpoint.store import CheckpointError, checkpoints_in, write_checkpoint
from millrace.checkpoint.stored import to_stored

READ_WITH_ORBAX = """
import json, sys
import jax
import numpy as np
import orbax.checkpoint as ocp

def read_all(path):
    yield ocp.PyTreeCheckpointer().restore(path)
    yield ocp.StandardCheckpointer().restore(path)
    yield ocp.v1.load(path)

def describe(leaf):
    return [leaf.dtype.name, list(leaf.shape), np.asarray(leaf).tobytes().hex()]

found = []
for path in sys.argv[1:]:
    for tree in read_all(path):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        found.append({jax.tree_util.keystr(path): describe(leaf) for path, leaf in leaves})
print(json.dumps(found))
assert not any(name.startswith("millrace") for name in sys.modules)
"""


class State(NamedTuple):
    params: dict
    optimizer_state: tuple
    model_state: dict


def make_state() -> State:
    kinds = every_kind()
    return State(kinds, (kinds["bfloat16"] * 2, {"count": np.int32(7)}, ()), {})


def test_orbax_alone_reads_what_one_process_or_two_have_written(tmp_path):
    state = make_state()
    paths = [tmp_path / str(count) / "update-000000001" for count in (1, 2)]
    for count, path in enumerate(paths, 1):
        as_processes(count, lambda _, path=path: write_checkpoint(path, state, 1, {}))
    done = subprocess.run(
        [sys.executable, "-c", READ_WITH_ORBAX, *(str(path / "state") for path in paths)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    params, (trace, count, _), _ = jax.tree.map(to_stored, state)
    expected = {
        jax.tree_util.keystr(key): [x.dtype.name, list(x.shape), x.tobytes().hex()]
        for key, x in jax.tree_util.tree_leaves_with_path(
            {"params": params, "optimizer_state": [trace, count]}
        )
    }
    assert "['optimizer_state'][1]['count']" in expected
    assert json.loads(done.stdout) == [expected] * 6


def test_an_array_that_did_not_reach_the_folder_fails_the_checkpoint(tmp_path, monkeypatch):
    real = orbax_files.write_share

    def lose(folder, arrays):
        share = real(folder, arrays)
        if "b" in arrays:
            shutil.rmtree(share)
            share.mkdir()
        return share

    monkeypatch.setattr(orbax_files, "write_share", lose)
    state = {"a": np.ones(3), "b": np.ones(2)}
    path = tmp_path / "update-000000001"
    with pytest.raises(CheckpointError, match="1 arrays, such as b, are missing"):
        as_processes(2, lambda _: write_checkpoint(path, state, 1, {}))
    assert checkpoints_in(tmp_path) == []


def test_arrays_that_orbax_would_confuse_are_refused(tmp_path):
    state = {"a.b": np.ones(2), "a": {"b": np.zeros(2)}}
    with pytest.raises(CheckpointError, match=r"2 arrays would have the name a\.b"):
        write_checkpoint(tmp_path / "update-000000001", state, 1, {})


def test_a_process_without_arrays_writes_an_empty_share(tmp_path):
    path = tmp_path / "update-000000001"
    as_processes(3, lambda _: write_checkpoint(path, {"a": np.ones(3)}, 1, {}))
    found = orbax_files.restore(path / "state", {"a": np.empty(3)})
    assert found["a"].tolist() == [1, 1, 1]


def test_large_arrays_are_split_and_read_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_files, "_MAX_CHUNK_BYTES", 4000)
    array = np.arange(3 * 7 * 211, dtype=np.float32).reshape(3, 7, 211)
    path = tmp_path / "update-000000001"
    write_checkpoint(path, {"a": array}, 1, {})
    found = orbax_files.restore(path / "state", {"a": np.empty_like(array)})
    np.testing.assert_array_equal(found["a"], array)


def test_only_the_leftover_errors_of_a_failed_write_are_silenced():
    printed = []
    for text in ("Event loop is closed", "of a library's own"):
        error = SimpleNamespace(exc_value=RuntimeError(text))
        orbax_files._skip_closed_loop(printed.append, error)
    assert [str(error.exc_value) for error in printed] == ["of a library's own"]
