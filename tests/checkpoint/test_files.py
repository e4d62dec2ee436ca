"""One checkpoint: complete or absent, and verified when it is read."""

import errno
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from several_processes import as_processes
from small_checkpoints import DAMAGES, Params, small_state, updates, value

from millrace.checkpoint import files as checkpoint_files
from millrace.checkpoint import manifest as checkpoint_manifest
from millrace.checkpoint.store import (
    CheckpointError,
    restore,
    restore_part,
    write_checkpoint,
)


def test_nan_and_infinities_are_restored(checkpoints):
    state = {"x": np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)}
    checkpoints.save(state, 1)
    checkpoints.wait()
    assert restore(checkpoints.saved()[0], state).state["x"].tobytes() == (
        state["x"].tobytes()
    )


@DAMAGES
def test_damage_to_any_file_is_detected(three, tmp_path, damage):
    intact = three.saved()[-1]
    files = [path.relative_to(intact) for path in intact.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert Path("manifest.json") in files
    for number, name in enumerate(files):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(intact, copy)
        damage(copy / name)
        with pytest.raises(CheckpointError, match=f"copy{number} is"):
            restore(copy, small_state())


@pytest.mark.parametrize(
    ("other", "hint"),
    [
        ({"weights": np.ones((4, 5), np.float32), "update": np.int32(0)}, r"\[4, 5\]"),
        ({"weights": np.ones((4, 3), np.float64), "update": np.int32(0)}, "float64"),
        ({"weights": np.ones((4, 3), jnp.bfloat16), "update": np.int32(0)}, "bfloat16"),
        ({"kernel": np.ones((4, 3), np.float32), "update": np.int32(0)}, "kernel"),
        ({"weights": np.ones((4, 3), np.float32)}, "update"),
        (small_state() | {"bias": np.ones(3, np.float32)}, "bias"),
    ],
    ids=["shape", "wider", "narrower", "renamed", "fewer", "more"],
)
def test_a_checkpoint_of_another_model_is_refused_naming_the_difference(three, other, hint):
    with pytest.raises(
        CheckpointError, match=rf"does not fit this model.*{hint}"
    ) as caught:
        restore(three.saved()[-1], other)
    assert "\n" not in str(caught.value)


def test_a_failed_write_is_reported_in_one_line(tmp_path):
    """Orbax would print a traceback for every array."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
import numpy as np
from millrace.checkpoint.store import Checkpoints
checkpoints = Checkpoints(__import__("pathlib").Path("checkpoints"))
random = np.random.default_rng(0)
checkpoints.save({str(number): random.random(40_000) for number in range(20)}, 1)
try:
    checkpoints.close()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.startswith("The checkpoint after update 1 could not be written")
    assert "checkpoints: File too large. Earlier" in done.stdout
    assert done.stderr == ""


def test_only_files_in_the_manifest_are_read(three):
    newest = three.saved()[-1]
    stray = {"0": np.full(4, 9, np.uint8), "1": np.full(48, 9, np.uint8)}
    np.savez(newest / "state" / "00000.npz", **stray)
    assert value(three.restore_newest(small_state())) == 3
    like = Params(small_state()["weights"])
    with pytest.raises(CheckpointError, match="does not fit"):
        restore_part(newest, like)


def test_a_stray_folder_of_another_process_is_not_read(folder):
    path, other = folder / "update-000000001", folder / "update-000000009"
    for update in (1, 9):
        write = functools.partial(write_checkpoint, folder / f"update-{update:09d}")
        as_processes(2, lambda _, u=update, w=write: w(small_state(u), u, {}))
    shutil.copytree(other / "state/ocdbt.process_0", path / "state/ocdbt.process_2")
    assert value(restore(path, small_state())) == 1


def test_a_temporary_read_error_is_not_damage(three, monkeypatch):
    def deny(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(checkpoint_manifest, "file_checksum", deny)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Permission denied"):
        three.restore_newest(small_state())
    monkeypatch.undo()
    assert value(three.restore_newest(small_state())) == 3


def test_running_out_of_memory_is_not_damage(three, monkeypatch):
    def run_out_of_memory(*_):
        raise MemoryError

    monkeypatch.setattr(checkpoint_files, "read_arrays", run_out_of_memory)
    with pytest.raises(MemoryError):
        three.restore_newest(small_state())
    assert updates(three) == [1, 2, 3]
