"""The checkpoints of a run: saved, kept, deleted, and set aside when damaged."""

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_checkpoints import (
    DAMAGES,
    newest_file,
    small_state,
    truncate,
    updates,
    value,
)

from millrace.checkpoint import orbax_files
from millrace.checkpoint.best import BestMetric
from millrace.checkpoint.store import (
    CheckpointError,
    Checkpoints,
    checkpoints_in,
)
from millrace.program.mixed_precision import init_loss_scale
from millrace.program.step import TrainState

# Saving and restoring


def test_a_training_state_is_restored_bit_for_bit_with_its_structure(checkpoints):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "conv": {"kernel": jax.random.normal(keys[0], (3, 3, 2), jnp.bfloat16)},
        "fc": [jax.random.normal(keys[1], (5,)), jnp.float16(0.1)],
    }
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    state = TrainState(
        update=jnp.int32(7),
        params=params,
        model_state={},
        optimizer_state=optimizer.init(params),
        loss_scale=init_loss_scale(2.0**15),
        key=jax.random.key_data(keys[2]),
    )
    checkpoints.save(state, 7)
    checkpoints.wait()
    found = checkpoints.restore_newest(state).state
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert new.dtype == old.dtype
        assert new.shape == old.shape
        assert new.tobytes() == np.asarray(old).tobytes()


@pytest.mark.cpu("copies on an accelerator are programs")
def test_saving_compiles_nothing_on_a_cpu(checkpoints):
    shapes = [(3, 5), (7,), (2, 2, 11)]  # which no other test has
    state = {str(shape): jax.device_put(np.ones(shape)) for shape in shapes}
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "compile" in event else None
    )
    checkpoints.save(state, 1)
    assert compiled == []
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.ones((3, 13))))
    assert compiled


def test_a_state_on_several_devices_is_saved_completely(checkpoints):
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    weights = np.arange(32, dtype=np.float32)
    state = {
        "copied": jax.device_put(weights, NamedSharding(mesh, PartitionSpec())),
        "split": jax.device_put(weights, NamedSharding(mesh, PartitionSpec("replica"))),
    }
    checkpoints.save(state, 1)
    checkpoints.wait()
    restored = checkpoints.restore_newest(state).state
    np.testing.assert_array_equal(restored["copied"], weights)
    np.testing.assert_array_equal(restored["split"], weights)


def test_metadata_is_saved_with_the_state(checkpoints):
    metrics = {"train_loss": 0.25, "validation_accuracy": 0.5}
    checkpoints.save(small_state(), 12, data_position=96, time=1.5, metrics=metrics)
    checkpoints.wait()
    manifest = checkpoints.restore_newest(small_state()).manifest
    assert manifest["update"] == 12
    assert manifest["data_position"] == 96
    assert manifest["time"] == 1.5
    assert manifest["metrics"] == metrics
    assert manifest["versions"]["jax"] == jax.__version__


def test_without_checkpoints_nothing_is_restored(checkpoints, folder):
    assert checkpoints.restore_newest(small_state()) is None
    folder.mkdir()
    assert checkpoints.restore_newest(small_state()) is None
    assert checkpoints.saved() == []


def test_the_newest_is_restored_by_number_not_by_time(checkpoints):
    for update in (9, 100, 20):
        checkpoints.save(small_state(update), update)
    checkpoints.wait()
    assert value(checkpoints.restore_newest(small_state())) == 100


def test_the_state_may_be_donated_or_changed_once_save_returns(checkpoints, monkeypatch):
    changed = threading.Event()
    write = orbax_files.write_share

    def write_late(folder, arrays):
        assert changed.wait(10)
        return write(folder, arrays)

    monkeypatch.setattr(orbax_files, "write_share", write_late)
    on_host, on_device = np.ones(3, np.float32), jnp.ones(3)
    checkpoints.save({"a": on_host, "b": on_device}, 1)
    on_host[:] = -1
    on_device.delete()
    changed.set()
    checkpoints.wait()
    found = checkpoints.restore_newest({"a": on_host, "b": on_host}).state
    assert found["a"].tolist() == found["b"].tolist() == [1, 1, 1]


def test_closing_finishes_the_checkpoint_in_progress(folder):
    checkpoints = Checkpoints(folder)
    checkpoints.save(small_state(), 1)
    checkpoints.close()
    assert [path.name for path in folder.iterdir()] == ["update-000000001"]


