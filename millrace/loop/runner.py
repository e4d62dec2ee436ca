"""Joins feeds and program: runs a schedule of updates, and the events between them."""

import collections
import contextlib
import dataclasses
import logging
import math
import operator
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from millrace.checkpoint.store import Checkpoints
from millrace.distributed.coordination import StopPoint
from millrace.distributed.signals import handling
from millrace.feeds.infeed import Infeed
from millrace.loop.async_validation import AsyncValidation
from millrace.loop.event_schedule import EventSchedule
from millrace.loop.nan_guard import NonFiniteCheck
from millrace.loop.staging import MAX_IN_FLIGHT, compile_calls, next_chunk
from millrace.loop.throughput import Throughput
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram

_log = logging.getLogger("millrace")

Validate = Callable[[TrainState], dict[str, float]]


class Writer(Protocol):
    """Receives every log event of a run."""

    def write(self, event: dict[str, Any]) -> None:
        """Take one event: update, epoch, time and the metrics."""
        ...

    def close(self) -> None:
        """Flush and release what was opened."""
        ...


class EventLog(Protocol):
    """The log events a run has kept, which a resumed run continues."""

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        ...

    def forget_metrics_after(self, update: int) -> int:
        """Drop the events after `update`; return how many are left."""
        ...

    def num_events(self) -> int:
        """Count the events."""
        ...

    def sync_metrics(self) -> None:
        """Return once the events are on the disk."""
        ...

    def keep_grown(self) -> None:
        """Record the options that a resumed run was given larger values of."""
        ...


class Display(Protocol):
    """Shows the progress of a run."""

    def start(self, total: int, done: int, elapsed: float | None = None) -> None:
        """Begin: `done` of `total` updates, `elapsed` seconds on the run's clock."""
        ...

    def stop(self) -> None:
        """End, whatever the reason."""
        ...

    def status(self, what: str) -> None:
        """Show what the run is doing now."""
        ...

    def advance(self, done: int, metrics: dict[str, float], speed: float) -> None:
        """Show the newest metrics after `done` updates."""
        ...

    def event(self, event: dict[str, Any]) -> None:
        """Show a log event."""
        ...

    def line(self, text: str) -> None:
        """Show a line of text."""
        ...

    def warning(self, text: str) -> None:
        """Show a warning."""
        ...


class TrainingResult(NamedTuple):
    """How a run of the program ended."""

    state: TrainState
    interrupted: bool
    progress: dict[str, Any]
    """updates, samples, samples_per_second, compile_seconds, metrics."""

    @property
    def updates(self) -> int:
        """Updates made, those before a resume included."""
        return self.progress["updates"]

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return self.progress["metrics"]


@dataclasses.dataclass(frozen=True)
class _Sums:
    """What has been reported since the last log event, added up."""

    sums: dict[str, float] = dataclasses.field(default_factory=dict)
    newest: dict[str, float] = dataclasses.field(default_factory=dict)
    updates: int = 0

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> "_Sums":
        sums, newest = _floats(saved["sums"]), _floats(saved["newest"])
        return cls(sums, newest, _count(saved["updates"]))

    def plus(self, info: dict[str, float]) -> "_Sums":
        sums = {name: self.sums.get(name, 0.0) + value for name, value in info.items()}
        return _Sums(sums, info, self.updates + 1)

    def means(self) -> dict[str, float]:
        return {name: total / self.updates for name, total in self.sums.items()}


class _SavedProgress(NamedTuple):
    """How far a run had come, as the manifest of a checkpoint has it."""

    update: int
    data_position: int
    samples_per_element: int | None
    time: float
    metrics: dict[str, float]
    scores: dict[str, float]
    since_log: _Sums
    num_events: int

    @classmethod
    def read(cls, manifest: dict[str, Any]) -> "_SavedProgress":
        """Read a manifest; one that is not of a run raises an error of some kind."""
        size = manifest.get("samples_per_element")
        return cls(
            manifest["update"],
            _count(manifest["data_position"]),
            None if size is None else _count(size),
            float(manifest["time"]),
            _floats(manifest["metrics"]),
            _floats(manifest["scores"]),
            _Sums.restored(manifest["since_log"]),
            _count(manifest.get("num_events", 0)),
        )


def _count(saved: Any) -> int:
    if operator.index(saved) < 0:
        raise ValueError(f"{saved} is negative")
    return saved


