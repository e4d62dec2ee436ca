"""Image files in several processes with data workers: the batches of one without."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from image_files import write_folders
from launched import (
    alone,
    assert_same_history,
    assert_same_weights,
    children_of,
    events,
    finish,
    launched,
    pid_of,
    run,
    start,
    summary,
    wait_for,
)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Return the options for 72 images in class folders."""
    folder = write_folders(tmp_path_factory.mktemp("images"), 3, 24)
    return "--images", str(folder), "--num-epochs", "2"


@pytest.fixture(scope="module")
def expected(options, tmp_path_factory):
    """Return the directory of a run in one process without data workers."""
    directory = tmp_path_factory.mktemp("expected") / "run"
    run(alone(directory, *options, "--virtual-devices", "4", "--num-replicas", "4"))
    sums = [event["train_ids"] for event in events(directory) if "train_ids" in event]
    assert len(set(sums)) == len(sums) == 16  # updates of two epochs; all differ
    return directory


@pytest.mark.slow
def test_two_processes_with_workers_continue_in_one_with_others_in_mid_epoch(
    options, expected, tmp_path
):
    directory = tmp_path / "run"
    slow = ("--delay", "0.2", "--num-workers", "1")
    process = start(launched(directory, 2, *options, *slow))
    wait_for(directory, 3, process)
    process.terminate()
    finish(process, 130)
    stopped = summary(directory)["updates"]
    assert 3 <= stopped < 16
    if stopped % 8 == 0:
        pytest.skip("it stopped at the end of an epoch")
    own = ("--virtual-devices", "4", "--num-replicas", "4", "--num-workers", "4")
    output = run(alone(directory, *options, *own, "--resume"))
    assert f"Resuming after update {stopped}." in output
    assert_same_weights(directory, expected)
    assert_same_history(directory, expected)


@pytest.mark.slow
def test_one_process_continues_in_two_with_workers_in_mid_epoch(
    options, expected, tmp_path
):
    directory = tmp_path / "run"
    own = ("--virtual-devices", "4", "--num-replicas", "4")
    process = start(alone(directory, *options, *own, "--delay", "0.2"))
    wait_for(directory, 3, process)
    process.terminate()
    finish(process, 130)
    run(launched(directory, 2, *options, "--num-workers", "1", "--resume"))
    assert_same_weights(directory, expected)
    assert_same_history(directory, expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_suspended_data_workers_are_shown_and_killed_and_the_run_continues(
    num_processes, options, expected, tmp_path
):
    directory, last = tmp_path / "run", num_processes - 1
    slow = ("--delay", "0.2", "--num-workers", "2", "--stuck-timeout", "15")
    process = start(launched(directory, num_processes, *options, *slow))
    wait_until(process, lambda: len(children_of(process)) == num_processes)
    pid = pid_of(last, process) if last else children_of(process)[0]
    wait_until(process, lambda: _find_data_workers(pid))
    while process.poll() is None:  # it may start others, for batches of another size
        for worker in _find_data_workers(pid):
            os.kill(worker, signal.SIGSTOP)
        time.sleep(0.1)
    output = finish(process, 1)
    named = rf"waiting for Process {last} \(pid {pid} on .*\): " if last else ""
    assert re.search(rf"No progress for \d+ s[,:] {named}[a-z ]+ after update", output)
    stacks = (directory / f"stuck-process-{last}.txt").read_text()
    stopped = re.findall(r"child (\d+), T \(stopped\): .*decode_worker", stacks)
    assert len(stopped) >= 2
    assert not any(map(_is_running, stopped))
    run(launched(directory, num_processes, *options, "--num-workers", "2", "--resume"))
    assert_same_weights(directory, expected)
    assert_same_history(directory, expected)


def _is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"  # nobody may have asked how it ended


def wait_until(process, condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def _find_data_workers(pid):
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in children.read_text().split():
                if "decode_worker" in Path(f"/proc/{child}/cmdline").read_text():
                    found.append(int(child))
    return found
