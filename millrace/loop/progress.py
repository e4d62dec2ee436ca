"""Progress of a run: the interfaces it is reported to, and what checkpoints save of it."""

import contextlib
import dataclasses
import operator
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from millrace.config import ConfigurationError
from millrace.program.step import TrainState

TIMED = ("time", "samples_per_second", "input_wait")
"""What differs between two runs of the same computation, in log events."""

_NOTICE_SECONDS = 10.0
_NOTICE_SHARE = 0.1
_LEAST_SECONDS = 0.2


@runtime_checkable
class Writer(Protocol):
    """Receives every log event of a run, in the first process: a tracker of your own.

    >>> class Printer:
    ...     def write(self, event):
    ...         print(event["update"], event.get("train_loss"))
    ...
    ...     def close(self):
    ...         print("closed")
    >>> mr.cnn.train(tracker=["tensorboard", Printer()])
    """

    def write(self, event: dict[str, Any]) -> None:
        """Write one event: update, epoch, time and the metrics."""

    def close(self) -> None:
        """Flush, and release what was opened; called however the run ends."""


def check_trackers(trackers: Iterable[Any]) -> list[Writer]:
    """Return trackers as a list; raise if one is something else."""
    listed = list(trackers)
    for tracker in listed:
        if isinstance(tracker, type) or not isinstance(tracker, Writer):
            raise ConfigurationError(
                "trackers must be objects with the methods write(event) and close(), got "
                f"{tracker!r}."
            )
    return listed


class EventLog(Protocol):
    """The log events on disk, which a resumed run continues."""

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        ...

    def truncate_metrics(self, update: int) -> int:
        """Delete the events after `update`; return the number of events left."""
        ...

    def num_events(self) -> int:
        """Return the number of events."""
        ...

    def sync_metrics(self) -> None:
        """Return once all events are on disk."""

    def record_extended_options(self) -> None:
        """Record options that a resumed run was given larger values for."""


class Display(Protocol):
    """Shows the progress of a run."""

    def start(self, total: int, done: int, elapsed: float | None = None) -> None:
        """Start at `done` of `total` updates, with `elapsed` seconds on the clock."""

    def stop(self) -> None:
        """Stop, however the run ended."""

    def status(self, what: str) -> None:
        """Show what the run is doing now."""

    def advance(self, done: int, metrics: dict[str, float], speed: float) -> None:
        """Show the newest metrics after `done` updates."""

    def progress(self, done: int, total: int | None) -> None:
        """Show how much of an activity other than training is done."""

    def event(self, event: dict[str, Any]) -> None:
        """Show a log event."""

    def line(self, text: str) -> None:
        """Show a line of text."""

    def warning(self, text: str) -> None:
        """Show a warning."""


@dataclasses.dataclass(frozen=True)
class MetricSums:
    """Sums of the metrics since the last log event."""

    sums: dict[str, float] = dataclasses.field(default_factory=dict)
    newest: dict[str, float] = dataclasses.field(default_factory=dict)
    updates: int = 0

    @classmethod
    def read(cls, saved: dict[str, Any]) -> "MetricSums":
        """Read sums from JSON."""
        sums, newest = _read_floats(saved["sums"]), _read_floats(saved["newest"])
        return cls(sums, newest, _read_count(saved["updates"]))

    def add(self, metrics: dict[str, float]) -> "MetricSums":
        """Return the sums with the metrics of one more update."""
        sums = {name: self.sums.get(name, 0.0) + value for name, value in metrics.items()}
        return MetricSums(sums, metrics, self.updates + 1)

    def means(self) -> dict[str, float]:
        """Return the mean of each metric."""
        return {name: total / self.updates for name, total in self.sums.items()}


class SavedProgress(NamedTuple):
    """The progress of a run in the manifest of a checkpoint."""

    update: int
    data_position: int
    samples_per_element: int | None
    """None in checkpoints written before it was recorded."""
    time: float
    metrics: dict[str, float]
    scores: dict[str, float]
    since_log: MetricSums
    num_events: int
    data_state: Any = None
    """The state of the dataset's iterator, if it has one."""
    first_losses: tuple[float, ...] = ()
    """The losses of the first updates, which later ones are compared with."""

    @classmethod
    def read(cls, manifest: dict[str, Any]) -> "SavedProgress":
        """Read a manifest; raise one of ``MANIFEST_ERRORS`` if it is not of a run."""
        size = manifest.get("samples_per_element")
        return cls(
            manifest["update"],
            _read_count(manifest["data_position"]),
            None if size is None else _read_count(size),
            float(manifest["time"]),
            _read_floats(manifest["metrics"]),
            _read_floats(manifest["scores"]),
            MetricSums.read(manifest["since_log"]),
            _read_count(manifest.get("num_events", 0)),
            manifest.get("data_state"),
            tuple(float(loss) for loss in manifest.get("first_losses", ())),
        )

    def position_in(self, samples_per_element: int) -> int:
        """Return the data position in elements of another size.

        An element holds the samples of all replicas, and their number may change.
        """
        size = self.samples_per_element or samples_per_element
        return self.data_position * size // samples_per_element


