"""Train while everything goes wrong, and compare the results with undisturbed runs.

Runs of all applications are disturbed at random moments: processes are killed or stopped,
terminals and disks are lost. After each fault that ends a run, the same command continues
it. In the end, the weights and all log events must be those of a run that nothing has
disturbed, every command must have ended soon after its fault, and no process may be left.

    make chaos

Each subject meets the faults that it has met least so far. Their order depends on the seed,
the moments at which they meet a command do not repeat exactly. After a fault that need not
end a command, more updates must follow before the next fault. Needs root, for a file system
whose power can be cut.
"""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.faults import FAULTS, LONGEST_END, Attempt, Disk
from chaos.findings import (
    Findings,
    Kind,
    Problem,
    find_differences,
    find_shortfalls,
    read_events,
    read_results,
)

_LEAST_WAIT = 0.3
_MOST_FAULTS = 8
"""Faults that a run meets before it may end in peace."""
_PEACEFUL_TIMES = 20
"""How many times as long as alone a command may take to end then."""
_MOST_PROBLEMS = 5
"""Problems after which a campaign ends early."""
_ROUNDING = 1e-4
"""How far numbers may differ if a run has continued with fewer processes."""
_LONGEST_PAUSE = 120.0
"""Seconds within which more updates must follow a fault that need not end a command: it may
meet one that still starts, on a machine with other work."""
_HANG_WATCHED = 300.0
"""Seconds for which a hang is watched, to know whether it has an end."""
_LEFT_BEHIND = 35.0
"""Seconds after which no process of an ended command may be left: when a launcher is
killed, the others save a checkpoint first."""


