"""A power cut at any moment, on a real file system: nothing that was finished is lost.

An ext4 image is mounted, and a run trains in it. What the image file holds at some moment
is what a disk would hold had the power failed then: not what is in the system's memory. A
copy is mounted, which has the file system go through its journal, and the run resumed.
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

# As late as it can be: nothing reaches the disk by itself within the test, and renaming
# does not write the contents of a file, as ext4 otherwise does out of kindness.
OPTIONS = "loop,commit=300,data=writeback,noauto_da_alloc"


@contextmanager
def mounted(image: Path, place: Path) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "ext4", "-o", OPTIONS, str(image), str(place)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


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
    """Copy an image which the kernel may be writing to: until nothing changes."""
    before, now = b"", image.read_bytes()
    while before != now:
        before, now = now, image.read_bytes()
    copy.write_bytes(now)
    subprocess.run(["fallocate", "--dig-holes", str(copy)], check=True)


def last_finished(noted: Path) -> int:
    return max([0, *map(int, noted.read_text().split())]) if noted.exists() else 0


@pytest.fixture
def cuts(image, tmp_path):
    """Copies of the image, each with the last checkpoint that was finished by then."""
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
def test_after_a_power_cut_a_run_resumes_from_what_it_had_finished(cuts, tmp_path):
    finish(start(tmp_path / "undisturbed"))
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
            _, said = resumed.communicate(timeout=120)
            assert resumed.returncode == 0, said
            assert said == ""  # nothing damaged, no log event missing
            assert_same_run(run, tmp_path / "undisturbed")
            shutil.rmtree(run)
