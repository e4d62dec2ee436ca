"""A manifest that was changed or is malformed counts as damage."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_checkpoints import (
    small_state,
    updates,
    value,
)

from millrace.checkpoint import arrays
from millrace.checkpoint import manifest as checkpoint_manifest
from millrace.checkpoint.store import (
    CheckpointError,
    Checkpoints,
    read_manifest,
)


def test_a_changed_data_position_is_detected(three, warned):
    manifest = three.saved()[-1] / "manifest.json"
    text = manifest.read_text()
    assert '"data_position": 30' in text
    manifest.write_text(text.replace('"data_position": 30', '"data_position": 38'))
    restored = three.restore_newest(small_state())
    assert restored.manifest["data_position"] == 20
    assert warned


def test_checkpoints_of_a_later_version_are_refused_and_kept(three):
    for path in three.saved():
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        read_manifest(three.saved()[0])
    with pytest.raises(CheckpointError):
        three.restore_newest(small_state())
    assert updates(three) == [1, 2, 3]


# Malformed checkpoints


def change_manifest(folder: Path, change) -> None:
    """Change a manifest and correct its checksum."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("checksum")
    changed = change(manifest)
    if isinstance(changed, dict):
        changed["checksum"] = checkpoint_manifest.manifest_checksum(changed)
    (folder / "manifest.json").write_text(json.dumps(changed))


def without(name):
    return lambda folder: change_manifest(
        folder, lambda manifest: {n: v for n, v in manifest.items() if n != name}
    )


def with_entries(**entries):
    return lambda folder: change_manifest(folder, lambda manifest: manifest | entries)


def replaced_by(value):
    return lambda folder: change_manifest(folder, lambda manifest: value)


def relist_files(folder: Path) -> None:
    """Update the list of files in the manifest."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found = arrays._inventory(folder, files)
    found.pop("manifest.json")
    change_manifest(folder, lambda manifest: manifest | {"files": found})


def with_arrays_of(state):
    def change(folder: Path) -> None:
        shutil.rmtree(folder / "state")
        arrays.prepare_arrays(folder, state)
        arrays.write_arrays(folder, state)
        arrays.merge_arrays(folder, state)
        relist_files(folder)

    return change


def with_file(**arrays):
    def change(folder: Path) -> None:
        shutil.rmtree(folder / "state")
        (folder / "state").mkdir()
        np.savez(folder / "state" / "00000.npz", **arrays)
        relist_files(folder)

    return change


def without_database(folder: Path) -> None:
    (folder / "state" / "manifest.ocdbt").unlink()
    relist_files(folder)


def garbage_file(folder: Path) -> None:
    shutil.rmtree(folder / "state")
    (folder / "state").mkdir()
    (folder / "state" / "00000.npz").write_bytes(b"PK\x03\x04 no zip file")
    relist_files(folder)


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


MALFORMED = {
    **{repr(value): replaced_by(value) for value in ([], None, {}, 5, "text", [{}])},
    **{f"without {x}": without(x) for x in ("format", "update", "arrays", "files")},
    **{
        f"{name} {value!r}": with_entries(**{name: value})
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
    "update 7": with_entries(update=7),
    "other shape": with_arrays_of(small_state() | {"weights": np.ones((4, 4), np.float32)}),
    "smaller": with_arrays_of(small_state() | {"weights": np.ones((2, 3), np.float32)}),
    "other type": with_arrays_of(small_state() | {"weights": np.ones((4, 3), np.int32)}),
    "fewer": with_arrays_of({"update": np.int32(1)}),
    "without a database": without_database,
    "empty part": with_file(),
    "part without an array": with_file(**{"1": np.zeros(48, np.uint8)}),
    "short part": with_file(**{"0": np.zeros(4, np.uint8), "1": np.zeros(47, np.uint8)}),
    "part of objects": with_file(**{"0": np.array([{}]), "1": np.array([{}])}),
    "garbage part": garbage_file,
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


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_checkpoint_is_set_aside_with_one_line(
    change, three_saved, folder, warned
):
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
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_checkpoint_is_ever_executed(three, tmp_path):
    harmful = np.array([Harmful(tmp_path / "harm")], dtype=object)
    with_file(**{"0": harmful, "1": harmful})(three.saved()[-1])
    assert value(three.restore_newest(small_state())) == 2
    assert not (tmp_path / "harm").exists()
