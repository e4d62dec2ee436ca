"""A process that dies, hangs or fails is named; the others stop; nothing is lost."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from launched import (
    assert_same_history,
    assert_same_weights,
    children_of,
    finish,
    launched,
    pid_of,
    run,
    start,
    summary,
    wait_for,
)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


SLOWLY = ("--delay", "0.05")


def test_a_killed_worker_is_named_and_a_restart_ends_with_the_same_weights(
    tmp_path, undisturbed
):
    directory = tmp_path / "run"
    process = start(launched(directory, 2, *SLOWLY, options=("--max-restarts", "1")))
    wait_for(directory, 12, process)
    killed = pid_of(1, process)
    os.kill(killed, signal.SIGKILL)
    said = finish(process)
    line = f"instance 1 (pid {killed}) was killed by SIGKILL; stopping the others"
    assert said.count("was killed by SIGKILL") == 1 and line in said
    assert "starting again (1 of 1 restarts)" in said
    assert "Resuming after update" in said
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


def test_an_error_in_one_process_ends_all_of_them_with_its_line(tmp_path):
    directory = tmp_path / "run"
    began = time.monotonic()
    said = run(launched(directory, 2, *SLOWLY, "--fail-in", "1"), status=1)
    assert time.monotonic() - began < 60
    assert "OSError: The disk of process 1 is broken." in said
    found = summary(directory)
    assert found["status"] == "failed"
    assert "Instance 1" in found["error"] and "broken" in found["error"]
    assert found["updates"] > 0
    assert not list((directory / "checkpoints").glob("*.partial"))


def test_a_command_that_is_wrong_is_wrong_once(tmp_path):
    said = run(launched(tmp_path / "run", 2, "--micro-batch-size", "0"), status=2)
    assert said.count("micro_batch_size must be at least 1") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(10))
def test_killed_at_any_moment_nothing_is_lost(tmp_path, undisturbed, attempt):
    chance = random.Random(attempt)
    directory = tmp_path / "run"
    instances = chance.choice([2, 2, 4])
    process = start(
        launched(directory, instances, *SLOWLY, options=("--max-restarts", "2"))
    )
    wait_for(directory, 1, process)
    time.sleep(chance.uniform(0, 2))
    victim = chance.randrange(instances)
    os.kill(pid_of(victim, process), signal.SIGKILL)
    said = finish(process)
    assert f"instance {victim} (pid" in said
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_noticed_within_a_minute(tmp_path, victim):
    directory = tmp_path / "run"
    process = start(launched(directory, 2, *SLOWLY))
    wait_for(directory, 8, process)
    stopped = pid_of(victim, process)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    said = finish(process, 1)
    assert time.monotonic() - began < 60
    assert f"Instance {victim} (pid {stopped}" in said
    assert "has given no sign of life for 30 s." in said
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)  # it is not left behind
    if victim != 0:
        assert f"Instance {victim}" in summary(directory)["error"]
    run(launched(directory, 2, "--resume"))


@pytest.mark.slow
def test_without_the_first_process_the_others_stop_as_well(tmp_path):
    directory = tmp_path / "run"
    process = start(launched(directory, 4, *SLOWLY))
    wait_for(directory, 8, process)
    os.kill(pid_of(0, process), signal.SIGKILL)
    began = time.monotonic()
    said = finish(process, 1)
    assert time.monotonic() - began < 30
    assert said.count("was killed by SIGKILL") == 1
    run(launched(directory, 4, "--resume"))


@pytest.mark.slow
def test_a_full_disk_fails_the_checkpoint_in_all_processes_and_spoils_none(
    tmp_path, undisturbed
):
    directory = tmp_path / "run"
    said = run(launched(directory, 2, "--fill-disk-at", "12"), status=1)
    assert said.count("No space left on device") == 1, said
    names = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert names == ["update-000000008", "update-000000012"]
    assert summary(directory)["status"] == "failed"
    run(launched(directory, 2, "--resume"))
    assert_same_weights(directory, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("instances", [1, 2])
def test_when_the_launcher_is_killed_its_processes_save_and_leave(
    tmp_path, undisturbed, instances
):
    directory = tmp_path / "run"
    process = start(launched(directory, instances, *SLOWLY))
    wait_for(directory, 8, process)
    pids = children_of(process)
    assert len(pids) == instances
    process.kill()
    process.communicate(timeout=10)
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert summary(directory)["status"] == "interrupted"
    run(launched(directory, 2, "--resume"))
    assert_same_weights(directory, undisturbed)
