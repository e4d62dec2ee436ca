"""How soon a lost or stuck process of a run is named, and all processes have ended.

Two processes train, launched on this machine. One of them is killed, suspended, or stuck:
because its data workers are suspended, because a read of its data never returns, or in a
collective that the other process never enters. The time until the terminal says what has
happened, and until the command has ended, is measured from the fault; from the last log
event if data workers are suspended, because the batches that they leave are used first.

    PYTHONPATH=tests python benchmarks/detection.py --report

Target: named at most 5 s after the time without a heartbeat or progress that was set.
"""

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import launched
from harness import Result, build_parser, publish
from image_files import write_folders

_LIMIT = 10.0
"""Seconds without a heartbeat, or without progress, that are set."""
_LONGEST = 120.0
_ONE = r"[Pp]rocess 1 \(pid \d+"
_NO_PROGRESS = r"No progress for \d+ s, waiting for " + _ONE


@dataclass(frozen=True)
class Case:
    """A fault, and what the terminal has to say of it."""

    limit: float
    says: str
    number: int | None = None
    """The signal to send."""
    to_data: bool = False
    """Whether to send it to the data workers of process 1, rather than to process 1."""
    hangs_while: str = ""
    """What process 1 of the tests' small run does when it gets stuck on its own."""


_CASES = {
    "killed": Case(0.0, _ONE + r"\) was killed by SIGKILL", signal.SIGKILL),
    # Both limits are over at about the same time.
    "suspended": Case(_LIMIT, rf"{_ONE}.* no heartbeat|{_NO_PROGRESS}", signal.SIGSTOP),
    "waiting for suspended data workers": Case(
        _LIMIT, _NO_PROGRESS, signal.SIGSTOP, to_data=True
    ),
    "in a read that never returns": Case(_LIMIT, _NO_PROGRESS, hangs_while="reading"),
    "in a collective without the other": Case(_LIMIT, _NO_PROGRESS, hangs_while="waiting"),
}


def build_command(case: Case, run: Path, images: Path) -> list[str]:
    """Return a command that trains in two processes."""
    command = [sys.executable, "-m", "millrace"]
    command += ["launch", "--num-instances", "2", "--timeout", f"{_LIMIT:g}"]
    command += ["--num-replicas", "2", "--"]
    limits = ["--run-dir", str(run), "--stuck-timeout", f"{_LIMIT:g}"]
    if case.hangs_while:
        script = [sys.executable, str(launched.SCRIPT), "--delay", "0.05"]
        hang = ["--hang-in", "1", "--hang-while", case.hangs_while]
        return [*command, *script, *limits, *hang]
    train = ["cnn", "train", "--model", "cifar_resnet8", "--image-size", "32"]
    train += ["--dataset-path", str(images), "--batch-size", "8", "--num-workers", "2"]
    train += ["--epochs", "5000", *limits]
    return [*command, *train]


class Reader(threading.Thread):
    """Reads the lines of a command, and notes when they come."""

    def __init__(self, process: subprocess.Popen) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._lines: list[tuple[float, str]] = []

    def run(self) -> None:
        """Read until the command closes its output."""
        for line in self._process.stdout or ():
            self._lines.append((time.monotonic(), line))

    def find(self, pattern: str) -> float | None:
        """Return when the first line came that has the pattern, if one has."""
        return next((when for when, line in self._lines if re.search(pattern, line)), None)

    def wait_for(self, pattern: str) -> float:
        """Return when such a line came, once it has."""
        while (when := self.find(pattern)) is None:
            if not self.is_alive():
                lines = "".join(line for _, line in self._lines)
                raise SystemExit(f"The command never said {pattern}:\n{lines}")
            time.sleep(0.02)
        return when


def find_victims(process: subprocess.Popen, *, data: bool) -> list[int]:
    """Return the pid of launched process 1, or those of its data workers."""
    pid = launched.pid_of(1, process)
    if not data:
        return [pid]
    # A child stands with the thread of its parent that has started it.
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for file in files for word in file.read_text().split()]


def measure(case: Case, folder: Path, images: Path) -> tuple[float, float]:
    """Return the seconds from a fault to its message, and to the end of the command."""
    process = launched.start(build_command(case, folder / "run", images))
    reader = Reader(process)
    reader.start()
    try:
        if case.number is None:
            began = reader.wait_for("stuck from now on")
        else:
            reader.wait_for("epoch 3 ")  # everything is compiled, which may take long
            time.sleep(random.uniform(0.0, 2.0))
            victims = find_victims(process, data=case.to_data)
            began = time.monotonic()
            for victim in victims:
                os.kill(victim, case.number)
        named = reader.wait_for(case.says)
        if case.to_data:  # batches that were ready have been used first
            logged = (folder / "run" / "metrics.jsonl").stat().st_mtime
            began = time.monotonic() - (time.time() - logged)
        process.wait(_LONGEST)
        return named - began, time.monotonic() - began
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Measure and report."""
    args = build_parser(__doc__, rounds=5).parse_args()
    rows, numbers = [], {}
    with tempfile.TemporaryDirectory() as folder:
        images = write_folders(Path(folder) / "images", num_classes=4, per_class=24)
        for name, case in _CASES.items():
            times = [
                measure(case, Path(folder) / f"{name}-{number}", images)
                for number in range(args.rounds)
            ]
            named, ended = zip(*times, strict=True)
            print(name, times, flush=True)
            numbers[name] = {"named": named, "ended": ended, "limit": case.limit}
            rows.append(
                {
                    "process 1 is": name,
                    "limit that was set": f"{case.limit:g} s" if case.limit else "",
                    "named after": f"{statistics.median(named):.1f} s",
                    "at most": f"{max(named):.1f} s",
                    "all ended after": f"{statistics.median(ended):.1f} s",
                    "at most ": f"{max(ended):.1f} s",
                }
            )
    worst = max(max(one["named"]) - one["limit"] for one in numbers.values())
    publish(
        Result(
            name="detection",
            table=rows,
            ratio_name="longest time from the limit to the message, in seconds",
            ratio=worst,
            target=5,
            at_least=False,
            explanation=f"{args.rounds} faults of each kind. By default, the limits are "
            "30 s without a heartbeat, and 1800 s or ten times the longest step without "
            "progress.",
            numbers=numbers,
        ),
        args,
    )


if __name__ == "__main__":
    main()
