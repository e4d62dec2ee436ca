"""Starts ``launched_run.py`` in one process or several, and reads what it leaves."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).parent / "launched_run.py"
CHOSEN_DEVICES = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")


def environment() -> dict[str, str]:
    """The tests' own, without their eight devices."""
    return {
        **{name: v for name, v in os.environ.items() if name not in CHOSEN_DEVICES},
        "JAX_PLATFORMS": "cpu",
        "PYTHONUNBUFFERED": "1",
    }


STARTED: list[subprocess.Popen] = []


def start(words: list[str]) -> subprocess.Popen:
    process = subprocess.Popen(
        words,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(process)
    return process


def end_all() -> None:
    """End what a test has left behind; a launcher's processes end with it."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def alone(directory: Path, *words: str) -> list[str]:
    """The words of a run in one process."""
    return [sys.executable, str(SCRIPT), "--run-dir", str(directory), *words]


def launched(
    directory: Path, instances: int, *words: str, options: tuple[str, ...] = ()
) -> list[str]:
    """The words of a launched run with four replicas."""
    own = ["--num-instances", str(instances), "--num-replicas", "4", *options]
    command = alone(directory, *words)
    return [sys.executable, "-m", "millrace", "launch", *own, "--", *command]


def finish(process: subprocess.Popen, status: int = 0, timeout: float = 90) -> str:
    """Wait for the end; return all that was said."""
    said, _ = process.communicate(timeout=timeout)
    assert process.returncode == status, said
    return said


def run(words: list[str], status: int = 0) -> str:
    return finish(start(words), status)


def final_weights(directory: Path) -> list[np.ndarray]:
    with np.load(directory / "final.npz") as file:
        return [file[name] for name in file.files]


def events(directory: Path) -> list[dict]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    clock = ("time", "samples_per_second")
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in event.items() if k not in clock} for event in found]


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
    raise AssertionError(f"update {update} has not come")


def listening_addresses(pid: int) -> set[str]:
    """The addresses on which a process accepts connections, as the kernel writes them."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].split(":")[0])
    return found


def children_of(launcher: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def pid_of(instance: int, launcher: subprocess.Popen) -> int:
    """Find the process of an instance among the launcher's children."""
    for pid in children_of(launcher):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"MILLRACE_PROCESS_ID={instance}".encode() in variables:
            return pid
    raise AssertionError(f"no instance {instance} among {children_of(launcher)}")