def _floats(saved: dict[str, Any]) -> dict[str, float]:
    # What is not finite is text in JSON; float() reads it.
    return {name: float(value) for name, value in saved.items()}


class Runner:
    """Runs a training program over a schedule.

    Args:
        program: What to run.
        infeed: Where batches come from; it is moved to the position of a checkpoint.
        schedule: How many updates, and after which of them the host does what.
        directory: Where metrics and checkpoints go.
        console: What the user sees.
        writers: Receive the log events.
        checkpoints: Where to save and resume; none if not given.
        validate: Returns validation metrics of a state; none if not given. Training goes
            on beside a `AsyncValidation`, which ends with the run.
        stops_diverged: Whether a loss that is not finite, and stays so, ends the run; a
            warning says so otherwise.
        when_compiled: Called before the first update; what it raises ends the run.
    """

    def __init__(
        self,
        program: TrainingProgram,
        infeed: Infeed,
        schedule: EventSchedule,
        *,
        directory: EventLog,
        console: Display,
        writers: list[Writer],
        checkpoints: Checkpoints | None = None,
        validate: Validate | AsyncValidation | None = None,
        stops_diverged: bool = False,
        when_compiled: Callable[[], None] | None = None,
    ) -> None:
        self._program = program
        self._infeed = infeed
        self._schedule = schedule
        self._directory = directory
        self._console = console
        self._writers = writers
        self._checkpoints = checkpoints
        self._validate = validate
        self._stops_diverged = stops_diverged
        self._when_compiled = when_compiled
        self._throughput = Throughput()
        self._started = time.perf_counter()
        self._earlier_seconds = 0.0
        self._pending: collections.deque[tuple[int, bool, Any]] = collections.deque()
        self._drained = 0
        self._since_log = _Sums()
        self._metrics: dict[str, float] = {}
        self._validated_at = -1
        self._stop_requested = False
        self._signaled = False
        self._stop_point = StopPoint(schedule.updates_per_execution)

    def run(self, state: TrainState, *, resume: bool = False) -> TrainingResult:
        """Train from `state`, or from the newest checkpoint, to the schedule's end."""
        if resume:
            state = self._resume(state)
        done = self._drained = int(state.update)
        self._finite = NonFiniteCheck(
            self._program.plan,
            done,
            self._schedule.updates_per_epoch,
            stops_diverged=self._stops_diverged,
        )
        total = self._schedule.total_updates
        self._console.start(total, done, self.elapsed())
        try:
            self._console.status("waiting for the first data")
            self._infeed.peek()
            self._console.status("compiling")
            execution = self._schedule.updates_per_execution
            capacities = compile_calls(self._program, state, self._infeed, execution)
            if self._when_compiled is not None:
                self._when_compiled()
            self._console.status("training")
            with self._stopping_on_signals():
                state, done = self._train(state, done, capacities)
                self._finish_saving()
        except Exception:
            if self._checkpoints is not None:
                self._checkpoints.settle()  # nobody writes once this has returned
            raise
        finally:
            self._console.stop()
            self._infeed.close()
            if isinstance(self._validate, AsyncValidation):
                self._validate.close()
        return TrainingResult(state, done < total, self.progress())

    def stop(self) -> None:
        """Ask for the end after the execution under way; a checkpoint is saved there.

        Of several processes, all must ask at the same update.
        """
        self._stop_requested = True

    def _stops(self, done: int) -> bool:
        """Whether to end after `done` updates, as this program or the user asks."""
        signaled = self._stop_point.reached(done, asked=self._signaled)
        return self._stop_requested or signaled

    def progress(self) -> dict[str, Any]:
        """Say how far the run has come: what ``summary.json`` reports, whatever the end."""
        done = self._drained
        return {
            "updates": done,
            "samples": done * self._program.plan.batching.global_batch_size,
            "samples_per_second": self._throughput.per_second(),
            "compile_seconds": self._program.compile_seconds,
            "metrics": dict(self._metrics),
        }

    def _resume(self, state: TrainState) -> TrainState:
        restored = None
        if self._checkpoints is not None:
            restored = self._checkpoints.restore_newest(
                self._program.unpack_state(state), check=_SavedProgress.read
            )
        if restored is None:
            self._console.line("No checkpoint yet: starting from the beginning.")
            self._directory.forget_metrics_after(0)
            self._directory.keep_grown()
            return state
        saved = _SavedProgress.read(restored.manifest)
        self._directory.keep_grown()
        # The end of a shorter run may lie within an execution of this one.
        each = math.gcd(self._schedule.updates_per_execution, saved.update)
        self._schedule = self._schedule._replace(updates_per_execution=each)
        self._stop_point = StopPoint(each)
        self._infeed.seek(self._position(saved))
        self._forget_metrics_after(saved)
        self._earlier_seconds = saved.time
        self._metrics = dict(saved.metrics)
        self._since_log = saved.since_log
        self._write_lost_validation(saved)
        self._console.line(f"Resuming after update {saved.update}.")
        return self._program.place_state(restored.state)

    def _forget_metrics_after(self, saved: "_SavedProgress") -> None:
        """Drop the events that will be written again; say if earlier ones are missing."""
        kept = self._directory.forget_metrics_after(saved.update)
        if kept < saved.num_events:
            self._console.warning(
                f"metrics.jsonl has only {kept} of the {saved.num_events} log events up to "
                f"update {saved.update}: the others were lost or damaged. The weights are "
                "not affected."
            )

    def _write_lost_validation(self, saved: "_SavedProgress") -> None:
        """Report what a validation beside training found just before the run was killed."""
        update = saved.update
        found = {n: value for n, value in saved.scores.items() if _is_validated(n)}
        is_there = any(
            event["update"] == update and any(map(_is_validated, event))
            for event in self._directory.read_metrics()
        )
        if found and not is_there and isinstance(self._validate, AsyncValidation):
            self._write_event(update, found)

    def _position(self, saved: "_SavedProgress") -> int:
        """Return where the data goes on; other replicas make elements of another size."""
        size = self._program.plan.batching.samples_per_step
        return saved.data_position * (saved.samples_per_element or size) // size

    def _train(
        self, state: TrainState, done: int, capacities: tuple[int, ...]
    ) -> tuple[TrainState, int]:
        self._throughput.start()
        micro_batches = self._program.plan.batching.gradient_accumulation_count
        first_end = done + self._schedule.updates_per_execution
        while done < self._schedule.total_updates and not self._stops(done):
            for number, capacity in enumerate(capacities, 1):
                state, info = self._program.run(state, self._chunk(capacities))
                updates = capacity // micro_batches
                done += updates
                self._pending.append((updates, number == len(capacities), info))
                while len(self._pending) >= MAX_IN_FLIGHT:
                    self._drain()
            if done == first_end:
                # Speed counts from here, so nothing may be under way: a GPU's call comes
                # back to us only when most of its work is done.
                self._drain_all()
            self._between_executions(state, done)
        self._drain_all()
        if self._stops(done):  # maybe since the last look at it in the loop
            self._save(state, done)
        self._collect_validation(wait=True)
        return state, done

    def _chunk(self, capacities: tuple[int, ...]) -> Any:
        try:
            return next_chunk(self._program, self._infeed, capacities)
        except Exception:
            self._drain_all()  # what was computed before the data failed is reported
            raise

    def _between_executions(self, state: TrainState, done: int) -> None:
        """Do what is due while no update is under way."""
        validate = self._validate is not None and self._schedule.due("validate", done)
        save = self._schedule.due("checkpoint", done)
        self._collect_validation(wait=validate or save)
        if not validate and not save:
            return
        self._drain_all()
        with self._throughput.paused():
            if validate:
                self._run_validation(state, done)
            # Asked only now: Ctrl-C may have come during the validation.
            if save or self._stops(done):
                self._save(state, done)

    def _run_validation(self, state: TrainState, done: int) -> None:
        assert self._validate is not None
        if isinstance(self._validate, AsyncValidation):
            return self._validate.start(self._program.unpack_state(state), done)
        self._console.status("validating")
        self._take_validation(done, self._validate(self._program.unpack_state(state)))
        self._console.status("training")

    def _collect_validation(self, *, wait: bool) -> None:
        """Report what was found beside training, once it is."""
        if isinstance(self._validate, AsyncValidation):
            collected = self._validate.collect(wait=wait)
            if collected is not None:
                self._take_validation(*collected)

    def _take_validation(self, update: int, found: dict[str, float]) -> None:
        values = _validated(found)
        self._metrics |= values
        self._validated_at = update
        self._write_event(update, values)

    def _scores_to_come(self, done: int) -> Callable[[], dict[str, Any]] | None:
        """Return what waits for the validation of these weights, if one is under way."""
        beside = (
            self._validate.under_way
            if isinstance(self._validate, AsyncValidation)
            else None
        )
        if beside is None or beside.update != done:
            return None
        before = dict(self._metrics)

        def facts() -> dict[str, Any]:
            metrics = before | _validated(beside.found.result())
            return {"metrics": metrics, "scores": metrics}

        return facts

    def _save(self, state: TrainState, done: int) -> None:
        if self._checkpoints is None:
            return
        self._console.status("saving a checkpoint")
        self._checkpoints.save(
            self._program.unpack_state(state),
            done,
            epoch=self._epoch(done),
            data_position=self._infeed.position,
            samples_per_element=self._program.plan.batching.samples_per_step,
            time=self.elapsed(),
            metrics=self._metrics,
            # Only of these very weights: an older validation says nothing of them.
            scores=self._metrics if self._validated_at == done else {},
            since_log=dataclasses.asdict(self._since_log),
            later=self._scores_to_come(done),
            # Were they lost, a resumed run would not write the events before it again.
            num_events=self._directory.num_events(),
            first=self._directory.sync_metrics,
        )
        self._console.status("training")

    def _finish_saving(self) -> None:
        """Wait for the last checkpoint, so that whoever called the run may resume it."""
        if self._checkpoints is not None:
            self._console.status("saving a checkpoint")
            self._checkpoints.wait()

    def _drain_all(self) -> None:
        while self._pending:
            self._drain()

    def _drain(self) -> None:
        """Wait for the oldest call under way and deal with what it reported."""
        updates, execution_ends, reported = self._pending.popleft()
        values = self._finite.check(reported)
        samples = updates * self._program.plan.batching.global_batch_size
        self._throughput.add(samples, execution_ends=execution_ends)
        for index in range(updates):
            self._drained += 1
            info = {name: float(v[index]) for name, v in values.items()}
            self._since_log = self._since_log.plus(info)
            if self._schedule.due("log", self._drained):
                self._log_event()
        newest = {name: float(value[-1]) for name, value in values.items()}
        newest |= {n: v for n, v in self._metrics.items() if _is_validated(n)}
        speed = self._throughput.per_second()
        self._console.advance(self._drained, newest, speed)

    def _log_event(self) -> None:
        """Report the means since the last report."""
        means, newest = self._since_log.means(), self._since_log.newest
        values = {
            # A schedule's value is of one update; only what was measured is a mean.
            name if name in self._program.extra_info_names else f"train_{name}": (
                newest[name] if name in self._program.extra_info_names else mean
            )
            for name, mean in means.items()
        }
        self._since_log = _Sums()
        self._metrics |= values
        values["samples_per_second"] = self._throughput.per_second()
        self._write_event(self._drained, values)

    def _write_event(self, update: int, values: dict[str, float]) -> None:
        event = {
            "update": update,
            "epoch": self._epoch(update),
            "time": round(self.elapsed(), 3),
            **values,
        }
        for writer in self._writers:
            writer.write(event)
        self._console.event(event)

    def _epoch(self, update: int) -> float:
        return round(update / self._schedule.updates_per_epoch, 6)

    def elapsed(self) -> float:
        """Return the seconds since the run began, those before a resume included."""
        return self._earlier_seconds + time.perf_counter() - self._started

    def _stopping_on_signals(self) -> contextlib.AbstractContextManager[None]:
        """The first Ctrl-C or SIGTERM ends the run after this execution.

        In another thread than the main one, the caller stops us.
        """

        def request(number: int, frame: Any) -> None:
            del frame
            if self._signaled:
                raise KeyboardInterrupt
            self._signaled = True
            _log.warning(
                "%s: finishing the current execution, then saving a checkpoint. "
                "Once more to stop at once.",
                signal.Signals(number).name,
            )

        return handling(request)


_VALIDATION = "validation_"


def _validated(found: dict[str, float]) -> dict[str, float]:
    return {_VALIDATION + name: value for name, value in found.items()}


def _is_validated(name: str) -> bool:
    return name.startswith(_VALIDATION)
