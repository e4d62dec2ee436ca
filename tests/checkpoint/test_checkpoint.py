"""A checkpoint is complete or not there at all, and never taken for good when damaged."""

import contextlib
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from several_processes import as_processes

from millrace.checkpoint import arrays
from millrace.checkpoint import folder as checkpoint_folder
from millrace.checkpoint import manifest as checkpoint_manifest
from millrace.checkpoint.arrays import own_leaves
from millrace.checkpoint.store import (
    CheckpointError,
    Checkpoints,
    checkpoints_in,
    read_manifest,
    restore,
    restore_part,
    write_checkpoint,
)
from millrace.program.mixed_precision import init_loss_scale
from millrace.program.step import TrainState


def small_state(number: float = 1.0) -> dict:
    return {"weights": np.full((4, 3), number, np.float32), "update": np.int32(number)}


def value(restored) -> float:
    return float(restored.state["weights"][0, 0])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(folder):
    opened = Checkpoints(folder)
    yield opened
    opened.close()


@pytest.fixture
def three(checkpoints):
    """Checkpoints after updates 1, 2 and 3, whose weights are 1, 2 and 3."""
    for update in (1, 2, 3):
        checkpoints.save(small_state(update), update, data_position=10 * update)
    checkpoints.wait()
    return checkpoints


