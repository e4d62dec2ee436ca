"""Start ``killable_run.py`` and compare its results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from millrace.loop.progress import TIMED

SCRIPT = Path(__file__).with_name("killable_run.py")


def start(directory: Path | str, *arguments: str, **variables: str) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | variables
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(directory), *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def final_weights(directory: Path) -> list[np.ndarray]:
    with np.load(directory / "final.npz") as file:
        return [file[name] for name in file.files]


def history(directory: Path) -> list[dict]:
    """Return the log events without the values that depend on the clock."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    clock = TIMED
    return [{k: v for k, v in event.items() if k not in clock} for event in events]


def assert_same_run(directory: Path, uninterrupted: Path) -> None:
    for ours, expected in zip(
        final_weights(directory), final_weights(uninterrupted), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)
    assert history(directory) == history(uninterrupted)
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("completed", 112)
