"""When a process dies, hangs or fails, it is named, the others stop, nothing is lost."""

import fcntl
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launched import (
    alone,
    assert_same_history,
    assert_same_weights,
    children_of,
    environment,
    finish,
    launched,
    pid_of,
    run,
    start,
    summary,
    wait_for,
)

from millrace.checkpoint.manifest import verify_files
from millrace.checkpoint.store import checkpoints_in, read_manifest


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


SLOWLY = ("--delay", "0.05")


def test_a_killed_process_is_named_and_a_restart_ends_with_the_same_weights(
    tmp_path, undisturbed
):
    directory = tmp_path / "run"
    process = start(launched(directory, 2, *SLOWLY, options=("--max-restarts", "1")))
    wait_for(directory, 12, process)
    killed = pid_of(1, process)
    os.kill(killed, signal.SIGKILL)
    output = finish(process)
    line = f"process 1 (pid {killed}) was killed by SIGKILL; stopping the others"
    assert output.count("was killed by SIGKILL") == 1 and line in output
    assert "restarting all processes (1 of 1 restarts)" in output
    assert "Resuming after update" in output
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


def test_an_error_in_one_process_ends_all_processes_with_its_message(tmp_path):
    directory = tmp_path / "run"
    began = time.monotonic()
    output = run(launched(directory, 2, *SLOWLY, "--fail-in", "1"), status=1)
    assert time.monotonic() - began < 60
    assert "OSError: The disk of process 1 is broken." in output
    found = summary(directory)
    assert found["status"] == "failed"
    assert "Process 1" in found["error"] and "broken" in found["error"]
    assert found["updates"] > 0
    assert not list((directory / "checkpoints").glob("*.partial"))


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_process_that_is_stuck_in_its_data_is_named_with_what_it_does(
    tmp_path, num_processes
):
    directory, last = tmp_path / "run", num_processes - 1
    own = ("--stuck-timeout", "3", "--hang-in", str(last))
    began = time.monotonic()
    output = run(launched(directory, num_processes, *SLOWLY, *own), status=1)
    assert time.monotonic() - began < 60
    named = rf"waiting for Process {last} \(pid \d+ on .*\): " if last else ""
    assert re.search(rf"No progress for [3-6] s[,:] {named}training after update", output)
    assert "No progress for" in summary(directory)["error"]
    stacks = (directory / f"stuck-process-{last}.txt").read_text()
    assert "read_from_a_file_server_that_is_gone" in stacks
    again = ("--resume", "--stuck-timeout", "30")
    run(launched(directory, num_processes, *again))  # nothing is damaged


@pytest.mark.slow
def test_a_process_whose_output_nobody_reads_ends_with_a_summary(tmp_path):
    directory = tmp_path / "run"
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    try:
        command = alone(directory, "--stuck-timeout", "3", "--num-epochs", "40")
        process = subprocess.run(
            command, env=environment(), stdout=writing, stderr=writing, timeout=90
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert process.returncode == 1
    assert "No progress for" in summary(directory)["error"]
    assert "_print" in (directory / "stuck-process-0.txt").read_text()


@pytest.mark.slow
def test_processes_that_wait_for_one_another_are_restarted(tmp_path, undisturbed):
    directory = tmp_path / "run"
    own = ("--stuck-timeout", "3", "--hang-in", "1", "--hang-while", "waiting")
    process = start(launched(directory, 2, *own, options=("--max-restarts", "1")))
    output = finish(process, 1)  # they do so again after the restart
    assert output.count("restarting all processes") == 1
    named = r"waiting for Process 1 \(pid \d+ on .*\): validating after update"
    assert re.search(named, output)
    assert "in _sum_metrics" in (directory / "stuck-process-0.txt").read_text()
    assert "in barrier" in (directory / "stuck-process-1.txt").read_text()
    run(launched(directory, 2, "--resume"))
    assert_same_weights(directory, undisturbed)


def test_a_wrong_option_is_reported_once(tmp_path):
    output = run(launched(tmp_path / "run", 2, "--micro-batch-size", "0"), status=2)
    assert output.count("--micro-batch-size must be at least 1") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(10))
def test_a_kill_at_any_time_loses_nothing(tmp_path, undisturbed, attempt):
    chance = random.Random(attempt)
    directory = tmp_path / "run"
    instances = chance.choice([2, 2, 4])
    # On a fast machine, the run lasts one second from its first log event.
    slowly, restarts = ("--delay", "0.15"), ("--max-restarts", "2")
    process = start(launched(directory, instances, *slowly, options=restarts))
    wait_for(directory, 1, process)
    time.sleep(chance.uniform(0, 0.8))
    victim = chance.randrange(instances)
    os.kill(pid_of(victim, process), signal.SIGKILL)
    output = finish(process)
    assert f"process {victim} (pid" in output
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_keeps_the_earlier_ones(tmp_path, undisturbed):
    directory = tmp_path / "run"
    output = run(launched(directory, 2, "--kill-at", "12"), status=1)
    assert output.count("was killed by SIGKILL") == 1, output
    complete = checkpoints_in(directory / "checkpoints")
    assert [path.name for path in complete] == ["update-000000008", "update-000000012"]
    for path in complete:
        verify_files(path, read_manifest(path))
    run(launched(directory, 2, "--resume"))
    assert list((directory / "checkpoints").glob("*.partial")) == []
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_suspended_process_is_noticed_within_a_minute(tmp_path, victim):
    directory = tmp_path / "run"
    process = start(launched(directory, 2, *SLOWLY))
    wait_for(directory, 8, process)
    stopped = pid_of(victim, process)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    output = finish(process, 1)
    assert time.monotonic() - began < 60
    assert f"Process {victim} (pid {stopped}" in output
    assert "has sent no heartbeat for 30 s." in output
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)  # it is not left behind
    if victim != 0:
        assert f"Process {victim}" in summary(directory)["error"]
    run(launched(directory, 2, "--resume"))


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_launcher_ends_suspended_processes_that_no_other_one_can_notice(
    number, tmp_path, undisturbed
):
    directory = tmp_path / "run"
    options = ("--max-restarts", "1", "--timeout", "5")
    process = start(launched(directory, number, *SLOWLY, options=options))
    wait_for(directory, 8, process)
    for pid in children_of(process):
        os.kill(pid, signal.SIGSTOP)
    output = finish(process)
    assert re.search(r"process 0 \(pid \d+\) was suspended for 9 s", output)
    assert "restarting all processes (1 of 1 restarts)" in output
    assert_same_weights(directory, undisturbed)


@pytest.mark.slow
def test_without_process_0_the_others_stop_too(tmp_path):
    directory = tmp_path / "run"
    process = start(launched(directory, 4, *SLOWLY))
    wait_for(directory, 8, process)
    os.kill(pid_of(0, process), signal.SIGKILL)
    began = time.monotonic()
    output = finish(process, 1)
    assert time.monotonic() - began < 30
    assert output.count("was killed by SIGKILL") == 1
    run(launched(directory, 4, "--resume"))


@pytest.mark.slow
def test_a_full_disk_fails_one_checkpoint_in_all_processes_and_damages_no_other(
    tmp_path, undisturbed
):
    directory = tmp_path / "run"
    output = run(launched(directory, 2, "--full-after", "3"), status=1)
    assert output.count("No space left on device") == 1, output
    names = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert names == ["update-000000008", "update-000000012"]
    assert summary(directory)["status"] == "failed"
    run(launched(directory, 2, "--resume"))
    assert_same_weights(directory, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("instances", [1, 2])
def test_when_the_launcher_is_killed_its_processes_save_a_checkpoint_and_exit(
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