@pytest.fixture
def warned():
    """The warnings of the package; not by caplog, which a Console would disconnect."""
    messages = []

    class Collect(logging.Handler):
        def emit(self, record):
            messages.append((record.levelname, record.getMessage()))

    handler, logger = Collect(logging.WARNING), logging.getLogger("millrace")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def newest_file(checkpoints: Checkpoints) -> Path:
    """The largest file of the newest checkpoint's state: it holds an array."""
    files = (path for path in checkpoints.saved()[-1].glob("state/**/*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x01
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = pytest.mark.parametrize("damage", [truncate, Path.unlink, flip_a_byte])


# Writing and reading back


def test_a_training_state_comes_back_bit_for_bit_in_its_own_structure(checkpoints):
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


def test_values_that_are_no_numbers_survive(checkpoints):
    state = {"x": np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)}
    checkpoints.save(state, 1)
    checkpoints.wait()
    assert restore(checkpoints.saved()[0], state).state["x"].tobytes() == (
        state["x"].tobytes()
    )


def test_a_state_spread_over_devices_is_saved_once_and_whole(checkpoints):
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


def test_facts_are_kept_beside_the_state(checkpoints):
    metrics = {"train_loss": 0.25, "validation_accuracy": 0.5}
    checkpoints.save(small_state(), 12, data_position=96, time=1.5, metrics=metrics)
    checkpoints.wait()
    manifest = checkpoints.restore_newest(small_state()).manifest
    assert manifest["update"] == 12
    assert manifest["data_position"] == 96
    assert manifest["time"] == 1.5
    assert manifest["metrics"] == metrics
    assert manifest["versions"]["jax"] == jax.__version__


def test_there_may_be_no_checkpoint_yet(checkpoints, folder):
    assert checkpoints.restore_newest(small_state()) is None
    folder.mkdir()
    assert checkpoints.restore_newest(small_state()) is None
    assert checkpoints.saved() == []


def test_the_newest_is_restored_by_number_not_by_time(checkpoints):
    for update in (9, 100, 20):
        checkpoints.save(small_state(update), update)
    checkpoints.wait()
    assert value(checkpoints.restore_newest(small_state())) == 100


def test_the_state_may_be_donated_or_changed_as_soon_as_save_returns(
    checkpoints, monkeypatch
):
    changed = threading.Event()
    write = arrays.orbax_save

    def write_late(path, state):
        assert changed.wait(10)
        write(path, state)

    monkeypatch.setattr(arrays, "orbax_save", write_late)
    on_host, on_device = np.ones(3, np.float32), jnp.ones(3)
    checkpoints.save({"a": on_host, "b": on_device}, 1)
    on_host[:] = -1
    on_device.delete()
    changed.set()
    checkpoints.wait()
    found = checkpoints.restore_newest({"a": on_host, "b": on_host}).state
    assert found["a"].tolist() == found["b"].tolist() == [1, 1, 1]


def test_closing_finishes_the_checkpoint_under_way(folder):
    checkpoints = Checkpoints(folder)
    checkpoints.save(small_state(), 1)
    checkpoints.close()
    assert [path.name for path in folder.iterdir()] == ["update-000000001"]


def test_saving_the_same_update_twice_keeps_the_first(three):
    three.save(small_state(3), 3, data_position=-1)
    three.wait()
    assert three.restore_newest(small_state()).manifest["data_position"] == 30


# Which are kept


def updates(checkpoints: Checkpoints) -> list[int]:
    return [int(path.name.removeprefix("update-")) for path in checkpoints.saved()]


def test_only_the_newest_are_kept(folder):
    checkpoints = Checkpoints(folder, keep=2)
    for update in range(1, 6):
        checkpoints.save(small_state(update), update)
    checkpoints.close()
    assert updates(checkpoints) == [4, 5]
    assert len(list(folder.iterdir())) == 2


def keep_smallest_loss(folder: Path, losses: list[float]) -> Checkpoints:
    checkpoints = Checkpoints(
        folder, keep=1, better=lambda new, old: new["loss"] < old["loss"]
    )
    for update, loss in enumerate(losses, 1):
        checkpoints.save(small_state(update), update, scores={"loss": loss})
    checkpoints.close()
    return checkpoints


def test_the_best_is_kept_besides_the_newest(folder):
    checkpoints = keep_smallest_loss(folder, [0.5, 0.1, 0.3, 0.2])
    assert updates(checkpoints) == [2, 4]
    assert checkpoints.best() == folder / "update-000000002"


def test_a_best_that_is_beaten_goes(folder):
    checkpoints = keep_smallest_loss(folder, [0.5, 0.1, 0.3, 0.05, 0.2])
    assert updates(checkpoints) == [4, 5]


def test_without_a_measure_there_is_no_best(three):
    assert three.best() is None


@pytest.mark.parametrize("losses", [[np.nan, 0.1, 0.2, 0.3], [0.1, np.nan, 0.2, np.nan]])
def test_a_metric_that_is_not_a_number_is_never_the_best_and_stops_nothing(folder, losses):
    checkpoints = keep_smallest_loss(folder, losses)
    assert updates(checkpoints) == [losses.index(0.1) + 1, 4]


def test_a_damaged_older_checkpoint_does_not_stop_new_ones(folder):
    checkpoints = keep_smallest_loss(folder, [0.5, 0.6])
    truncate(folder / "update-000000001" / "manifest.json")
    again = Checkpoints(folder, keep=1, better=lambda new, old: new["loss"] < old["loss"])
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


@DAMAGES
def test_damage_to_any_file_of_a_checkpoint_is_noticed(three, tmp_path, damage):
    whole = three.saved()[-1]
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert Path("manifest.json") in files
    for number, name in enumerate(files):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(whole, copy)
        damage(copy / name)
        with pytest.raises(CheckpointError, match=f"copy{number} is"):
            restore(copy, small_state())


def test_a_changed_data_position_is_noticed(three, warned):
    manifest = three.saved()[-1] / "manifest.json"
    text = manifest.read_text()
    assert '"data_position": 30' in text
    manifest.write_text(text.replace('"data_position": 30', '"data_position": 38'))
    restored = three.restore_newest(small_state())
    assert restored.manifest["data_position"] == 20
    assert warned


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


def test_when_all_are_damaged_that_is_an_error_now_and_at_the_next_try(three, folder):
    for path in three.saved():
        truncate(next(path.glob("state/**/manifest.ocdbt")))
    for _ in range(2):  # a run must not quietly start again from nothing
        with pytest.raises(CheckpointError, match="No checkpoint in") as caught:
            three.restore_newest(small_state())
        assert str(folder) in str(caught.value)


def test_a_folder_left_by_a_crash_is_ignored_and_removed(three, folder):
    leftover = folder / "update-000000004.partial"
    shutil.copytree(folder / "update-000000003", leftover)
    assert updates(three) == [1, 2, 3]
    assert value(three.restore_newest(small_state())) == 3
    assert not leftover.exists()


def test_a_folder_left_by_a_crash_does_not_hinder_the_same_checkpoint(three, folder):
    (folder / "update-000000004.partial" / "state").mkdir(parents=True)
    three.save(small_state(4), 4)
    three.wait()
    assert value(three.restore_newest(small_state())) == 4


# Checkpoints of something else


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
def test_a_checkpoint_of_another_model_is_refused_saying_what_differs(three, other, hint):
    with pytest.raises(
        CheckpointError, match=rf"does not fit this model.*{hint}"
    ) as caught:
        restore(three.saved()[-1], other)
    assert "\n" not in str(caught.value)


def test_good_checkpoints_of_another_model_are_not_called_damaged(three):
    other = {"weights": np.ones((4, 5), np.float32), "update": np.int32(0)}
    with pytest.raises(CheckpointError, match="does not fit this model"):
        three.restore_newest(other)
    assert updates(three) == [1, 2, 3]
    assert value(three.restore_newest(small_state())) == 3


def test_checkpoints_of_a_later_version_are_refused_and_left_as_they_are(three):
    for path in three.saved():
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        read_manifest(three.saved()[0])
    with pytest.raises(CheckpointError):
        three.restore_newest(small_state())
    assert updates(three) == [1, 2, 3]


# A disk that does not take it


def test_a_place_that_cannot_be_written_to_is_reported(tmp_path):
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


def test_a_full_disk_is_an_error_that_leaves_the_earlier_checkpoint_whole(small_disk):
    large = np.random.default_rng(0).random(1 << 19)  # 4 MiB that do not compress
    checkpoints = Checkpoints(small_disk / "checkpoints")
    checkpoints.save(small_state(1), 1)
    checkpoints.save({"weights": large}, 2)
    with pytest.raises(
        CheckpointError, match=r"after update 2 could not be written"
    ) as full:
        checkpoints.save(small_state(3), 3)  # says what became of the one before
    assert "space" in str(full.value).partition("Earlier")[0].lower()
    assert [path.name for path in checkpoints.saved()] == ["update-000000001"]
    assert list(small_disk.rglob("*.partial")) == []
    assert value(checkpoints.restore_newest(small_state())) == 1
    checkpoints.save(small_state(3), 3)  # there is space for this one
    checkpoints.close()
    assert value(checkpoints.restore_newest(small_state())) == 3


def test_a_write_that_fails_is_said_in_a_line(tmp_path):
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


def test_only_what_a_failed_write_leaves_behind_is_not_printed():
    printed = []
    for text in ("Event loop is closed", "of a library's own"):
        error = SimpleNamespace(exc_value=RuntimeError(text))
        arrays._unless_late(printed.append, error)
    assert [str(error.exc_value) for error in printed] == ["of a library's own"]


# Every kind of array


def every_kind() -> dict:
    return {
        **{f"{name} key": jax.random.key(3, impl=name) for name in ("threefry2x32", "rbg")},
        "keys": jax.random.split(jax.random.key(4), (2, 3)),
        "no keys": jax.random.split(jax.random.key(4), 0),
        "nothing": np.zeros((3, 0), np.float32),
        "no truth": np.zeros((0,), bool),
        "truth": np.array([True, False]),
        "scalar": np.float64(0.1),
        **{
            name: np.arange(6).reshape(2, 3).astype(jnp.dtype(name))
            for name in (
                *("int8", "uint16", "int4", "uint4", "bfloat16", "complex64"),
                *("float8_e4m3fn", "float8_e5m2", "float8_e4m3"),
            )
        },
    }


def exactly(leaf) -> tuple:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    raw = jax.random.key_data(leaf) if is_key else leaf
    return str(leaf.dtype), leaf.shape, np.asarray(raw).tobytes()


class Fields(NamedTuple):
    params: dict
    other: dict


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_kind_of_array_comes_back_exactly(num_processes, folder):
    kinds = every_kind()
    state = Fields(kinds, {"x": np.ones(3)})
    path = folder / "update-000000001"
    as_processes(num_processes, lambda _: write_checkpoint(path, state, 1, {}))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kinds)
    for found in (
        restore(path, state).state.params,
        restore_part(path, Params(kinds)).state.params,
        restore_part(path, Params(shapes)).state.params,
    ):
        assert {name: exactly(leaf) for name, leaf in found.items()} == {
            name: exactly(leaf) for name, leaf in kinds.items()
        }


