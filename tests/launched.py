"""Start ``launched_run.py`` in one process or several, and read its results."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from millrace.loop.progress import TIMED

SCRIPT = Path(__file__).parent / "launched_run.py"
DIGITS = (
    *(sys.executable, "-m", "millrace", "cnn", "train", "--config", "digits_demo"),
    *("--num-epochs", "2", "--weight-updates-per-epoch", "4", "--num-replicas", "4"),
)
"""A small run of an application with four replicas. Its rate is high: rounding grows with
every update, to 1e-2 after 22 of them."""
CHOSEN_DEVICES = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")


def environment() -> dict[str, str]:
    """Return the environment of the tests without their eight devices."""
    return {
        **{name: v for name, v in os.environ.items() if name not in CHOSEN_DEVICES},
        "JAX_PLATFORMS": "cpu",
        "PYTHONUNBUFFERED": "1",
    }


STARTED: list[subprocess.Popen] = []


def start(args: list[str]) -> subprocess.Popen:
    process = subprocess.Popen(
        args,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(process)
    return process


def end_all() -> None:
    """Kill what a test has left running; the processes of a launcher end with it."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def alone(directory: Path, *args: str) -> list[str]:
    """Return the command of a run in one process."""
    return [sys.executable, str(SCRIPT), "--run-dir", str(directory), *args]


def launched(
    directory: Path, num_processes: int, *args: str, options: tuple[str, ...] = ()
) -> list[str]:
    """Return the command of a launched run with four replicas."""
    own = ["--num-instances", str(num_processes), "--num-replicas", "4", *options]
    command = alone(directory, *args)
    return [sys.executable, "-m", "millrace", "launch", *own, "--", *command]


def finish(process: subprocess.Popen, status: int = 0, timeout: float = 90) -> str:
    """Wait for the end; return all output."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == status, output
    return output


def run(args: list[str], status: int = 0) -> str:
    return finish(start(args), status)


def final_weights(directory: Path) -> list[np.ndarray]:
    with np.load(directory / "final.npz") as file:
        return [file[name] for name in file.files]


def events(directory: Path) -> list[dict]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in event.items() if k not in TIMED} for event in found]


def summary(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def assert_same_weights(directory: Path, expected: Path) -> None:
    pairs = zip(final_weights(directory), final_weights(expected), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def assert_same_history(directory: Path, expected: Path) -> None:
    ours, theirs = events(directory), events(expected)
    assert [e["update"] for e in ours] == [e["update"] for e in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one == approx_dict(other)


def approx_dict(values: dict) -> dict:
    import pytest

    return {name: pytest.approx(value, rel=1e-5) for name, value in values.items()}


def wait_for(directory: Path, update: int, process: subprocess.Popen) -> None:
    """Wait until an update has been logged."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (directory / "metrics.jsonl").exists():
            lines = (directory / "metrics.jsonl").read_text().splitlines()
            if any(
                f'"update": {n},' in line for line in lines for n in (update, update + 1)
            ):
                return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"update {update} was not logged")


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses that a process listens on, in the format of /proc."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in sockets:
                found.add(columns[1].split(":")[0])
    return found


def children_of(launcher: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def pid_of(number: int, launcher: subprocess.Popen) -> int:
    """Return the pid of a process that the launcher has started."""
    for pid in children_of(launcher):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"MILLRACE_PROCESS_ID={number}".encode() in variables:
            return pid
    raise AssertionError(f"no process {number} among {children_of(launcher)}")
