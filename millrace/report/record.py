"""What a run has left in its directory, read back, also while it is still going."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

from millrace.config import ConfigurationError, load_yaml

FOLDER, PHASES = "report", "phases.json"
"""In a run directory: what its report is drawn from."""

RUNNING = "unfinished"
"""The status of a run without a summary: still going, or killed."""

_ENDS = ("completed", "interrupted", "failed", RUNNING)
_NUMBERS = (
    *("updates", "samples", "samples_per_second"),
    *("compile_seconds", "wall_seconds", "time_to_train_seconds"),
)
_TEXTS = ("status", "error", "command", "directory", "commit")
_MAPPINGS = (
    *("metrics", "facts", "memory", "seconds", "machine", "versions", "device"),
    "changed_options",
)
_OF_NUMBERS = ("memory", "seconds")
_LOSSES = ("train_loss", "loss")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """One run: how it was asked for, what it logged, how it ended."""

    path: Path
    summary: dict[str, Any]
    config: dict[str, Any]
    events: list[dict[str, Any]]
    phases: list[tuple[str, float, float]]
    """What was done from when to when, in seconds of the run's clock."""

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.resolve().name

    @property
    def command(self) -> str:
        """Such as ``cnn train``."""
        return str(self.config.get("command", "")).replace("-", " ", 1)

    @property
    def status(self) -> str:
        """completed, interrupted, failed or unfinished."""
        return self.summary.get("status") or RUNNING

    @property
    def diverged_at(self) -> int | None:
        """The first logged update from which on no training loss was finite."""
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
        """How it ended, in words, and the class of their color."""
        if self.status == "completed" and self.diverged_at is not None:
            return "completed, but diverged", "diverged"
        return self.status, self.status if self.status in _ENDS else RUNNING

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric, also where there is no summary yet."""
        found = self.summary.get("metrics") or {}
        if not found and not self.summary:
            for event in self.events:
                found |= {k: v for k, v in event.items() if k not in PLACES}
        return {name: as_number(value) for name, value in found.items()}


PLACES = ("update", "epoch", "time")
"""What of an event says where in the run it belongs."""


def as_number(value: Any) -> float:
    """Read a metric: what is not finite is text in JSON."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool | str) and math.isfinite(as_number(value))


def read_run(path: Path) -> RunRecord:
    """Read a run directory; one that is still being written is read as far as it is."""
    if not (path / "config.yml").is_file():
        raise ConfigurationError(
            f"{path} is not the directory of a run: it has no config.yml. Give what was "
            "--run-dir, or one of the folders in runs/."
        )
    config = load_yaml(path / "config.yml")
    summary = _summary(_json(path / "summary.json"))
    events = [e for e in read_events(path) if all(_is_number(e.get(n)) for n in PLACES)]
    return RunRecord(path, summary, config, events, read_phases(path))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def _summary(found: Any) -> dict[str, Any]:
    """Keep of a summary what is of the type it should be: others may have written it."""
    kept = found if isinstance(found, dict) else {}
    kept |= {name: str(kept[name]) for name in _TEXTS if kept.get(name) is not None}
    wrong = {name for name in _NUMBERS if not _is_number(kept.get(name))}
    wrong |= {name for name in _MAPPINGS if not isinstance(kept.get(name), dict)}
    kept = {name: value for name, value in kept.items() if name not in wrong}
    for name in set(_OF_NUMBERS) & set(kept):
        kept[name] = {key: n for key, n in kept[name].items() if _is_number(n)}
    return kept


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return a run's log events; a line that is damaged or cut short is left out."""
    try:
        lines = (path / "metrics.jsonl").read_bytes().split(b"\n")
    except OSError:
        return []
    return [event for line in lines if (event := _parse_event(line)) is not None]


def _parse_event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("update"), int)
    return event if is_event else None


def read_phases(path: Path) -> list[tuple[str, float, float]]:
    """Return what a run did from when to when, as far as that can be read."""
    found = _json(path / FOLDER / PHASES)
    entries = found if isinstance(found, list) else []
    return [
        (str(entry[0]), entry[1], entry[2])
        for entry in entries
        if isinstance(entry, list) and len(entry) == 3 and all(map(_is_number, entry[1:]))
    ]