def build_commands(images: Path) -> dict[str, list[str]]:
    """Return the commands to disturb, without run directories."""
    cnn = ["cnn", "train", "--quiet", "--model", "cifar_resnet8", "--image-size", "32"]
    cnn += ["--dataset-path", str(images), "--batch-size", "8", "--num-workers", "2"]
    cnn += ["--stuck-timeout", "15"]
    digits = ["cnn", "train", "--quiet", "--config", "digits_demo", "--num-epochs", "40"]
    decay = "epochs_to_total_decay: 40"
    usual = ["--lr-schedule-params", f"{{initial_learning_rate: 0.003125, {decay}}}"]
    # With a low rate, rounding in another order does not grow.
    low = ["--lr", "0.0002", "--lr-schedule-params", f"{{{decay}}}"]
    launch = ["launch", "--num-replicas", "2"]
    elastic = [*launch, "--elastic", "1:2", "--return-after", "10", "--timeout", "10"]
    return {
        "cnn, image files": [*cnn, "--epochs", "40"],
        "cnn, two processes": [*launch, "--num-instances", "2", "--", *digits, *usual],
        "cnn, elastic": [*elastic, "--", *digits, *low],
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

    @property
    def is_elastic(self) -> bool:
        """Whether fewer processes may finish it, whose results differ by rounding."""
        return "--elastic" in self.command


def start(subject_command: Sequence[str], disk: Disk) -> Attempt:
    """Start a command in the run directory of a disk, or continue it."""
    run = disk.root / "run"
    resume = ["--resume"] if (run / "config.yml").exists() else []
    words = [sys.executable, "-m", "millrace", *subject_command, "--run-dir", str(run)]
    chosen = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    variables = {name: value for name, value in os.environ.items() if name not in chosen}
    return Attempt([*words, *resume], disk, variables | {"JAX_PLATFORMS": "cpu"})


def describe_process(pid: int) -> str:
    """Return the state of a process, and what its threads do if py-spy is installed."""
    folder, lines = Path(f"/proc/{pid}"), []
    with contextlib.suppress(OSError):
        state = (folder / "status").read_text().partition("State:")[2].splitlines()[0]
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        lines.append(f"process {pid},{state}: {command[:120]}\n")
    if shutil.which("py-spy") is not None:
        words = ["py-spy", "dump", "--nonblocking", "--pid", str(pid)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        lines.append(done.stdout)
    return "".join(lines)


def train_undisturbed(name: str, command: list[str], folder: Path) -> Subject:
    """Run a command twice, and return what it gives; the second time nothing compiles."""
    _run_to_end(name, command, Disk(folder / "undisturbed-0"))
    started = time.monotonic()
    expected = _run_to_end(name, command, Disk(folder / "undisturbed-1"))
    return Subject(name, command, expected, time.monotonic() - started)


def _run_to_end(name: str, command: list[str], disk: Disk) -> dict[str, Any]:
    attempt = start(command, disk)
    try:
        if not attempt.wait(600) or attempt.process.returncode:
            raise RuntimeError(f"{name} does not run:\n{attempt.output}")
        return read_results(disk.root / "run")
    finally:
        attempt.close()
        disk.unmount()


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
        while True:
            attempt = start(self._subject.command, self._disk)
            try:
                if not self._disturb_until_end(attempt, is_over):
                    return
                if not self._has_ended_well(attempt):
                    return
                if attempt.process.returncode == 0:
                    return self._compare(attempt)
            finally:
                self._disk.free()
                attempt.close()

    def _disturb_until_end(self, attempt: Attempt, is_over: Callable[[], bool]) -> bool:
        """Cause faults until a command has ended; return whether it has."""
        while attempt.process.poll() is None:
            if len(self._story) >= _MOST_FAULTS or is_over():
                if not attempt.wait(_PEACEFUL_TIMES * self._subject.seconds + LONGEST_END):
                    self._complain_of_hang("does not end undisturbed", attempt)
                    return False
                break
            longest = max(2 * _LEAST_WAIT, 0.5 * self._subject.seconds)
            if attempt.wait(self._chance.uniform(_LEAST_WAIT, longest)):
                break
            if not self.disturb(attempt):
                return False
        return True

    def disturb(self, attempt: Attempt) -> bool:
        """Cause a fault; return whether the command has answered it in time."""
        before, update = time.monotonic(), self._read_update()
        name, must_end = self._cause(attempt)
        has_answered = (
            attempt.wait(LONGEST_END) if must_end else self._recover(attempt, update)
        )
        if not has_answered:
            expected = "ended" if must_end else "made progress or ended"
            limit = LONGEST_END if must_end else _LONGEST_PAUSE
            problem = f"has not {expected} {limit:.0f} s after: {name}"
            self._complain_of_hang(problem, attempt)
            return False
        times = self._findings.ends if must_end else self._findings.recoveries
        with self._findings.lock:
            times[name].append(time.monotonic() - before)
        return True

    def _cause(self, attempt: Attempt) -> tuple[str, bool]:
        """Cause the fault that the subject has met least, of those that can happen now."""
        met = self._findings.caused[self._subject.name]
        names = sorted(FAULTS)
        self._chance.shuffle(names)
        for name in sorted(names, key=met.__getitem__):
            with contextlib.suppress(LookupError, ProcessLookupError):
                must_end = FAULTS[name](attempt, self._chance)
                self._story.append(name)
                with self._findings.lock:
                    met[name] += 1
                return name, must_end
        raise AssertionError("some faults are always possible")

    def _read_update(self) -> int:
        """Return the newest update in the log events."""
        events = read_events(self._disk.root / "run")
        return max((event["update"] for event in events), default=0)

    def _recover(self, attempt: Attempt, update: int) -> bool:
        """Wait for more updates or the end of a command; return whether there was one."""
        deadline = time.monotonic() + _LONGEST_PAUSE
        while time.monotonic() < deadline:
            if self._read_update() > update or attempt.wait(0.2):
                return True
        return False

    def _has_ended_well(self, attempt: Attempt) -> bool:
        """Check that nothing is left running, and that the output is plain."""
        deadline = time.monotonic() + _LEFT_BEHIND
        while attempt.find_processes():
            if time.monotonic() > deadline:
                self._complain_of_hang("leaves processes behind", attempt)
                return False
            time.sleep(0.05)
        if "Traceback" in attempt.output:
            self._complain("other problems", "prints a traceback", attempt)
            return False
        return True

    def _compare(self, attempt: Attempt) -> None:
        found = read_results(self._disk.root / "run")
        tolerance = _ROUNDING if self._subject.is_elastic else 0.0
        differences = find_differences(found, self._subject.expected, tolerance)
        for kind, difference in differences.items():
            self._complain(kind, difference, attempt)
        if not differences:
            with self._findings.lock:
                self._findings.runs[self._subject.name] += 1

    def _complain_of_hang(self, problem: str, attempt: Attempt) -> None:
        doing = "".join(map(describe_process, attempt.find_processes()))
        ended = "ended later" if attempt.wait(_HANG_WATCHED) else "did not end at all"
        text = f"{problem}\n{doing}It {ended}, in {_HANG_WATCHED:.0f} s more."
        self._complain("hangs", text, attempt)

    def _complain(self, kind: Kind, problem: str, attempt: Attempt) -> None:
        story = ", ".join(self._story)
        text = f"{self._subject.name} {problem}\n  after: {story}\n{attempt.output[-2000:]}"
        with self._findings.lock:
            self._findings.problems.append(Problem(kind, text))


class Campaign:
    """Disturbs runs of the subjects in turn, until its time is over.

    Args:
        subjects: The commands.
        seed: Chooses the faults.
        seconds: The time after which no fault is caused any more.
        folder: Where the disks are.
    """

    def __init__(
        self, subjects: Sequence[Subject], *, seed: int, seconds: float, folder: Path
    ) -> None:
        self._subjects, self._seed, self._folder = subjects, seed, folder
        self._end = time.monotonic() + seconds
        self._numbers = itertools.count()
        self.findings = Findings()

    def run(self, parallel: int) -> None:
        """Disturb a few runs at a time."""
        workers = [threading.Thread(target=self._work) for _ in range(parallel)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _is_over(self) -> bool:
        return time.monotonic() > self._end

    def _work(self) -> None:
        findings = self.findings
        while not self._is_over() and len(findings.problems) < _MOST_PROBLEMS:
            number = next(self._numbers)
            try:
                self._disturb_one(number)
            except Exception as error:
                text = f"the campaign itself failed: {error!r}"
                with findings.lock:
                    findings.problems.append(Problem("other problems", text))

    def _disturb_one(self, number: int) -> None:
        place = self._folder / f"run-{number}"
        subject = self._subjects[number % len(self._subjects)]
        chance, disk = random.Random(f"{self._seed}-{number}"), Disk(place)
        try:
            DisturbedRun(subject, disk, chance, self.findings).run(self._is_over)
        finally:
            with contextlib.suppress(RuntimeError):
                disk.unmount()
                shutil.rmtree(place)


def disturb(
    *, seed: int, minutes: float, parallel: int, folder: Path
) -> tuple[Findings, list[str]]:
    """Disturb runs of all applications; return the findings, and what was not tested.

    Args:
        seed: Chooses the faults.
        minutes: The time after which no fault is caused any more.
        parallel: Runs at a time.
        folder: Where the disks are.
    """
    from image_files import write_folders

    images = write_folders(folder / "images", num_classes=4, per_class=24)
    subjects = [
        train_undisturbed(name, command, folder / f"subject-{number}")
        for number, (name, command) in enumerate(build_commands(images).items())
    ]
    campaign = Campaign(subjects, seed=seed, seconds=60 * minutes, folder=folder)
    campaign.run(parallel)
    findings = campaign.findings
    names = [subject.name for subject in subjects]
    shortfalls = find_shortfalls(findings, subjects=names, faults=FAULTS, minutes=minutes)
    return findings, shortfalls


def tabulate(findings: Findings) -> list[dict[str, str]]:
    """Return a row for each fault: how often, and the seconds to the end or an update."""
    rows = []
    for name, count in sorted(findings.faults.items()):
        ends, recoveries = findings.ends.get(name, []), findings.recoveries.get(name, [])
        rows.append(
            {
                "fault": name,
                "times": str(count),
                "s to the end": format_times(ends),
                "s to more updates or the end": format_times(recoveries),
            }
        )
    return rows


def format_times(seconds: Sequence[float]) -> str:
    """Return the median and the longest of some times, if there are any."""
    if not seconds:
        return ""
    return f"{statistics.median(seconds):.1f} (at most {max(seconds):.1f})"


def explain(findings: Findings, shortfalls: Sequence[str], args: Any) -> str:
    """Return the text of the report."""
    counts = ", ".join(f"{n} {kind}" for kind, n in findings.count_problems().items())
    subjects = [
        f"- {name}: {counter.total()} faults; {findings.runs[name]} runs ended with the "
        "expected weights and log events"
        for name, counter in sorted(findings.caused.items())
    ]
    paragraphs = [
        f"Seed {args.seed}, {args.minutes:g} minutes, {args.parallel} runs at a time: "
        f"{findings.faults.total()} faults; {counts}.",
        f"Time limits: a command must end within {LONGEST_END:.0f} s of a fault that ends "
        f"it. After any other fault, more updates must follow within {_LONGEST_PAUSE:.0f} "
        f"s. No process may be left {_LEFT_BEHIND:.0f} s after the end.",
        "\n".join(subjects),
        *(f"Not tested enough: {shortfall}." for shortfall in shortfalls),
        *(f"{each.kind}:\n\n```text\n{each.text}\n```" for each in findings.problems),
    ]
    return "\n\n".join(paragraphs)


def main() -> None:
    """Run a campaign and report."""
    from harness import Result, build_parser, publish

    parser: argparse.ArgumentParser = build_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        findings, shortfalls = disturb(
            seed=args.seed,
            minutes=args.minutes,
            parallel=args.parallel,
            folder=Path(folder),
        )
    result = Result(
        name="chaos",
        table=tabulate(findings),
        ratio_name="differing results, hangs and other problems, of "
        f"{findings.faults.total()} faults",
        ratio=len(findings.problems) + len(shortfalls),
        target=0,
        at_least=False,
        explanation=explain(findings, shortfalls, args),
        numbers={
            "faults": {name: dict(each) for name, each in findings.caused.items()},
            "ends": dict(findings.ends),
            "recoveries": dict(findings.recoveries),
            "problems": findings.count_problems(),
        },
    )
    publish(result, args)
    if findings.problems or shortfalls:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
