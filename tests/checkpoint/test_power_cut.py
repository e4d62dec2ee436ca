"""A power cut at any moment, on a real file system: nothing that was finished is lost.

A run trains on a mounted ext4 image. At any moment, the image file has what a disk would
have after a power cut, without what is still in memory. A copy of it is mounted, so that
the file system replays its journal, and the run is resumed.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from killable import assert_same_run, finish, start

from millrace.checkpoint.manifest import verify_files
from millrace.checkpoint.store import checkpoints_in, read_manifest

MOMENTS = 20

# The worst case: nothing reaches the disk on its own during the test, and a rename does
# not write the contents of a file, as ext4 does by default.
OPTIONS = "loop,commit=300,data=writeback,noauto_da_alloc"


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "ext4", "-o", OPTIONS, str(image), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "disk.img"
    path.write_bytes(b"")
    os.truncate(path, 64 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(path)], check=True, capture_output=True)
        with mounted(path, tmp_path / "try"):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error)
        pytest.skip(f"a power cut is simulated with a mounted ext4 image: {reason!r}")
    return path


def copy_at_this_moment(image: Path, copy: Path) -> None:
    """Copy an image that the kernel may be writing to; repeat until it is stable."""
    before, now = b"", image.read_bytes()
    while before != now:
        before, now = now, image.read_bytes()
    copy.write_bytes(now)
    subprocess.run(["fallocate", "--dig-holes", str(copy)], check=True)


def last_finished(noted: Path) -> int:
    return max([0, *map(int, noted.read_text().split())]) if noted.exists() else 0


@pytest.fixture
def cuts(image, tmp_path):
    """Copies of the image, each with the last checkpoint finished by then."""
    noted, copies = tmp_path / "finished", []
    with mounted(image, tmp_path / "disk") as disk:
        process = start(disk / "run", "--delay=0.12", f"--note-finished={noted}")
        while not (disk / "run" / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.01)
        for number in range(MOMENTS):
            time.sleep(random.uniform(0.3, 1.8))
            process.send_signal(signal.SIGSTOP)
            if process.poll() is not None:
                break
            copy = tmp_path / f"cut-{number}.img"
            copy_at_this_moment(image, copy)
            copies.append((copy, last_finished(noted)))
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()
    return copies


@pytest.mark.slow
def test_a_run_resumes_from_its_last_finished_checkpoint_after_a_power_cut(cuts, tmp_path):
    finish(start(tmp_path / "uninterrupted"))
    assert len(cuts) == MOMENTS
    assert len({finished for _, finished in cuts}) > MOMENTS // 4
    for copy, finished in cuts:
        with mounted(copy, tmp_path / "after") as disk:
            run = disk / "run"
            found = checkpoints_in(run / "checkpoints")
            for path in found:
                verify_files(path, read_manifest(path))
            newest = int(found[-1].name.removeprefix("update-")) if found else 0
            assert newest >= finished
            resumed = start(run, "--resume")
            _, errors = resumed.communicate(timeout=120)
            assert resumed.returncode == 0, errors
            assert errors == ""  # nothing damaged, no log event missing
            assert_same_run(run, tmp_path / "uninterrupted")
            shutil.rmtree(run)
