"""Open MPI starts the processes of a run without further options."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from last_checkpoint import assert_same_results
from launched import (
    DIGITS,
    alone,
    assert_same_history,
    assert_same_weights,
    run,
    start,
    summary,
    wait_for,
)

from millrace.distributed.signals import INTERRUPTED

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None,
    reason="mpirun is not installed: apt-get install -y openmpi-bin",
)


def mpirun(count: int) -> list[str]:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *as_root, "--oversubscribe", "-n", str(count)]


def small(directory, *args) -> list[str]:
    own = ("--virtual-devices", "2", "--num-replicas", "4", *args)
    return [*mpirun(2), *alone(directory, *own)]


def test_two_processes_of_mpirun_give_the_weights_of_one(tmp_path, undisturbed):
    output = run(small(tmp_path / "run"))
    assert output.count("process 1 of 2") == 1
    assert_same_weights(tmp_path / "run", undisturbed)
    assert_same_history(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_an_application_under_mpirun_gives_the_weights_of_one_process(
    count, tmp_path, digits
):
    own = ("--virtual-devices", str(4 // count), "--run-dir", str(tmp_path / "run"))
    run([*mpirun(count), *DIGITS, *own])
    assert_same_results(tmp_path / "run", digits)


@pytest.mark.slow
def test_sigterm_to_one_process_saves_a_checkpoint_in_all(tmp_path, undisturbed):
    directory = tmp_path / "run"
    process = start(small(directory, "--delay", "0.1", "--auto-resume"))
    wait_for(directory, 9, process)
    os.kill(pid_of_rank(1, process.pid), signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert summary(directory)["status"] == "interrupted"
    check_continues(directory, undisturbed)


@pytest.mark.slow
def test_a_run_continues_after_mpirun_was_terminated(tmp_path, undisturbed):
    """mpirun kills its processes a second later: too early to save a checkpoint."""
    directory = tmp_path / "run"
    process = start(small(directory, "--delay", "0.1", "--auto-resume"))
    wait_for(directory, 9, process)
    process.terminate()
    process.communicate(timeout=60)
    check_continues(directory, undisturbed)


@pytest.mark.slow
def test_mpirun_ends_the_others_when_a_process_dies(tmp_path, undisturbed):
    directory = tmp_path / "run"
    process = start(small(directory, "--delay", "0.1", "--auto-resume"))
    wait_for(directory, 9, process)
    os.kill(pid_of_rank(1, process.pid), signal.SIGKILL)
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - began < 40, output
    check_continues(directory, undisturbed)


def check_continues(directory, undisturbed):
    assert "Resuming after update" in run(small(directory, "--auto-resume"))
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


def pid_of_rank(rank: int, mpirun_pid: int) -> int:
    """Return the pid of a process that mpirun has started."""
    children = Path(f"/proc/{mpirun_pid}/task/{mpirun_pid}/children").read_text()
    for pid in children.split():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"OMPI_COMM_WORLD_RANK={rank}".encode() in variables:
            return int(pid)
    raise AssertionError(f"no rank {rank} among {children}")