def _read_count(saved: Any) -> int:
    if operator.index(saved) < 0:
        raise ValueError(f"{saved} is negative")
    return saved


def _read_floats(saved: dict[str, Any]) -> dict[str, float]:
    # NaN and infinities are text in our JSON; float() reads them.
    return {name: float(value) for name, value in saved.items()}


class TrainingResult(NamedTuple):
    """How training ended."""

    state: TrainState
    interrupted: bool
    progress: dict[str, Any]
    """updates, samples, samples_per_second, compile_seconds, metrics."""
    signal: int | None = None
    """The signal that ended training, if one did."""

    @property
    def updates(self) -> int:
        """Updates made, including those before a resume."""
        return self.progress["updates"]

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return self.progress["metrics"]


class Throughput:
    """Measures samples per second in the steady state.

    The first execution is dropped because it fills queues and caches, and so is the time
    that validation and checkpoints take between executions.
    """

    def __init__(self) -> None:
        # Marks are (seconds, samples so far), at the end of calls and of executions.
        self._marks: list[tuple[float, int]] = []
        self._ends: list[tuple[float, int]] = []
        self._paused = 0.0

    def start(self) -> None:
        """Start the clock, right before the first execution."""
        self._marks.append((self._now(), 0))
        self._ends.append(self._marks[-1])

    def add(self, samples: int, *, execution_ends: bool) -> None:
        """Record that a call of the program has ended."""
        total = self._marks[-1][1] + samples
        mark = self._now(), total
        _keep(self._marks, mark)
        if execution_ends:
            _keep(self._ends, mark)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the measurement."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - started

    def per_second(self) -> float:
        """Return samples per second, 0 if nothing has been measured."""
        # The start counts as an end, so a third one means a second execution. With only
        # one execution, its first call is dropped; with only one call, nothing is.
        if len(self._ends) > 2:
            first, last = self._ends[1], self._ends[-1]
        elif len(self._marks) > 2:
            first, last = self._marks[1], self._marks[-1]
        elif len(self._marks) == 2:
            first, last = self._marks
        else:
            return 0.0
        seconds = last[0] - first[0]
        return (last[1] - first[1]) / seconds if seconds > 0 else 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._paused


class InputWait:
    """Measures how long the devices wait for data.

    The host runs ahead of them: it may wait for the next chunk while they still compute.
    So a thread notes when the newest call is done, and only what the host waits after that
    counts.
    """

    def __init__(self) -> None:
        self._clock = ThreadPoolExecutor(1, "millrace-device-clock")
        self._waited = self._total_waited = self._total = 0.0
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self, newest: Any) -> Iterator[None]:
        """Wait for data inside; `newest` are arrays of the newest call, None without."""
        done = None if newest is None else self._clock.submit(_completion_time, newest)
        started = time.perf_counter()
        yield
        arrived = time.perf_counter()
        if done is None:
            self._waited += arrived - started
        elif done.done():
            self._waited += max(0.0, arrived - max(started, done.result()))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from the measurement."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - started

    def start(self) -> None:
        """Start the clock, right before the first execution."""
        self._started = time.perf_counter()

    def take_share(self) -> float | None:
        """Return the share of the time since the last call that was spent waiting.

        None if that was so short that it says nothing; the time counts next time.
        """
        now = time.perf_counter()
        seconds = now - self._started
        if seconds < _LEAST_SECONDS:
            return None
        share = self._waited / seconds
        self._total += seconds
        self._total_waited += self._waited
        self._waited, self._started = 0.0, now
        return min(1.0, share)

    @property
    def share(self) -> float:
        """The share of all time measured so far."""
        seconds = self._total + time.perf_counter() - self._started
        return min(1.0, (self._total_waited + self._waited) / max(seconds, 1e-9))

    def is_notable(self) -> bool:
        """Whether the devices have waited long enough for the user to be told."""
        seconds = self._total + time.perf_counter() - self._started
        return seconds > _NOTICE_SECONDS and self.share > _NOTICE_SHARE

    def close(self) -> None:
        """Stop the thread."""
        self._clock.shutdown(wait=False, cancel_futures=True)


def _completion_time(arrays: Any) -> float:
    jax.block_until_ready(arrays)
    return time.perf_counter()


def _keep(marks: list[tuple[float, int]], mark: tuple[float, int]) -> None:
    """Append a mark; after the second one, only the newest is ever used."""
    del marks[2:]
    marks.append(mark)
