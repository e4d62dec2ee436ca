"""Train while everything goes wrong, and compare the results with undisturbed runs.

Runs of all applications are disturbed at random moments: processes are killed or stopped,
terminals and disks are lost. After each fault that ends a run, the same command continues
it. In the end, the weights and all log events must be those of a run that nothing has
disturbed, every command must have ended soon after its fault, and no process may be left.

    make chaos

The order of the faults depends on the seed, the moments at which they meet a command do not
repeat exactly. Needs root, for a file system whose power can be cut.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from chaos.faults import FAULTS, LONGEST_END, Attempt, Disk

_LEAST_WAIT = 0.3
_MOST_FAULTS = 8
"""Faults that a run meets before it may end in peace."""
_MOST_PROBLEMS = 5
"""Problems after which a campaign ends early."""
_LEFT_BEHIND = 35.0
"""Seconds after which no process of an ended command may be left: when a launcher is
killed, the others save a checkpoint first."""
_TIMED = ("time", "samples_per_second", "input_wait")
"""What differs between two runs of the same computation, in log events."""


def build_commands(images: Path) -> dict[str, list[str]]:
    """Return the commands to disturb, without run directories."""
    cnn = ["cnn", "train", "--quiet", "--model", "cifar_resnet8", "--image-size", "32"]
    cnn += ["--dataset-path", str(images), "--batch-size", "8", "--num-workers", "2"]
    cnn += ["--stuck-timeout", "15"]
    digits = ["cnn", "train", "--quiet", "--config", "digits_demo", "--num-epochs", "40"]
    launch = ["launch", "--num-instances", "2", "--num-replicas", "2", "--"]
    return {
        "cnn, image files": [*cnn, "--epochs", "40"],
        "cnn, two processes": [*launch, *digits],
        "autoencoder": ["autoencoder", "train", "--quiet", "--epochs", "30"],
        "vcd": ["vcd", "train", "--quiet", "--config", "digits_demo", "--epochs", "20"],
    }


@dataclass
class Subject:
    """A command, and what it gives undisturbed."""

    name: str
    command: list[str]
    expected: dict[str, Any]
    seconds: float


@dataclass
class Findings:
    """What a campaign has found so far."""

    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    """How often each fault has met a command."""
    ends: dict[str, list[float]] = field(
        default_factory=lambda: collections.defaultdict(list)
    )
    """Seconds from a fault to the end of the command, where it has ended."""
    runs: collections.Counter[str] = field(default_factory=collections.Counter)
    """Runs that ended with the expected results."""
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def start(subject_command: Sequence[str], disk: Disk) -> Attempt:
    """Start a command in the run directory of a disk, or continue it."""
    run = disk.root / "run"
    resume = ["--resume"] if (run / "config.yml").exists() else []
    words = [sys.executable, "-m", "millrace", *subject_command, "--run-dir", str(run)]
    chosen = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    variables = {name: value for name, value in os.environ.items() if name not in chosen}
    return Attempt([*words, *resume], disk, variables | {"JAX_PLATFORMS": "cpu"})


def read_results(run: Path) -> dict[str, Any]:
    """Return everything that must be equal: the newest checkpoint and the log events."""
    import millrace as mr

    weights = mr.load(run, which="last")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return {
        "weights": [np.asarray(leaf) for leaf in jax.tree.leaves(weights.params)],
        "events": [{k: v for k, v in e.items() if k not in _TIMED} for e in events],
    }


def find_differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return how results differ from those of an undisturbed run."""
    differences = []
    if len(found["weights"]) != len(expected["weights"]):
        return ["other weights"]
    pairs = zip(found["weights"], expected["weights"], strict=True)
    if differing := sum(not np.array_equal(one, other) for one, other in pairs):
        differences.append(f"{differing} of {len(found['weights'])} weights differ")
    if found["events"] != expected["events"]:
        counts = f"{len(found['events'])} and {len(expected['events'])}"
        differences.append(f"log events differ ({counts})")
    return differences


def describe_threads(pid: int) -> str:
    """Return what the threads of a process do, if py-spy is installed to see it."""
    if shutil.which("py-spy") is None:
        return f"process {pid} is there\n"
    words = ["py-spy", "dump", "--pid", str(pid)]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def train_undisturbed(name: str, command: list[str], folder: Path) -> Subject:
    """Run a command twice, and return what it gives; the second time nothing compiles."""
    for number in range(2):
        disk = Disk(folder / f"undisturbed-{number}")
        started = time.monotonic()
        attempt = start(command, disk)
        ended = attempt.wait(600)
        seconds = time.monotonic() - started
        if not ended or attempt.process.returncode:
            raise RuntimeError(f"{name} does not run:\n{attempt.output}")
        attempt.close()
        expected = read_results(disk.root / "run")
        disk.unmount()
    return Subject(name, command, expected, seconds)


