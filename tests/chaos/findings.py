"""What a campaign of faults has found, and whether it has tested enough."""

import collections
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

FAULTS_PER_MINUTE = 200 / 30
"""What a campaign must cause at least."""
_ALL_KINDS_MINUTES = 30.0
"""A campaign of this length must cause every kind of fault."""
_TIMED = ("time", "samples_per_second", "input_wait")
"""What differs between two runs of the same computation, in log events."""

Kind = Literal["differing weights", "differing log events", "hangs", "other problems"]
KINDS: tuple[Kind, ...] = (
    "differing weights",
    "differing log events",
    "hangs",
    "other problems",
)


class Problem(NamedTuple):
    """Something that must not happen."""

    kind: Kind
    text: str


@dataclass
class Findings:
    """What a campaign has found so far."""

    caused: dict[str, collections.Counter[str]] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    """How often each fault has met each subject, by subject."""
    ends: dict[str, list[float]] = field(
        default_factory=lambda: collections.defaultdict(list)
    )
    """Seconds from a fault to the end of the command, where it must end."""
    recoveries: dict[str, list[float]] = field(
        default_factory=lambda: collections.defaultdict(list)
    )
    """Seconds from a fault to the next update, where the command need not end."""
    runs: collections.Counter[str] = field(default_factory=collections.Counter)
    """Disturbed runs that ended with the expected results, by subject."""
    problems: list[Problem] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def faults(self) -> collections.Counter[str]:
        """How often each fault has been caused."""
        return sum(self.caused.values(), collections.Counter())

    def count_problems(self) -> dict[Kind, int]:
        """Return the number of problems of each kind."""
        found = collections.Counter(problem.kind for problem in self.problems)
        return {kind: found[kind] for kind in KINDS}


def find_shortfalls(
    findings: Findings, *, subjects: Iterable[str], faults: Iterable[str], minutes: float
) -> list[str]:
    """Return what a campaign has not tested enough."""
    shortfalls, total = [], findings.faults.total()
    if total < (least := round(FAULTS_PER_MINUTE * minutes)):
        shortfalls.append(f"{total} faults, fewer than {least}")
    for name in subjects:
        if not findings.caused[name].total():
            shortfalls.append(f"{name} was not disturbed")
        if not findings.runs[name]:
            shortfalls.append(f"no disturbed run of {name} was completed")
    if minutes >= _ALL_KINDS_MINUTES:
        missing = [name for name in faults if not findings.faults[name]]
        shortfalls += [f"never caused: {name}" for name in missing]
    return shortfalls


def read_events(run: Path) -> list[dict[str, Any]]:
    """Return the complete log events of a run, which may be writing another one."""
    metrics = run / "metrics.jsonl"
    if not metrics.exists():
        return []
    lines = metrics.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def read_results(run: Path) -> dict[str, Any]:
    """Return everything that must be equal: the newest checkpoint and the log events."""
    import millrace as mr

    weights = mr.load(run, which="last")
    events = [
        {name: value for name, value in event.items() if name not in _TIMED}
        for event in read_events(run)
    ]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(weights.params)]
    return {"weights": leaves, "events": events}


def find_differences(
    found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0
) -> dict[Kind, str]:
    """Return how results differ from those of an undisturbed run."""
    differences: dict[Kind, str] = {}
    ours, theirs = found["weights"], expected["weights"]
    if len(ours) != len(theirs):
        differences["differing weights"] = "other weights"
    elif off := [d for d in map(_measure_difference, ours, theirs) if not d <= tolerance]:
        text = f"{len(off)} of {len(ours)} weights differ, by up to {max(off):.1g}"
        differences["differing weights"] = text
    if not _are_close(found["events"], expected["events"], tolerance):
        counts = f"{len(found['events'])} and {len(expected['events'])}"
        differences["differing log events"] = f"log events differ ({counts})"
    return differences


def _measure_difference(one: np.ndarray, other: np.ndarray) -> float:
    if one.shape != other.shape:
        return np.inf
    return float(np.abs(one.astype(np.float64) - other).max(initial=0.0))


def _are_close(one: list[dict], other: list[dict], tolerance: float) -> bool:
    if [event.keys() for event in one] != [event.keys() for event in other]:
        return False
    pairs = zip(one, other, strict=True)
    return all(abs(a[name] - b[name]) <= tolerance for a, b in pairs for name in a)
