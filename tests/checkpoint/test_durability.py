"""After a power cut, finished checkpoints and their metrics are complete."""

import dataclasses
import errno
import functools
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from power_cut import Disk
from several_processes import as_processes
from small_checkpoints import small_state
from small_runner import batches, make_runner

from millrace.checkpoint.manifest import verify_files
from millrace.checkpoint.store import (
    CheckpointError,
    Checkpoints,
    checkpoints_in,
    read_manifest,
    restore,
    write_checkpoint,
)
from millrace.durable import write_atomically
from millrace.report.run_page import write_report
from millrace.run.directory import RunDirectory, open_run_directory
from millrace.run.provenance import write_phases


def three_arrays(number: float) -> dict:
    return small_state(number) | {"bias": np.full(3, number, np.float32)}


def newest_intact(folder: Path) -> int:
    """Return the newest checkpoint in a folder; none may be damaged."""
    found = checkpoints_in(folder)
    for path in found:
        verify_files(path, read_manifest(path))
    return int(found[-1].name.removeprefix("update-")) if found else 0


def newest_at_every_moment(disk: Disk, folder: Path, tmp_path: Path) -> list[int]:
    found = []
    for number, moment in enumerate(disk.moments):
        left = disk.restore(moment, tmp_path / f"left-{number}")
        found.append(newest_intact(left / folder))
        assert found[-1] >= moment.note
    return found


def test_a_power_cut_while_saving_or_deleting_keeps_what_was_finished(tmp_path):
    finished = [0]
    folder = Path("run/deeper/checkpoints")
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk", lambda: finished[-1])
    with disk.watching():
        checkpoints = Checkpoints(tmp_path / "disk" / folder, keep=1)
        for update in (1, 2, 3):
            checkpoints.save(small_state(update), update)
            checkpoints.wait()
            finished.append(update)
        checkpoints.close()
    found = newest_at_every_moment(disk, folder, tmp_path)
    assert found == sorted(found)
    assert {0, 1, 2, 3} == set(found)
    assert restore(tmp_path / "disk" / folder / "update-000000003", small_state())


def test_files_of_several_processes_are_on_disk_before_the_rename(tmp_path):
    finished = [0]
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk", lambda: finished[-1])
    with disk.watching():
        for update in (1, 2):
            path = tmp_path / "disk" / f"update-{update:09d}"
            write = functools.partial(
                write_checkpoint, path, three_arrays(update), update, {}
            )
            as_processes(3, lambda _, write=write: write())
            finished.append(update)
        write_atomically(tmp_path / "disk" / "end", "")
    found = newest_at_every_moment(disk, Path(), tmp_path)
    assert {0, 1, 2} == set(found)
    folders = {Path(name).parts[1] for name in read_manifest(path)["files"]}
    assert {f"ocdbt.process_{process}" for process in range(3)} < folders


def test_metrics_are_on_disk_before_the_checkpoint_that_counts_them(tmp_path):
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    with disk.watching():
        runner, state, _, checkpoints = make_runner(
            tmp_path / "disk", batches(range(12)), checkpoint=4
        )
        runner.run(state)
        checkpoints.close()
    counted = []
    for number, moment in enumerate(disk.moments):
        left = disk.restore(moment, tmp_path / f"left-{number}")
        events = RunDirectory(left).read_metrics()
        for path in checkpoints_in(left / "checkpoints"):
            manifest = read_manifest(path)
            before = [e for e in events if e["update"] <= manifest["update"]]
            assert len(before) == manifest["num_events"]
            counted.append(manifest["num_events"])
    assert {1, 2, 3, 4} == set(counted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    learning_rate: float = 1e-5


def started(path: Path) -> RunDirectory:
    return open_run_directory(path, Options(), command="cnn-train", resume=False)


def metrics_with_a_checkpoint(directory: RunDirectory) -> None:
    directory.append_metrics({"update": 1})
    directory.sync_metrics()


def metrics_of_a_resumed_run(directory: RunDirectory) -> None:
    directory.append_metrics({"update": 1})
    directory.truncate_metrics(1)


def summary_removed_by_a_resumed_run(directory: RunDirectory) -> None:
    directory.write_summary({"status": "completed"})
    directory.pop_summary()


@pytest.mark.parametrize(
    "write",
    [
        lambda directory: None,
        lambda directory: directory.write_summary({"status": "completed"}),
        lambda directory: write_report(directory.path),
        lambda directory: write_phases(directory.path, [("a", 0, 1)], resumed=False),
        metrics_with_a_checkpoint,
        metrics_of_a_resumed_run,
        summary_removed_by_a_resumed_run,
    ],
)
def test_the_contents_of_a_run_directory_are_on_disk(write, tmp_path):
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk", deletes_late=True)
    with disk.watching():
        directory = started(tmp_path / "disk" / "deep" / "inside")
        write(directory)
    left = disk.restore(disk.moments[-1], tmp_path / "left") / "deep" / "inside"
    assert contents(left) == contents(directory.path)
    assert "config.yml" in contents(left)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# A disk that reports errors


def failing(real, calls, number):
    def fsync(descriptor):
        if next(calls) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor)

    return fsync


def test_an_error_at_any_sync_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(small_state(1), 1)
    checkpoints.wait()
    errors = []
    for number in itertools.count():
        calls = itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing(os.fsync, calls, number))
            checkpoints.save(small_state(2), number + 2)
            try:
                checkpoints.wait()
            except CheckpointError as error:
                errors.append(str(error))
                assert newest_intact(tmp_path) >= 1
                assert (tmp_path / "update-000000001").is_dir()
                assert list(tmp_path.glob("*.partial")) == []
            else:
                break
    # Here the sync during the deletion of an old checkpoint failed, which ends no run.
    assert next(calls) > number
    assert newest_intact(tmp_path) == number + 2
    assert len(errors) > 10
    for update, message in enumerate(errors, 2):
        assert f"after update {update} could not be written" in message
        assert "Input/output error. Earlier ones are intact" in message
    checkpoints.close()