def test_saving_the_same_update_twice_keeps_the_first(three):
    three.save(small_state(3), 3, data_position=-1)
    three.wait()
    assert three.restore_newest(small_state()).manifest["data_position"] == 30


# Which are kept


def test_only_the_newest_are_kept(folder):
    checkpoints = Checkpoints(folder, keep=2)
    for update in range(1, 6):
        checkpoints.save(small_state(update), update)
    checkpoints.close()
    assert updates(checkpoints) == [4, 5]
    assert len(list(folder.iterdir())) == 2


def keep_smallest_loss(folder: Path, losses: list[float]) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=1, best_by=BestMetric("loss", "min"))
    for update, loss in enumerate(losses, 1):
        checkpoints.save(small_state(update), update, scores={"loss": loss})
    checkpoints.close()
    return checkpoints


def test_the_best_is_kept_in_addition_to_the_newest(folder):
    checkpoints = keep_smallest_loss(folder, [0.5, 0.1, 0.3, 0.2])
    assert updates(checkpoints) == [2, 4]
    assert checkpoints.best() == folder / "update-000000002"


def test_a_former_best_checkpoint_is_deleted(folder):
    checkpoints = keep_smallest_loss(folder, [0.5, 0.1, 0.3, 0.05, 0.2])
    assert updates(checkpoints) == [4, 5]


def test_without_a_comparison_there_is_no_best(three):
    assert three.best() is None


@pytest.mark.parametrize("losses", [[np.nan, 0.1, 0.2, 0.3], [0.1, np.nan, 0.2, np.nan]])
def test_a_score_that_is_nan_is_never_the_best_and_stops_nothing(folder, losses):
    checkpoints = keep_smallest_loss(folder, losses)
    assert updates(checkpoints) == [losses.index(0.1) + 1, 4]


def test_a_damaged_older_checkpoint_does_not_prevent_new_ones(folder):
    checkpoints = keep_smallest_loss(folder, [0.5, 0.6])
    truncate(folder / "update-000000001" / "manifest.json")
    again = Checkpoints(folder, keep=1, best_by=BestMetric("loss", "min"))
    again.save(small_state(3), 3, scores={"loss": 0.4})
    again.close()
    assert value(checkpoints.restore_newest(small_state())) == 3


# Damage


@DAMAGES
def test_a_damaged_checkpoint_is_set_aside_for_an_older_one_with_a_warning(
    three, folder, warned, damage
):
    damage(newest_file(three))
    restored = three.restore_newest(small_state())
    assert value(restored) == 2
    assert restored.manifest["data_position"] == 20
    ((level, message),) = warned
    assert level == "WARNING"
    assert "update-000000003" in message
    assert "damaged" in message
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["update-000000001", "update-000000002", "update-000000003.damaged"]


def test_a_checkpoint_without_its_manifest_is_set_aside_with_a_warning(
    three, folder, warned
):
    (three.saved()[-1] / "manifest.json").unlink()
    assert value(three.restore_newest(small_state())) == 2
    assert "update-000000003" in "".join(message for _, message in warned)
    assert not (folder / "update-000000003").exists()


@DAMAGES
def test_after_damage_the_same_update_can_be_saved_again(three, damage):
    damage(three.saved()[-1] / "manifest.json")
    three.restore_newest(small_state())
    three.save(small_state(3), 3)
    three.wait()
    assert value(three.restore_newest(small_state())) == 3


def test_a_checkpoint_may_be_damaged_a_second_time(three):
    for _ in range(2):
        truncate(newest_file(three))
        assert value(three.restore_newest(small_state())) == 2
        three.save(small_state(3), 3)
        three.wait()
    assert value(three.restore_newest(small_state())) == 3


def test_if_all_checkpoints_are_damaged_every_attempt_is_an_error(three, folder):
    for path in three.saved():
        truncate(next(path.glob("state/**/manifest.ocdbt")))
    for _ in range(2):  # a run must not silently start from the beginning
        with pytest.raises(CheckpointError, match="No checkpoint in") as caught:
            three.restore_newest(small_state())
        assert str(folder) in str(caught.value)


def test_a_folder_left_by_a_crash_is_ignored_and_removed(three, folder):
    leftover = folder / "update-000000004.partial"
    shutil.copytree(folder / "update-000000003", leftover)
    assert updates(three) == [1, 2, 3]
    assert value(three.restore_newest(small_state())) == 3
    assert not leftover.exists()


