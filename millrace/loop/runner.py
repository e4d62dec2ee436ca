"""Run a training program over a schedule of updates, with the events between them."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millrace.checkpoint.store import Checkpoints
from millrace.distributed import coordination
from millrace.feeds.device import DeviceDataset
from millrace.feeds.infeed import Infeed
from millrace.feeds.reader import GaveUp
from millrace.loop.activity import ActivityStopped, listening
from millrace.loop.callbacks import Callback, Callbacks
from millrace.loop.evaluate import AsyncValidation
from millrace.loop.event_schedule import EventSchedule
from millrace.loop.nan_guard import NonFiniteCheck
from millrace.loop.progress import (
    Display,
    EventLog,
    InputWait,
    MetricSums,
    SavedProgress,
    Throughput,
    TrainingResult,
    Writer,
)
from millrace.loop.staging import Call, Calls
from millrace.loop.stopping import StopRequest
from millrace.loop.trace import Trace
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram

_VALIDATION = "validation_"
"""Prefix of validation metrics in log events."""

Validate = Callable[[TrainState], dict[str, float]]


_POLL_SECONDS = 0.005
_POLLED_CALL_SECONDS = 0.1
"""Calls that take longer are awaited so that a second signal is answered at once."""
_LAST_CALL_SECONDS = 4.0
"""How long a call in flight is awaited once the data has failed."""


class Runner:
    """Runs a training program over a schedule.

    Args:
        program: The program to run.
        infeed: Supplies the batches; a resume moves it to where the checkpoint was saved.
        schedule: Number of updates, and the updates after which events happen.
        directory: Where log events are kept.
        console: Shows the progress.
        writers: Receive the log events.
        checkpoints: Where to save and resume; no checkpoints if not given.
        validate: Returns the validation metrics of a state. Training continues during an
            `AsyncValidation`, which is closed at the end of the run.
        stop_on_divergence: Whether a loss that stays non-finite or explodes ends the run.
            Otherwise it is a warning.
        on_compiled: Called before the first update; an error it raises ends the run.
        loss_falls: Whether a loss that ends far above its start is a failure.
        callbacks: Called after log events, validations and checkpoints.
        trace: Records a few calls.
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
        stop_on_divergence: bool = False,
        on_compiled: Callable[[], None] | None = None,
        loss_falls: bool = True,
        callbacks: Sequence[Callback] = (),
        trace: Trace | None = None,
    ) -> None:
        self._program = program
        self._infeed = infeed
        self._schedule = schedule
        self._directory = directory
        self._console = console
        self._writers = writers
        self._checkpoints = checkpoints
        self._async = validate if isinstance(validate, AsyncValidation) else None
        self._validate = None if isinstance(validate, AsyncValidation) else validate
        self._stop_on_divergence = stop_on_divergence
        self._on_compiled = on_compiled
        self._loss_falls = loss_falls
        self._throughput = Throughput()
        self._trace = trace
        if trace is not None:
            trace.paused = self._throughput.paused
        # Data that is generated on the devices is never waited for.
        is_fed = not isinstance(infeed.dataset, DeviceDataset)
        self._input_wait = InputWait() if is_fed else None
        self._noticed_wait = False
        self._started = time.perf_counter()
        self._earlier_seconds = 0.0
        # JAX returns from a call before the device has finished it. Its info waits here,
        # oldest first, until it is drained: fetched, checked and reported.
        self._pending: collections.deque[Call] = collections.deque()
        self._called = self._drained = 0
        self._since_log = MetricSums()
        self._first_losses: tuple[float, ...] = ()
        self._non_finite_check: NonFiniteCheck | None = None
        self._metrics: dict[str, float] = {}
        self._validated_at = -1
        self._stop = StopRequest(saves=checkpoints is not None)
        self._callbacks = Callbacks(callbacks, self._stop.request_here)
        self._validation_skipped = False

    def run(self, state: TrainState, *, resume: bool = False) -> TrainingResult:
        """Train from `state`, or from the newest checkpoint, to the end of the schedule."""
        if resume:
            state = self._resume(state)
        done = self._drained = self._called = int(state.update)
        self._non_finite_check = NonFiniteCheck(
            self._program.plan,
            done,
            self._schedule.updates_per_epoch,
            stop_on_divergence=self._stop_on_divergence,
            total_updates=self._schedule.total_updates,
            first_losses=self._first_losses,
        )
        total = self._schedule.total_updates
        self._calls = Calls(
            self._program,
            self._infeed,
            execution=self._schedule.updates_between_stops,
            total=total,
            fixed=self._schedule.is_fixed,
        )
        self._console.start(total, done, self.elapsed())
        try:
            self._console.status("waiting for the first data")
            self._infeed.peek()
            self._console.status("compiling")
            self._calls.compile(state, done)
            if self._on_compiled is not None:
                self._on_compiled()
            self._console.status("training")
            with self._stop.on_signals():
                state, done = self._train(state, done, resumed=resume)
                if self._checkpoints is not None:
                    # The run can be resumed as soon as this returns.
                    self._console.status("saving a checkpoint")
                    self._checkpoints.wait()
                    self._callbacks.send_saved(is_done=True)
        except Exception:
            if self._checkpoints is not None:
                # Nothing may be written once the run has failed and been reported.
                self._checkpoints.wait(raise_error=False)
            raise
        finally:
            self._console.stop()
            self._infeed.close()
            if self._input_wait is not None:
                self._input_wait.close()
            if self._async is not None:
                self._async.close()
            if self._trace is not None:
                self._trace.close()
        interrupted = done < total or self._validation_skipped
        return TrainingResult(state, interrupted, self.progress(), self._stop.signal)

    def stop(self) -> None:
        """Ask for the end after the current execution, with a checkpoint.

        With several processes, all must call it at the same update.
        """
        self._stop.request()

    def progress(self) -> dict[str, Any]:
        """Return the progress so far, as ``summary.json`` reports it however a run ends."""
        done = self._drained
        check = self._non_finite_check
        diverged = check.divergence if check is not None else None
        rise = None
        if check is not None and self._loss_falls and not diverged:
            rise = check.find_rise()
        stopped_by = self._callbacks.stopped_by
        return {
            **({"stopped_by": stopped_by} if stopped_by else {}),
            **({"diverged": diverged} if diverged else {}),
            **({"rising_loss": rise} if rise else {}),
            "updates": done,
            "samples": done * self._program.plan.batching.global_batch_size,
            "samples_per_second": self._throughput.per_second(),
            "compile_seconds": self._program.compile_seconds,
            "input_wait": self._input_wait.share if self._input_wait else 0.0,
            "metrics": dict(self._metrics),
        }

    def elapsed(self) -> float:
        """Return the seconds since training began, including those before a resume."""
        return self._earlier_seconds + time.perf_counter() - self._started

    def _resume(self, state: TrainState) -> TrainState:
        restored = None
        if self._checkpoints is not None:
            restored = self._checkpoints.restore_newest(
                self._program.unpack_state(state), check=SavedProgress.read
            )
        # Only now: had restoring failed, config.yml would still describe the old run.
        self._directory.record_extended_options()
        if restored is None:
            self._console.line("No checkpoint yet: starting from the beginning.")
            self._directory.truncate_metrics(0)
            return state
        saved = SavedProgress.read(restored.manifest)
        samples_per_element = self._program.plan.batching.samples_per_step
        position = saved.position_in(samples_per_element)
        # With elements of another size, an iterator's own state would be of other data.
        is_same = saved.samples_per_element == samples_per_element
        self._infeed.seek(position, saved.data_state if is_same else None)
        self._truncate_metrics(saved)
        self._earlier_seconds = saved.time
        self._metrics = dict(saved.metrics)
        self._since_log = saved.since_log
        self._first_losses = saved.first_losses
        self._write_lost_validation(saved)
        self._console.line(f"Resuming after update {saved.update}.")
        return self._program.place_state(restored.state)

    def _truncate_metrics(self, saved: SavedProgress) -> None:
        """Delete events that will be written again; warn if earlier ones are missing."""
        kept = self._directory.truncate_metrics(saved.update)
        if kept < saved.num_events:
            self._console.warning(
                f"metrics.jsonl has only {kept} of the {saved.num_events} log events up to "
                f"update {saved.update}: the others were lost or damaged. The weights are "
                "not affected."
            )

    def _write_lost_validation(self, saved: SavedProgress) -> None:
        """Write the event of a validation whose result only the checkpoint has.

        The checkpoint waits for an `AsyncValidation` of its weights, and the run may be
        killed before it has written the event.
        """
        scores = {n: value for n, value in saved.scores.items() if _is_validation(n)}
        is_logged = any(
            event["update"] == saved.update and any(map(_is_validation, event))
            for event in self._directory.read_metrics()
        )
        if scores and not is_logged and self._async is not None:
            self._write_event(saved.update, scores, is_validation=True)

    def _train(
        self, state: TrainState, done: int, *, resumed: bool
    ) -> tuple[TrainState, int]:
        if resumed and done:
            self._make_up_for_validation(state, done)
        self._throughput.start()
        if self._input_wait is not None:
            self._input_wait.start()
        self._calls.pace.start()
        ended = True
        while done < self._schedule.total_updates and not (
            ended and self._stop.should_stop()
        ):
            if self._trace is not None:
                self._trace.advance(done, self._drain_all)
            try:
                chunk = self._next_chunk()
            except GaveUp:
                break
            at_most = self._schedule.next_stop(done) - done
            # It may compile for calls of another length.
            with listening(should_stop=self._is_cut_short):
                state, call = self._calls.run(state, chunk, done, at_most)
            done = self._called = done + call.updates
            ended = call.ends_execution
            self._pending.append(call)
            # Draining the older call here overlaps with the one just queued.
            while len(self._pending) >= self._calls.max_in_flight:
                self._drain()
            if not ended:
                continue
            if self._stop.is_first_point:
                # Throughput is measured from here, so nothing may be in flight: on a GPU,
                # a call returns only when most of its work is done.
                self._drain_all()
            self._stop.pass_point()
            self._handle_events(state, done)
        if self._trace is not None:
            self._trace.stop(done, self._drain_all)
        self._drain_all()
        # A signal may have come since the loop last looked.
        if self._stop.should_stop():
            self._save(state, done)
        self._collect_validation(wait=True)
        return state, done

    def _next_chunk(self) -> Any:
        newest = self._pending[-1].info if self._pending else None
        waiting = contextlib.nullcontext()
        if self._input_wait is not None:
            waiting = self._input_wait.waiting(newest)
        try:
            with waiting:
                # With fixed executions, one that has begun is finished.
                give_up = None if self._schedule.is_fixed else self._stop.is_cut_short
                return self._calls.next_chunk(give_up)
        except Exception:
            self._drain_all()  # report what was computed before the data failed
            raise

    def _handle_events(self, state: TrainState, done: int) -> None:
        """Validate and save if that is due after `done` updates."""
        self._send_saved()
        validates = self._validate is not None or self._async is not None
        validate = validates and self._schedule.due("validate", done)
        save = self._schedule.due("checkpoint", done)
        if validate or save:
            # All log events up to here must be written before the checkpoint counts them.
            self._drain_all()
            if self._trace is not None:
                self._trace.stop(done, self._drain_all)
        # A checkpoint contains the metrics so far, and only one validation can be pending.
        self._collect_validation(wait=validate or save)
        if not validate and not save:
            return
        wait = self._input_wait
        not_waiting = contextlib.nullcontext() if wait is None else wait.paused()
        with self._throughput.paused(), not_waiting:
            if validate:
                self._start_validation(state, done)
            # Looked at only now: Ctrl-C may have come during the validation.
            if save or self._stop.should_stop():
                self._save(state, done)
        self._calls.pace.start()

    def _start_validation(self, state: TrainState, done: int) -> None:
        whole_state = self._program.unpack_state(state)
        if self._async is not None:
            with listening(show=lambda *_: None, should_stop=self._is_cut_short):
                self._async.start(whole_state, done)
        elif self._validate is not None:
            self._console.status("validating")
            try:
                with listening(should_stop=self._is_cut_short):
                    metrics = self._validate(whole_state)
            except ActivityStopped:
                self._validation_skipped = True
            else:
                self._log_validation(done, metrics)
                self._console.status("training")

    def _make_up_for_validation(self, state: TrainState, done: int) -> None:
        """Validate the restored weights if the run was interrupted before it did."""
        validates = self._validate is not None or self._async is not None
        is_logged = any(
            event["update"] == done and any(map(_is_validation, event))
            for event in self._directory.read_metrics()
        )
        is_logged = coordination.broadcast("validation-is-logged", is_logged)
        if not validates or is_logged or not self._schedule.due("validate", done):
            return
        self._start_validation(state, done)
        self._collect_validation(wait=True)
        if self._checkpoints is not None and self._validated_at == done:
            self._checkpoints.add_scores(done, self._metrics)

    def _collect_validation(self, *, wait: bool) -> None:
        """Log the metrics of an asynchronous validation that is done."""
        if self._async is None:
            return
        try:
            collected = self._async.collect(wait=wait)
        except ActivityStopped:
            self._validation_skipped = True
            return
        if collected is not None:
            self._log_validation(*collected)

    def _log_validation(self, update: int, metrics: dict[str, float]) -> None:
        values = _with_prefix(metrics)
        self._metrics |= values
        self._validated_at = update
        if self._checkpoints is not None and self._checkpoints.best_by is not None:
            self._checkpoints.best_by.check(self._metrics)
        self._write_event(update, values, is_validation=True)

    def _save(self, state: TrainState, done: int) -> None:
        if self._checkpoints is None:
            return
        assert self._non_finite_check is not None
        self._console.status("saving a checkpoint")
        self._checkpoints.wait()
        self._send_saved()
        self._callbacks.start_saving(done, self._checkpoints.path_after(done))
        self._checkpoints.save(
            self._program.unpack_state(state),
            done,
            epoch=self._epoch(done),
            data_position=self._infeed.position,
            data_state=self._infeed.state(),
            samples_per_element=self._program.plan.batching.samples_per_step,
            time=self.elapsed(),
            metrics=self._metrics,
            # An older validation says nothing about these weights.
            scores=self._metrics if self._validated_at == done else {},
            since_log=dataclasses.asdict(self._since_log),
            first_losses=self._non_finite_check.first_losses,
            late_metadata=self._pending_scores(done),
            num_events=self._directory.num_events(),
            # A resumed run does not write the events before the checkpoint again, so they
            # must be on disk before it is.
            before_rename=self._directory.sync_metrics,
        )
        self._console.status("training")

    def _send_saved(self) -> None:
        is_done = self._checkpoints is not None and self._checkpoints.is_written
        self._callbacks.send_saved(is_done=is_done)

    def _pending_scores(self, done: int) -> Callable[[], dict[str, Any]] | None:
        """Return a function that waits for the validation of these weights, if pending."""
        pending = self._async.pending if self._async is not None else None
        if pending is None or pending.update != done:
            return None
        metrics_before = dict(self._metrics)

        def wait_for_scores() -> dict[str, Any]:
            try:
                metrics = metrics_before | _with_prefix(pending.metrics.result())
            except ActivityStopped:
                return {}
            return {"metrics": metrics, "scores": metrics}

        return wait_for_scores

    def _is_cut_short(self) -> bool:
        """Whether what the run is doing should end: on a signal, or without more data."""
        return self._data_failure is not None or self._stop.is_cut_short()

    @property
    def _data_failure(self) -> BaseException | None:
        """Why the next updates cannot be made; None if no more are needed."""
        needs_data = self._called < self._schedule.total_updates
        return self._infeed.failure if needs_data else None

    def _drain_all(self) -> None:
        while self._pending:
            self._drain()

    def _drain(self) -> None:
        """Wait for the oldest call in flight, and report its updates."""
        call = self._pending.popleft()
        if (self._calls.pace.call_seconds or 1.0) > _POLLED_CALL_SECONDS:
            self._wait_for(call.info)
        assert self._non_finite_check is not None
        values = self._non_finite_check.check(call.info, call.updates)
        self._calls.pace.add(call.updates)
        samples = call.updates * self._program.plan.batching.global_batch_size
        self._throughput.add(samples, execution_ends=call.ends_execution)
        for index in range(call.updates):
            self._drained += 1
            metrics = {name: float(v[index]) for name, v in values.items()}
            self._since_log = self._since_log.add(metrics)
            if self._schedule.due("log", self._drained):
                self._log_means()
        newest = {name: float(value[-1]) for name, value in values.items()}
        newest |= {n: v for n, v in self._metrics.items() if _is_validation(n)}
        self._console.advance(self._drained, newest, self._throughput.per_second())

    def _wait_for(self, info: Any) -> None:
        """Wait for a call in Python, where signals are handled, and not in C++."""
        last_moment = None
        for value in info.values():
            is_ready = getattr(value, "is_ready", None)
            while is_ready is not None and not is_ready():
                time.sleep(_POLL_SECONDS)
                if (failure := self._data_failure) is None:
                    continue
                last_moment = last_moment or time.monotonic() + _LAST_CALL_SECONDS
                if time.monotonic() > last_moment:
                    raise failure

    def _log_means(self) -> None:
        """Write an event with the means since the last one."""
        values = {}
        for name, mean in self._since_log.means().items():
            # What a schedule computes, such as the learning rate, is not averaged.
            if name in self._program.extra_info_names:
                values[name] = self._since_log.newest[name]
            else:
                values[f"train_{name}"] = mean
        self._since_log = MetricSums()
        self._metrics |= values
        values["samples_per_second"] = self._throughput.per_second()
        if self._input_wait is not None:
            if (share := self._input_wait.take_share()) is not None:
                values["input_wait"] = round(share, 4)
            self._notice_wait(self._input_wait)
        self._write_event(self._drained, values)

    def _notice_wait(self, input_wait: InputWait) -> None:
        """Say once that the devices wait for data, with what can be done about it."""
        if self._noticed_wait or not input_wait.is_notable():
            return
        self._noticed_wait = True
        advice = getattr(self._infeed.dataset, "advice", "Prepare the data in advance.")
        self._console.warning(
            f"The devices waited for data {input_wait.share:.0%} of the time: the host "
            f"supplies {self._throughput.per_second():,.0f} samples/s. {advice}"
        )

    def _write_event(
        self, update: int, values: dict[str, float], *, is_validation: bool = False
    ) -> None:
        event = {
            "update": update,
            "epoch": self._epoch(update),
            "time": round(self.elapsed(), 3),
            **values,
        }
        for writer in self._writers:
            writer.write(dict(event))  # one may change it
        self._console.event(event)
        self._callbacks.send_event(event, is_validation=is_validation)

    def _epoch(self, update: int) -> float:
        return round(update / self._schedule.updates_per_epoch, 6)


def _with_prefix(metrics: Any) -> dict[str, float]:
    """Return the metrics of a validation, which may be arrays, as numbers by name."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"A validation must return a dict of metrics, got {type(metrics).__name__}."
        )
    for name, value in metrics.items():
        if np.ndim(value):
            raise TypeError(
                f"The metric {name} of a validation must be a number, got the shape "
                f"{np.shape(value)}."
            )
    return {_VALIDATION + name: np.asarray(v).item() for name, v in metrics.items()}


def _is_validation(name: str) -> bool:
    return name.startswith(_VALIDATION)
