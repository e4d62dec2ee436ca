"""A folder of runs that is read again and again: only what has changed since.

`RunFolder` finds the runs and follows them; the files of a run are only read on. So a page
that asks every second costs about one ``stat`` per file, even with hundreds of runs.
"""

import itertools
import math
import os
import time
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from millrace.config import ConfigurationError, load_yaml
from millrace.drawing.interactive import curve_data
from millrace.durable import read_locked_inodes
from millrace.report.best import Best, better_of, choose_metric, read_best
from millrace.report.metrics import (
    is_important,
    metric_series,
    readable_name,
    sort_by_quantity,
    split_metric,
)
from millrace.report.record import (
    POSITIONS,
    RunRecord,
    as_number,
    is_number,
    parse_event,
    read_summary,
)

_MOST_DEPTH = 3
"""How deep below the folder a run may be: ``sweeps/monday/lr-0.1``."""
_SKIPPED = {"checkpoints", "report", "pictures", "tensorboard"}
_CHUNK_BYTES, _TAIL_BYTES = 1 << 24, 64


class EventFile:
    """The log events of a run, of which each is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._tail = b""

    def was_cut(self) -> bool:
        """Whether the file was cut, as by a resumed run; then it is read from the start."""
        end = self._offset
        if _read_bytes(self._path, end - len(self._tail), end) == self._tail:
            return False
        self._offset, self._tail = 0, b""
        return True

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the events that were added since the last call."""
        while data := read_lines(self._path, self._offset):
            self._offset += len(data)
            self._tail = data[-_TAIL_BYTES:]
            yield from parse_lines(data)


def read_lines(path: Path, offset: int) -> bytes:
    """Return complete lines of a file from an offset on, some megabytes at a time."""
    data = _read_bytes(path, offset, offset + _CHUNK_BYTES)
    return data[: data.rfind(b"\n") + 1]  # the last line may still be in writing


