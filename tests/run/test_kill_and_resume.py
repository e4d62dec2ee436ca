"""kill -9 at any moment, then --resume: same weights, every sample used once."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from killable import assert_same_run, finish, history, start


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    began = time.perf_counter()
    finish(start(directory))
    return directory, time.perf_counter() - began


def test_each_epoch_uses_every_sample_it_should_exactly_once(uninterrupted):
    events = history(uninterrupted[0])
    assert [event["update"] for event in events] == list(range(1, 113))
    for first in range(0, 112, 28):
        # 224 of 230 samples: the sum of all ids minus six distinct ones.
        total = sum(2 * e["train_ids"] for e in events[first : first + 28])
        left_out = sum(range(230)) - total
        assert sum(range(6)) <= left_out <= sum(range(224, 230))


@pytest.mark.parametrize(
    "moment", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 3, 4))]
)
def test_a_killed_run_resumes_to_identical_weights(moment, uninterrupted, tmp_path):
    expected, duration = uninterrupted
    directory = tmp_path / "run"
    # Any time in the life of the process: importing, compiling, training, ending.
    seed = random.randrange(10**6)
    delay = duration * (moment + random.Random(seed).random()) / 5
    process = start(directory)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    ended_before = (directory / "final.npz").exists()
    print(f"killed after {delay:.2f} s of {duration:.2f} s (seed {seed})")
    if not (directory / "config.yml").exists():
        finish(start(directory))  # killed before there was anything to resume
    elif not ended_before:
        finish(start(directory, "--resume"))
    assert_same_run(directory, expected)


@pytest.mark.slow
def test_a_run_killed_twice_still_completes(uninterrupted, tmp_path):
    expected, _ = uninterrupted
    directory = tmp_path / "run"
    for arguments, updates in (((), 30), (("--resume",), 70)):
        process = start(directory, *arguments)
        wait_for_update(directory, updates, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(directory, "--resume"))
    assert_same_run(directory, expected)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_does_not_change_the_result(uninterrupted, tmp_path):
    expected, _ = uninterrupted
    directory = tmp_path / "run"
    process = start(directory)
    wait_for_update(directory, 60, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    newest = sorted((directory / "checkpoints").glob("update-*[0-9]"))[-1]
    files = [path for path in (newest / "state").rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-7])
    resumed = start(directory, "--resume")
    _, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0
    assert "is damaged" in errors
    assert_same_run(directory, expected)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_saves_a_checkpoint_and_exits_with_130(number, uninterrupted, tmp_path):
    expected, _ = uninterrupted
    directory = tmp_path / "run"
    process = start(directory)
    wait_for_update(directory, 20, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finishing the current execution" in errors
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 20 <= summary["updates"] < 112
    newest = sorted((directory / "checkpoints").glob("update-*"))[-1]
    assert int(newest.name.split("-")[1]) == summary["updates"]
    finish(start(directory, "--resume"))
    assert_same_run(directory, expected)


def wait_for_update(directory: Path, update: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    metrics = directory / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= update:
            return
        time.sleep(0.01)
    raise AssertionError(f"update {update} was not reached")