class Params(NamedTuple):
    params: dict


def test_random_keys_of_another_kind_do_not_fit(checkpoints):
    checkpoints.save({"key": jax.random.key(0)}, 1)
    checkpoints.wait()
    with pytest.raises(CheckpointError, match=r"key<fry>\[\], this model has key<rbg>"):
        checkpoints.restore_newest({"key": jax.random.key(0, impl="rbg")})


def test_a_random_key_may_be_donated_as_soon_as_save_returns(checkpoints):
    key = jax.random.key(5)
    expected = exactly(key)
    checkpoints.save({"key": key}, 1)
    key.delete()
    checkpoints.wait()
    like = {"key": jax.random.key(0)}
    assert exactly(checkpoints.restore_newest(like).state["key"]) == expected


# Which process writes what


def test_processes_share_the_arrays_evenly_and_write_each_once():
    sizes = [6, 5, 4, 3, 2, 0]
    state = {str(n): np.zeros(size, np.float32) for n, size in enumerate(sizes)}
    shares = as_processes(3, lambda _: own_leaves(state))
    assert sorted(place for share in shares for place in share) == [0, 1, 2, 3, 4, 5]
    assert sorted(sum(sizes[place] for place in share) for share in shares) == [6, 7, 7]


# Hand-made odd ones