class DisturbedRun:
    """One run of a subject, which faults meet until it is complete."""

    def __init__(
        self, subject: Subject, disk: Disk, chance: random.Random, findings: Findings
    ) -> None:
        self._subject, self._disk = subject, disk
        self._chance, self._findings = chance, findings
        self._story: list[str] = []

    def run(self, is_over: Callable[[], bool]) -> None:
        """Disturb the run until it is complete; record what does not hold."""
        faults = 0
        while True:
            attempt = start(self._subject.command, self._disk)
            try:
                while attempt.process.poll() is None:
                    if faults >= _MOST_FAULTS or is_over():
                        if not attempt.wait(20 * LONGEST_END):
                            return self._complain("does not end", attempt)
                        break
                    longest = max(2 * _LEAST_WAIT, 0.5 * self._subject.seconds)
                    if attempt.wait(self._chance.uniform(_LEAST_WAIT, longest)):
                        break
                    faults += self._disturb(attempt)
                if not self._has_ended_well(attempt):
                    return
                if attempt.process.returncode == 0:
                    return self._compare(attempt)
            finally:
                self._disk.free()
                attempt.close()

    def _disturb(self, attempt: Attempt) -> bool:
        """Cause a fault; return whether there was one that could happen."""
        name = self._chance.choice(sorted(FAULTS))
        before = time.monotonic()
        try:
            must_end = FAULTS[name](attempt, self._chance)
        except (LookupError, ProcessLookupError):
            return False
        self._story.append(name)
        with self._findings.lock:
            self._findings.faults[name] += 1
        if must_end and not attempt.wait(LONGEST_END):
            doing = "".join(map(describe_threads, attempt.find_processes()))
            problem = f"has not ended {LONGEST_END:.0f} s after: {name}\n{doing}"
            self._complain(problem, attempt)
            attempt.signal_all(signal.SIGKILL)
            attempt.process.wait()
        if must_end:
            with self._findings.lock:
                self._findings.ends[name].append(time.monotonic() - before)
        return True

    def _has_ended_well(self, attempt: Attempt) -> bool:
        """Check that nothing is left running, and that the output is plain."""
        deadline = time.monotonic() + _LEFT_BEHIND
        while attempt.find_processes():
            if time.monotonic() > deadline:
                self._complain("leaves processes behind", attempt)
                return False
            time.sleep(0.05)
        if "Traceback" in attempt.output:
            self._complain("prints a traceback", attempt)
            return False
        return True

    def _compare(self, attempt: Attempt) -> None:
        found = read_results(self._disk.root / "run")
        if differences := find_differences(found, self._subject.expected):
            return self._complain(", ".join(differences), attempt)
        with self._findings.lock:
            self._findings.runs[self._subject.name] += 1

    def _complain(self, problem: str, attempt: Attempt) -> None:
        story = ", ".join(self._story)
        text = f"{self._subject.name} {problem}\n  after: {story}\n{attempt.output[-2000:]}"
        with self._findings.lock:
            self._findings.problems.append(text)


def disturb(
    *, seed: int, seconds: float, parallel: int, folder: Path, max_runs: int | None = None
) -> Findings:
    """Disturb runs of all applications for some time.

    Args:
        seed: Chooses the faults.
        seconds: The time after which no fault is caused any more.
        parallel: Runs at a time.
        folder: Where the disks are.
        max_runs: The largest number of runs.
    """
    from image_files import write_folders

    images = write_folders(folder / "images", num_classes=4, per_class=24)
    subjects = [
        train_undisturbed(name, command, folder / f"subject-{number}")
        for number, (name, command) in enumerate(build_commands(images).items())
    ]
    findings, end = Findings(), time.monotonic() + seconds
    numbers = iter(range(max_runs or 1_000_000))

    def work() -> None:
        for number in numbers:
            if time.monotonic() > end or len(findings.problems) >= _MOST_PROBLEMS:
                return
            place = folder / f"run-{number}"
            disk = Disk(place)
            run = DisturbedRun(
                subjects[number % len(subjects)],
                disk,
                random.Random(f"{seed}-{number}"),
                findings,
            )
            try:
                run.run(lambda: time.monotonic() > end)
            except Exception as error:
                with findings.lock:
                    findings.problems.append(f"the campaign itself failed: {error!r}")
            finally:
                with contextlib.suppress(RuntimeError):
                    disk.unmount()
                    shutil.rmtree(place)

    workers = [threading.Thread(target=work) for _ in range(parallel)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return findings


def main() -> None:
    """Run a campaign and report."""
    from harness import Result, build_parser, publish

    parser: argparse.ArgumentParser = build_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        findings = disturb(
            seed=args.seed,
            seconds=60 * args.minutes,
            parallel=args.parallel,
            folder=Path(folder),
        )
    rows = []
    for name in sorted(findings.faults):
        ends = findings.ends.get(name, [])
        rows.append(
            {
                "fault": name,
                "times": str(findings.faults[name]),
                "median s to the end": f"{statistics.median(ends):.1f}" if ends else "",
                "longest": f"{max(ends):.1f}" if ends else "",
            }
        )
    runs = ", ".join(f"{name}: {count}" for name, count in sorted(findings.runs.items()))
    publish(
        Result(
            name="chaos",
            table=rows,
            ratio_name="faults after which weights or log events differ, processes are "
            f"left, or a command does not end (of {findings.faults.total()})",
            ratio=len(findings.problems),
            target=0,
            at_least=False,
            explanation=f"Runs that ended with the expected weights and log events: {runs}."
            + "".join(f"\n\n{problem}" for problem in findings.problems),
            numbers={"faults": dict(findings.faults), "ends": dict(findings.ends)},
        ),
        args,
    )
    if findings.problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