def parse_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the log events in some lines, without damaged ones."""
    for line in data.split(b"\n"):
        event = parse_event(line)
        if event and all(is_number(event.get(name)) for name in POSITIONS):
            yield event


def _read_bytes(path: Path, start: int, end: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)
    except OSError:
        return b""


class FollowedRun:
    """One run: what a table shows of it, kept up to date."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        """Names the run in the address of its page."""
        self.version = 0
        """The version of the folder in which the run changed last."""
        self.restarts = 0
        """How often the log was cut: what was read before is no longer valid."""
        self._events = EventFile(path / "metrics.jsonl")
        self._seen: tuple[Any, ...] = ()
        self._inode = path.stat().st_ino
        self._is_locked = False
        self._started = _stamp(path / "config.yml") or (0, 0)
        self._config = _read_config(path)
        self._reset()

    @property
    def metrics(self) -> Iterable[str]:
        """The names of all metrics in the log."""
        return self._last.keys()

    def _reset(self) -> None:
        self._summary: dict[str, Any] = {}
        self._last: dict[str, float] = {}
        self._position: dict[str, float] = {}
        self._bests: dict[str, Best] = {}
        self._losses: list[dict[str, Any]] = []

    def refresh(self, locked: Container[int] = ()) -> bool:
        """Read what is new; return whether there is anything.

        Args:
            locked: The inodes of folders that processes are writing to.
        """
        was_locked, self._is_locked = self._is_locked, self._inode in locked
        seen = tuple(_stamp(self.path / n) for n in ("summary.json", "metrics.jsonl"))
        if seen == self._seen:
            return self._is_locked != was_locked
        self._seen = seen
        if self._events.was_cut():
            self.restarts += 1
            self._reset()
        for event in self._events.read_new():
            self._add(event)
        self._summary = read_summary(self.path)
        return True

    def _add(self, event: dict[str, Any]) -> None:
        self._position = {name: event[name] for name in POSITIONS}
        for name, value in event.items():
            if name in POSITIONS:
                continue
            self._last[name] = as_number(value)
            best = better_of(self._bests.get(name), name, event)
            if best is not None:
                self._bests[name] = best
            if name in ("train_loss", "loss"):
                # Of the losses, only those matter that say whether the run diverged.
                is_lost = not math.isfinite(self._last[name])
                self._losses = [*self._losses, event][:1] if is_lost else []

    def _changed_at(self) -> float:
        stamps = [stamp for stamp in (*self._seen, self._started) if stamp]
        return max(modified for modified, _ in stamps) / 1e9

    def describe(self, name: str) -> dict[str, Any]:
        """Return what a table shows, as JSON values."""
        events = self._losses
        record = RunRecord(self.path, self._summary, self._config, events, [])
        status, css_class = record.badge
        best = read_best(self._summary) or self._bests.get(choose_metric(self._bests) or "")
        metrics = record.metrics if self._summary else self._last
        shown = {n: float(f"{v:.6g}") for n, v in metrics.items() if math.isfinite(v)}
        speed = self._summary.get(
            "samples_per_second", shown.pop("samples_per_second", None)
        )
        return {
            "id": self.number,
            "restarts": self.restarts,
            "name": name,
            "command": record.command,
            "status": status,
            "class": css_class,
            "locked": self._is_locked,
            "best": best and best._asdict() | {"title": readable_name(best.metric)},
            "metrics": shown,
            "update": self._summary.get("updates") or self._position.get("update"),
            "epoch": self._position.get("epoch"),
            "speed": speed,
            "seconds": self._summary.get("wall_seconds", self._position.get("time")),
            "changed": self._changed_at(),
        }


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return load_yaml(path / "config.yml")
    except ConfigurationError:
        return {}


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class RunFolder:
    """All runs in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: dict[Path, FollowedRun] = {}
        self._version = 0
        self._numbers = itertools.count(1)

    def refresh(self) -> None:
        """Find new runs, forget deleted ones, and read what has changed."""
        found = set(find_runs(self.path))
        if found != self._runs.keys():
            self._version += 1
        for path in self._runs.keys() - found:
            del self._runs[path]
        for path in sorted(found - self._runs.keys()):
            self._runs[path] = FollowedRun(path, next(self._numbers))
        locked = read_locked_inodes()
        for run in self._runs.values():
            if run.refresh(locked) or not run.version:
                self._version += 1
                run.version = self._version

    def changes(self, since: int) -> dict[str, Any]:
        """Return the runs that have changed after version `since`, and all numbers."""
        metrics = {name for run in self._runs.values() for name in run.metrics}
        metrics.discard("samples_per_second")
        return {
            "version": self._version,
            "now": time.time(),
            "charts": [
                [name, readable_name(name), is_important(split_metric(name)[1])]
                for name in sort_by_quantity(metrics)
            ],
            "all": [run.number for run in self._runs.values()],
            "runs": [
                run.describe(self.name(run))
                for run in self._runs.values()
                if run.version > since
            ],
        }

    def name(self, run: FollowedRun) -> str:
        """Return the path of a run below the folder."""
        return "/".join(run.path.relative_to(self.path).parts) or run.path.resolve().name

    def curves(self, number: int, offset: int, restarts: int) -> dict[str, Any] | None:
        """Return the points of a run after an offset in its log, for charts.

        Args:
            number: The run.
            offset: The ``offset`` of the last answer, or 0.
            restarts: The ``restarts`` of the last answer; after another restart, all
                points are returned.
        """
        run = self.get(number)
        if run is None:
            return None
        offset = offset if restarts == run.restarts else 0
        start, events = offset, []
        while data := read_lines(run.path / "metrics.jsonl", offset):
            offset += len(data)
            events += parse_lines(data)
        series = metric_series(events)
        series.pop("samples_per_second", None)
        return {
            "start": start,
            "offset": offset,
            "restarts": run.restarts,
            "curves": [curve_data(curve, "epoch") for curve in series.values()],
        }

    def get(self, number: int) -> FollowedRun | None:
        """Return a run by its number."""
        return next((run for run in self._runs.values() if run.number == number), None)


def find_runs(folder: Path, depth: int = _MOST_DEPTH) -> Iterator[Path]:
    """Yield the run directories in a folder; a run has no runs inside, except a sweep's."""
    if (folder / "config.yml").is_file():
        yield folder
    if not depth:
        return
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return
    for entry in entries:
        if entry.name not in _SKIPPED and not entry.name.startswith("."):
            yield from find_runs(Path(entry.path), depth - 1)