def sign(folder: Path, change) -> None:
    """Change a manifest, with a checksum that is right again."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("checksum")
    changed = change(manifest)
    if isinstance(changed, dict):
        changed["checksum"] = checkpoint_manifest._checksum_of(changed)
    (folder / "manifest.json").write_text(json.dumps(changed))


def without(name):
    return lambda folder: sign(
        folder, lambda manifest: {n: v for n, v in manifest.items() if n != name}
    )


def having(**entries):
    return lambda folder: sign(folder, lambda manifest: manifest | entries)


def being(value):
    return lambda folder: sign(folder, lambda manifest: value)


def relisted(folder: Path) -> None:
    """List the files as they are now."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found = arrays._inventory(folder, files)
    found.pop("manifest.json")
    sign(folder, lambda manifest: manifest | {"files": found})


def with_arrays_of(state):
    def change(folder: Path) -> None:
        shutil.rmtree(folder / "state")
        arrays.orbax_save(folder / "state", state)
        relisted(folder)

    return change


def with_parts(**arrays):
    def change(folder: Path) -> None:
        shutil.rmtree(folder / "state")
        (folder / "state").mkdir()
        np.savez(folder / "state" / "00000.npz", **arrays)
        relisted(folder)

    return change


def garbage_parts(folder: Path) -> None:
    shutil.rmtree(folder / "state")
    (folder / "state").mkdir()
    (folder / "state" / "00000.npz").write_bytes(b"PK\x03\x04 no zip file")
    relisted(folder)