def test_a_folder_left_by_a_crash_does_not_prevent_the_same_checkpoint(three, folder):
    (folder / "update-000000004.partial" / "state").mkdir(parents=True)
    three.save(small_state(4), 4)
    three.wait()
    assert value(three.restore_newest(small_state())) == 4


def test_intact_checkpoints_of_another_model_are_not_damaged(three):
    other = {"weights": np.ones((4, 5), np.float32), "update": np.int32(0)}
    with pytest.raises(CheckpointError, match="does not fit this model"):
        three.restore_newest(other)
    assert updates(three) == [1, 2, 3]
    assert value(three.restore_newest(small_state())) == 3


# Disk errors


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
    checkpoints.save(small_state(), 1)
    with pytest.raises(CheckpointError, match=r"after update 1 .*Not a directory"):
        checkpoints.close()


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("a full disk is simulated with a small tmpfs; there is no mount here")
    if mounted.returncode:
        reason = mounted.stderr.strip()
        pytest.skip(f"a full disk is simulated with a small tmpfs; no mounting: {reason}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_an_error_that_keeps_the_earlier_checkpoint(small_disk):
    large = np.random.default_rng(0).random(1 << 19)  # 4 MiB, incompressible
    checkpoints = Checkpoints(small_disk / "checkpoints")
    checkpoints.save(small_state(1), 1)
    checkpoints.save({"weights": large}, 2)
    with pytest.raises(
        CheckpointError, match=r"after update 2 could not be written"
    ) as full:
        checkpoints.save(small_state(3), 3)  # raises the error of the previous one
    assert "space" in str(full.value).partition("Earlier")[0].lower()
    assert [path.name for path in checkpoints.saved()] == ["update-000000001"]
    assert list(small_disk.rglob("*.partial")) == []
    assert value(checkpoints.restore_newest(small_state())) == 1
    checkpoints.save(small_state(3), 3)  # there is space for this one
    checkpoints.close()
    assert value(checkpoints.restore_newest(small_state())) == 3


# Leftovers


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_leftover_file_or_link_is_deleted(three, folder, tmp_path, kind):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    if kind == "file":
        (folder / "x.partial").write_text("")
    else:
        (folder / "x.partial").symlink_to(tmp_path / "mine")
    assert value(three.restore_newest(small_state())) == 3
    assert not (folder / "x.partial").is_symlink()
    assert not (folder / "x.partial").exists()
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_kill_during_deletion_leaves_no_half_deleted_checkpoint(folder, monkeypatch):
    """The next start deletes the rest."""
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(small_state(1), 1)
    checkpoints.wait()
    real = os.unlink

    def fail_like_a_kill(path, **where):
        if where and path != "manifest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail_like_a_kill)
        checkpoints.save(small_state(2), 2)
        checkpoints.close()
    names = sorted(path.name.partition(".")[0] for path in folder.iterdir())
    assert names == ["update-000000001", "update-000000002"]
    assert updates(checkpoints) == [2]
    assert [path.name for path in checkpoints_in(folder)] == ["update-000000002"]
    with contextlib.closing(Checkpoints(folder)) as again:
        assert value(again.restore_newest(small_state())) == 2
    assert [path.name for path in folder.iterdir()] == ["update-000000002"]


def test_resuming_does_not_touch_a_checkpoint_that_another_process_is_writing(
    folder, monkeypatch
):
    reached, resumed = threading.Event(), threading.Event()
    write = orbax_files.write_share

    def write_late(folder, arrays):
        reached.set()
        assert resumed.wait(10)
        return write(folder, arrays)

    first, second = Checkpoints(folder), Checkpoints(folder)
    with contextlib.closing(first), contextlib.closing(second):
        first.save(small_state(1), 1)
        first.wait()
        with monkeypatch.context() as patch:
            patch.setattr(orbax_files, "write_share", write_late)
            first.save(small_state(2), 2)
            assert reached.wait(10)
        assert value(second.restore_newest(small_state())) == 1
        second.save(small_state(2), 2)  # the same update, at the same time
        second.wait()
        resumed.set()
        first.wait()
        assert value(second.restore_newest(small_state())) == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "update-000000001",
        "update-000000002",
    ]
