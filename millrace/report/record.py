"""Read the files of a run directory, complete or not."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

from millrace.config import ConfigurationError, load_yaml
from millrace.storage.address import display

FOLDER, PHASES = "report", "phases.json"
"""The folder in a run directory with the data of its report, and a file in it."""

RUNNING = "unfinished"
"""The status of a run without a summary: it is still running, or was killed."""

POSITIONS = ("update", "epoch", "time")
"""The entries of a log event that are not metrics: they say when it happened."""

_STATUSES = ("completed", "interrupted", "failed", RUNNING)
_NUMBERS = (
    *("updates", "samples", "samples_per_second"),
    *("compile_seconds", "wall_seconds", "time_to_train_seconds"),
)
_TEXTS = ("status", "error", "command", "directory", "commit")
_MAPPINGS = (
    *("metrics", "facts", "memory", "seconds", "machine", "versions", "device"),
    *("changed_options", "best", "diverged", "rising_loss"),
)
_NUMBER_MAPPINGS = ("memory", "seconds")
_LOSSES = ("train_loss", "loss")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The options, log events and summary of one run."""

    path: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    events: list[dict[str, Any]]
    phases: list[tuple[str, float, float]]
    """Activities with their start and end, in seconds of the run's clock."""

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return self.path.resolve().name

    @property
    def command(self) -> str:
        """The command, such as ``cnn train``."""
        return str(self.config.get("command", "")).replace("-", " ", 1)

    @property
    def status(self) -> str:
        """How the run ended: completed, interrupted, failed or unfinished."""
        return self.summary.get("status") or RUNNING

    @property
    def diverged_at(self) -> int | None:
        """The first logged update after which no training loss was finite."""
        logged = [
            (event["update"], math.isfinite(as_number(event[name])))
            for event in self.events
            for name in _LOSSES
            if name in event
        ]
        lost = itertools.takewhile(lambda entry: not entry[1], reversed(logged))
        return min((update for update, _ in lost), default=None)

    @property
    def badge(self) -> tuple[str, str]:
        """The status as a reader sees it, and its CSS class."""
        has_diverged = self.diverged_at is not None or self.summary.get("diverged")
        if self.status == "completed" and has_diverged:
            return "completed, but diverged", "diverged"
        if self.status == "completed" and self.summary.get("rising_loss"):
            return "completed, but the loss rose", "diverged"
        return self.status, self.status if self.status in _STATUSES else RUNNING

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric, from the log if there is no summary yet."""
        metrics = self.summary.get("metrics") or {}
        if not metrics and not self.summary:
            for event in self.events:
                metrics |= {k: v for k, v in event.items() if k not in POSITIONS}
        return {name: as_number(value) for name, value in metrics.items()}


def as_number(value: Any) -> float:
    """Return a metric as a float; JSON has nan and inf as text."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return not isinstance(value, bool | str) and math.isfinite(as_number(value))


def read_run(path: Path) -> RunRecord:
    """Read a run directory; a run that is still running has its results so far."""
    if not (path / "config.yml").is_file():
        raise ConfigurationError(
            f"{display(path)} is not a run directory: it has no config.yml. Give the "
            "directory that was --run-dir, or one of those in runs/."
        )
    config = load_yaml(path / "config.yml")
    summary = read_summary(path)
    events = [
        event
        for event in read_events(path)
        if all(is_number(event.get(name)) for name in POSITIONS)
    ]
    return RunRecord(path, summary, config, events, read_phases(path))


def read_summary(path: Path) -> dict[str, Any]:
    """Return the summary of a run; empty while it is running."""
    return _check_summary(_read_json(path / "summary.json"))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def _check_summary(summary: Any) -> dict[str, Any]:
    """Drop entries of an unexpected type: another program may have written the file."""
    kept = summary if isinstance(summary, dict) else {}
    kept |= {name: str(kept[name]) for name in _TEXTS if kept.get(name) is not None}
    wrong = {name for name in _NUMBERS if not is_number(kept.get(name))}
    wrong |= {name for name in _MAPPINGS if not isinstance(kept.get(name), dict)}
    kept = {name: value for name, value in kept.items() if name not in wrong}
    for name in set(_NUMBER_MAPPINGS) & set(kept):
        kept[name] = {key: n for key, n in kept[name].items() if is_number(n)}
    return kept


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the log events of a run; damaged and incomplete lines are left out."""
    try:
        lines = (path / "metrics.jsonl").read_bytes().split(b"\n")
    except OSError:
        return []
    return [event for line in lines if (event := parse_event(line)) is not None]


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return a line of the log as an event, or None if it is not one."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("update"), int)
    return event if is_event else None


def read_phases(path: Path) -> list[tuple[str, float, float]]:
    """Return the activities of a run with their start and end, without damaged ones."""
    phases = _read_json(path / FOLDER / PHASES)
    return [
        (str(entry[0]), entry[1], entry[2])
        for entry in (phases if isinstance(phases, list) else [])
        if isinstance(entry, list) and len(entry) == 3 and all(map(is_number, entry[1:]))
    ]