def manifest_of_bytes(content: bytes):
    return lambda folder: (folder / "manifest.json").write_bytes(content)


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def a_link_to_nowhere(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


def a_manifest_folder(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def a_copy_of_another(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("update-000000001"), folder)


ODD = {
    **{repr(value): being(value) for value in ([], None, {}, 5, "text", [{}])},
    **{f"without {x}": without(x) for x in ("format", "update", "arrays", "files")},
    **{
        f"{name} {value!r}": having(**{name: value})
        for name, value in (
            *(("format", x) for x in ("1", None, 0, 1.5, [])),
            *(("update", x) for x in ("3", None, -3, 3.5, [], 10**30)),
            *(("arrays", x) for x in ([], None, "x", {"['weights']": 5})),
            *(("files", x) for x in ([], None, {}, {"state/d": 3}, {"state/d": [1]})),
            ("files", {"../update-000000001/manifest.json": [1, ""]}),
            ("files", {"/etc/passwd": [1, ""]}),
            ("files", {"state/d": ["1", 1]}),
            ("scores", []),
        )
    },
    "update 7": having(update=7),
    "other shape": with_arrays_of(small_state() | {"weights": np.ones((4, 4), np.float32)}),
    "smaller": with_arrays_of(small_state() | {"weights": np.ones((2, 3), np.float32)}),
    "other type": with_arrays_of(small_state() | {"weights": np.ones((4, 3), np.int32)}),
    "fewer": with_arrays_of({"update": np.int32(1)}),
    "empty part": with_parts(),
    "part without an array": with_parts(**{"1": np.zeros(48, np.uint8)}),
    "short part": with_parts(**{"0": np.zeros(4, np.uint8), "1": np.zeros(47, np.uint8)}),
    "part of objects": with_parts(**{"0": np.array([{}]), "1": np.array([{}])}),
    "garbage part": garbage_parts,
    "not text": manifest_of_bytes(b"\xff\xfe"),
    "deep": manifest_of_bytes(b"[" * 100_000),
    "long number": manifest_of_bytes(b"1" * 10_000),
    **{
        change.__name__: change
        for change in (a_file, a_link_to_nowhere, a_manifest_folder, a_copy_of_another)
    },
}


@pytest.fixture(scope="module")
def three_saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three") / "checkpoints"
    checkpoints = Checkpoints(folder)
    for update in (1, 2, 3):
        checkpoints.save(small_state(update), update)
    checkpoints.close()
    return folder


@pytest.mark.parametrize("change", ODD.values(), ids=ODD.keys())
def test_an_odd_checkpoint_is_set_aside_in_a_line(change, three_saved, folder, warned):
    shutil.copytree(three_saved, folder)
    change(folder / "update-000000003")
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        assert value(checkpoints.restore_newest(small_state())) == 2
    ((level, message),) = warned
    assert level == "WARNING"
    assert "update-000000003" in message
    assert "It is set aside for an older one." in message
    assert "\n" not in message
    assert len(message) < 600


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_checkpoint_is_ever_run(three, tmp_path):
    harmful = np.array([Harmful(tmp_path / "harm")], dtype=object)
    with_parts(**{"0": harmful, "1": harmful})(three.saved()[-1])
    assert value(three.restore_newest(small_state())) == 2
    assert not (tmp_path / "harm").exists()


def test_only_what_the_manifest_lists_is_read(three):
    newest = three.saved()[-1]
    stray = {"0": np.full(4, 9, np.uint8), "1": np.full(48, 9, np.uint8)}
    np.savez(newest / "state" / "00000.npz", **stray)
    assert value(three.restore_newest(small_state())) == 3
    like = Params(small_state()["weights"])
    with pytest.raises(CheckpointError, match="does not fit"):
        restore_part(newest, like)


def test_a_stray_part_of_another_process_is_not_read(folder):
    path = folder / "update-000000001"
    as_processes(2, lambda _: write_checkpoint(path, small_state(), 1, {}))
    stray = {"0": np.full(4, 9, np.uint8), "1": np.full(48, 9, np.uint8)}
    np.savez(path / "state" / "00002.npz", **stray)
    assert value(restore(path, small_state())) == 1


def test_what_cannot_be_read_at_the_moment_is_not_called_damaged(three, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(checkpoint_manifest, "checksum", denied)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Permission denied"):
        three.restore_newest(small_state())
    monkeypatch.undo()
    assert value(three.restore_newest(small_state())) == 3


def test_a_checkpoint_is_not_called_damaged_for_want_of_memory(three, monkeypatch):
    def too_much(*_):
        raise MemoryError

    monkeypatch.setattr(checkpoint_folder, "read_arrays", too_much)
    with pytest.raises(MemoryError):
        three.restore_newest(small_state())
    assert updates(three) == [1, 2, 3]


# Leftovers


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_leftover_that_is_no_folder_is_in_nobodys_way(three, folder, tmp_path, kind):
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


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_no_half_of_it(
    folder, monkeypatch
):
    """At whatever file it is killed, the rest is gone after the next start."""
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(small_state(1), 1)
    checkpoints.wait()
    real = os.unlink

    def killed(path, **where):
        if where and path != "manifest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        checkpoints.save(small_state(2), 2)
        checkpoints.close()
    names = sorted(path.name.partition(".")[0] for path in folder.iterdir())
    assert names == ["update-000000001", "update-000000002"]
    assert updates(checkpoints) == [2]
    assert [path.name for path in checkpoints_in(folder)] == ["update-000000002"]
    with contextlib.closing(Checkpoints(folder)) as again:
        assert value(again.restore_newest(small_state())) == 2
    assert [path.name for path in folder.iterdir()] == ["update-000000002"]


def test_who_resumes_leaves_alone_what_another_is_writing(folder, monkeypatch):
    reached, resumed = threading.Event(), threading.Event()
    write = arrays.orbax_save

    def write_late(path, state):
        reached.set()
        assert resumed.wait(10)
        write(path, state)

    first, second = Checkpoints(folder), Checkpoints(folder)
    with contextlib.closing(first), contextlib.closing(second):
        first.save(small_state(1), 1)
        first.wait()
        with monkeypatch.context() as patch:
            patch.setattr(arrays, "orbax_save", write_late)
            first.save(small_state(2), 2)
            assert reached.wait(10)
        assert value(second.restore_newest(small_state())) == 1
        second.save(small_state(2), 2)  # the same one, meanwhile
        second.wait()
        resumed.set()
        first.wait()
        assert value(second.restore_newest(small_state())) == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "update-000000001",
        "update-000000002",
    ]


class FormerState(NamedTuple):
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
def test_a_checkpoint_of_format_1_has_former_field_names_and_can_be_read(
    tmp_path, monkeypatch, processes, joined
):
    former, current = FormerState(*VALUES), CurrentState(*VALUES)
    if joined:
        former, current = (JoinedState(np.int32(3), (x, x)) for x in (former, current))
    path = tmp_path / "update-000000003"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_manifest, "_FORMAT", 1)
        as_processes(processes, lambda _: write_checkpoint(path, former, 3, {}))
    restored = restore(path, current).state
    assert jax.tree.structure(restored) == jax.tree.structure(current)
    jax.tree.map(np.testing.assert_array_equal, restored, current)
    if not joined:
        part = restore_part(path, Weights(current.params, current.model_state)).state
        jax.tree.map(np.testing.assert_array_equal, part, Weights(*VALUES[1:3]))
