"""One run of a command: opened, executed, reported and closed."""

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from millrace.checkpoint.best import BestMetric, Mode, parse_best
from millrace.checkpoint.store import Checkpoints
from millrace.config import ConfigurationError, as_plain
from millrace.distributed import coordination
from millrace.distributed.coordination import check_same_data, check_same_start
from millrace.distributed.environment import record_run_directory
from millrace.distributed.heartbeat import is_communication_error, start_heartbeat
from millrace.distributed.signals import (
    INTERRUPTED,
    acting_before_end,
    end_with_signal_while,
    interruptible,
    last_signal,
)
from millrace.feeds.infeed import Infeed
from millrace.loop.activity import listening
from millrace.loop.callbacks import Callback, check_callbacks
from millrace.loop.evaluate import AsyncValidation
from millrace.loop.event_schedule import EventSchedule
from millrace.loop.progress import Writer, check_trackers
from millrace.loop.runner import Runner, Validate
from millrace.loop.trace import Trace
from millrace.output import dropping_lost_output, error_line
from millrace.plan import Plan
from millrace.program.compiling import (
    chosen_persistent_cache,
    compiling,
    deterministic,
    is_compiling,
    refuse_persistent_cache,
)
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram
from millrace.report.run_page import write_report
from millrace.run.console import (
    Console,
    SilentConsole,
    determinism_rows,
    extension_rows,
    result_rows,
    result_styles,
    time_and_memory_rows,
    training_rows,
)
from millrace.run.directory import RunDirectory, open_shared_run_directory
from millrace.run.errors import error_message, find_line, format_error
from millrace.run.options import RunOptions
from millrace.run.process import (
    check_address_space,
    compile_cache_folder,
    prepare_process,
)
from millrace.run.profile import report_profile
from millrace.run.provenance import (
    add_previous_times,
    complete_command,
    run_metadata,
    write_phases,
)
from millrace.run.saved import find_best_result
from millrace.run.stuck import watching_progress
from millrace.run.writers import Tracker, open_writers
from millrace.storage.address import display
from millrace.storage.upload import UploadError
from millrace.trust import find_writers
from millrace.versions import versions

_USAGE_ERROR = 2
"""The exit status after a wrong option, as shells and argparse have it."""
_VERDICTS = ("diverged", "rising_loss")
"""Entries of the summary about a loss that is not as it should be."""
_STOPPED = {"status": "interrupted", "error": "stopped immediately"}


class Run:
    """What an application needs around its program; ``run_command`` creates it."""

    def __init__(
        self,
        options: RunOptions,
        directory: RunDirectory,
        console: Console,
        writers: list[Writer],
        command_line: str,
    ) -> None:
        self.options = options
        self.directory = directory
        self.console = console
        self.writers = writers
        # Pessimistic: it says "failed" until the run has completed.
        self.summary: dict[str, Any] = {
            "status": "failed",
            "error": None,
            "command": command_line,
            "device": None,
            "updates": 0,
            "samples": 0,
            "samples_per_second": 0.0,
            "compile_seconds": 0.0,
            "input_wait": 0.0,
            "metrics": {},
            "versions": versions(),
        }
        self.closing_notes: dict[str, str] = {}
        """Rows that the application adds to the table at the end of the run."""
        self.callbacks: list[Callback] = []
        """Called between executions of every training; closed at the end of the run."""
        self.closed_at_end: list[Callback | Writer] = []
        """Callbacks and trackers of a single training."""
        self.signal: int | None = None
        """The signal that ended training, if one did."""
        self._runner: Runner | None = None
        self._best_by: BestMetric | None = None
        self._checkpoint_folder: Path = directory.home / "checkpoints"
        self._previous_summary: dict[str, Any] = {}
        if options.resume:
            self._previous_summary = coordination.broadcast(
                "summary-before", directory.pop_summary()
            )

    def describe(
        self,
        devices: Sequence[Any],
        plan: Plan,
        schedule: EventSchedule | None,
        **details: str,
    ) -> None:
        """Print what the run will do, and record it in the summary.

        All processes must call it: they check that they are about to use the same data.

        Args:
            devices: The devices of the program.
            plan: Its plan.
            schedule: Its schedule; None if nothing is trained.
            **details: More rows, such as the model and the dataset.
        """
        training = training_rows(plan, schedule) if schedule else {}
        check_same_data(details | training)
        first = devices[0]
        self.summary["device"] = {
            "platform": first.platform,
            "kind": first.device_kind,
            "count": len(devices),
        }
        half_type = f" ({plan.half_type})" if "16" in plan.precision else ""
        self.summary["facts"] = rows = {
            "device": f"{len(devices)} x {first.device_kind} ({first.platform})",
            **details,
            "precision": plan.precision + half_type,
            **determinism_rows(first.platform, self.options.deterministic),
            **training,
            **extension_rows(self.directory.extended_options),
        }
        self.console.table(rows | {"run directory": display(self.directory.home)})
        for warning in schedule.warnings if schedule else ():
            self.console.warning(warning)

    @contextlib.contextmanager
    def checkpoints(
        self,
        *,
        best: str | None = None,
        mode: Mode | None = None,
        keep: int = 3,
        folder: Path | None = None,
    ) -> Iterator[Checkpoints]:
        """Open the checkpoints of this run.

        Args:
            best: The metric by which the best checkpoint is kept, such as
                ``validation_accuracy``; a minus sign in front, as in ``-validation_loss``,
                means that smaller is better (default: only the newest ones are kept).
            mode: ``max`` if larger is better, ``min`` if smaller is (default: ``min`` for a
                minus sign or a name that contains loss, error, rmse or mae).
            keep: Number of newest checkpoints to keep.
            folder: Where they are (default: in the run directory).
        """
        self._checkpoint_folder = folder or self.directory.checkpoints
        self.track_best(best, mode=mode)
        checkpoints = Checkpoints(
            self._checkpoint_folder,
            keep=keep,
            best_by=self._best_by,
            on_change=self.request_upload,
        )
        try:
            yield checkpoints
        finally:
            checkpoints.close()

    def request_upload(self) -> None:
        """Upload what has changed in the background, if the run is in object storage."""
        if self.directory.uploader is not None:
            self.directory.uploader.request()

    @property
    def place(self) -> str:
        """Where the results are: in object storage, or in a folder."""
        uploader, home = self.directory.uploader, self.directory.home
        is_elsewhere = uploader is not None and not uploader.is_done
        return str(home) if is_elsewhere else display(home)

    def track_best(self, metric: str | None, *, mode: Mode | None = None) -> None:
        """Report the best value of a metric, as ``checkpoints`` takes it."""
        self._best_by = parse_best(metric, mode)

    def find_best(self) -> dict[str, Any] | None:
        """Return the best validation result so far, as ``summary.json`` has it, if any."""
        if self._best_by is None:
            return None
        folder, events = self._checkpoint_folder, self.directory.read_metrics()
        return find_best_result(self._best_by, folder, events, self.directory.home)

    def train(
        self,
        program: TrainingProgram,
        state: TrainState,
        infeed: Infeed,
        schedule: EventSchedule,
        *,
        validate: Validate | AsyncValidation | None = None,
        checkpoints: Checkpoints | None = None,
        stop_on_divergence: bool = False,
        on_compiled: Callable[[], None] | None = None,
        loss_falls: bool = True,
        resume: bool | None = None,
        callbacks: Sequence[Callback] = (),
        trackers: Sequence[Writer] = (),
    ) -> TrainState:
        """Train to the end of the schedule; the summary records the progress.

        Args:
            program: The training program.
            state: The initial state; with ``--resume``, the newest checkpoint replaces it.
            infeed: Supplies the batches.
            schedule: Number of updates, and the updates after which events happen.
            validate: Returns the validation metrics of a state. With an `AsyncValidation`,
                training continues meanwhile.
            checkpoints: Where to save and resume; see ``Run.checkpoints``.
            stop_on_divergence: Whether a loss that stays non-finite or explodes ends the
                run. Otherwise it is a warning, and the summary says so.
            loss_falls: Whether a positive loss that ends far above its start is a failure,
                which the summary reports. Turn it off for losses that may rise, such as
                those of two networks that compete.
            on_compiled: Called before the first update; an error it raises ends the run.
            resume: Whether to start from the newest of `checkpoints` (default: with
                ``--resume``). A run in parts continues the part before in this way.
            callbacks: Called after log events, validations and checkpoints, after those in
                ``run.callbacks``.
            trackers: Receive the log events, as those in ``run.writers`` do. Trackers by
                name are an option of the run: ``RunOptions.tracker``.
        """
        own, writers = check_callbacks(callbacks), check_trackers(trackers)
        opened = [*own, *writers]
        self.closed_at_end += [each for each in opened if each not in self.closed_at_end]
        trace = self._make_trace(program)
        self._runner = runner = Runner(
            program,
            infeed,
            schedule,
            directory=self.directory,
            console=self.console,
            writers=[*self.writers, *(writers if coordination.is_first() else [])],
            checkpoints=checkpoints,
            validate=validate,
            stop_on_divergence=stop_on_divergence,
            on_compiled=on_compiled,
            loss_falls=loss_falls,
            callbacks=[*self.callbacks, *own],
            trace=trace,
        )
        try:
            with self.watching(has_long_calls=schedule.is_fixed):
                result = runner.run(
                    state, resume=bool(self.options.resume) if resume is None else resume
                )
        finally:
            progress = runner.progress()
            if not progress["samples_per_second"]:  # a resumed run had nothing left to do
                before = self._previous_summary
                progress["samples_per_second"] = before.get("samples_per_second", 0.0)
                progress |= {name: before[name] for name in _VERDICTS if name in before}
            self.summary |= progress
        if trace is not None:
            facts, self.closing_notes["profile"] = report_profile(
                self.directory.path, trace
            )
            self.summary |= facts
        self.signal = result.signal
        self.summary["status"] = "interrupted" if result.interrupted else "completed"
        if not result.interrupted:  # a callback asked for the end when it had come
            self.summary.pop("stopped_by", None)
        return result.state

    def watching(
        self, *, has_long_calls: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """End the run if nothing moves in the block for ``--stuck-timeout`` seconds.

        ``train`` does so for training. What happens in the block must report progress.

        Args:
            has_long_calls: Whether the plan asks for calls that may take any time.
        """
        return watching_progress(
            self.options.stuck_timeout,
            self.directory.home,
            self.record_failure,
            has_long_calls=has_long_calls,
        )

    def _make_trace(self, program: TrainingProgram) -> Trace | None:
        if not self.options.profile or not coordination.is_first():
            return None
        folder = self.directory.path / "profile"
        return Trace(folder, compiled_once=program.runs_parts)

    def forget_verdicts(self) -> None:
        """Drop what training said about its loss, which was that of several models."""
        for name in _VERDICTS:
            self.summary.pop(name, None)

    def stop(self) -> None:
        """Ask training to end after the current execution, with a checkpoint."""
        assert self._runner is not None, "nothing is being trained"
        self._runner.stop()

    @property
    def is_untrained(self) -> bool:
        """Whether nothing was trained so far."""
        return self._runner is None

    def elapsed(self) -> float:
        """Return the seconds since training began, including those before a resume."""
        assert self._runner is not None, "nothing has been trained"
        return self._runner.elapsed()

    def previous_summary(self) -> dict[str, Any]:
        """Return the summary of this run before it was resumed; empty if there is none."""
        return self._previous_summary

    def record_failure(self, line: str) -> None:
        """Write a summary; this process is about to exit, perhaps from another thread."""
        if self._runner is not None:
            self.summary |= self._runner.progress()
        self.summary |= {"status": "failed", "error": line}
        self.directory.write_summary(self.summary)


@dropping_lost_output()
def run_command(
    function: Callable[[Any, Run], Any],
    config: Any,
    *,
    command: str,
    command_line: str,
    on_failure: Callable[[Exception], None] | None = None,
) -> int:
    """Run the function of an application in a run directory; return the exit status.

    Args:
        function: ``(config, run)``; does the work.
        config: Its configuration, with a section ``run``.
        command: The name of the command, such as ``cnn-train``.
        command_line: The command line that repeats the run.
        on_failure: Called with the error by which the run fails, which is printed as well.
    """
    check_address_space()
    config = prepare_process(config)
    check_same_start(config, command)
    run = _open_run(config, command, command_line)
    started = time.time()
    programs: list[jax.stages.Compiled] = []
    with acting_before_end(functools.partial(_record_end, run)):
        status = _execute(run, function, config, command, programs, on_failure)
        run.summary["wall_seconds"] = time.time() - started
        run.summary |= run_metadata(config, run.console.phases, programs)
        if run.options.resume:
            add_previous_times(run.summary, run.previous_summary())
            run.summary["command"] = complete_command(
                command_line, run.summary["changed_options"]
            )
        if "best" not in run.summary and (best := run.find_best()) is not None:
            run.summary["best"] = best
        status = _close(run, status, on_failure)
    if status != _USAGE_ERROR:
        _print_result(run)
    return status


def _open_run(config: Any, command: str, command_line: str) -> Run:
    options = config.run
    # One process talks to the user.
    console_type = Console if coordination.is_first() else SilentConsole
    console = console_type(quiet=options.quiet, verbose=options.verbose)
    directory = open_shared_run_directory(
        options.run_dir, config, command=command, resume=options.resume
    )
    return Run(options, directory, console, [], command_line)


def _execute(
    run: Run,
    function: Callable[[Any, Run], Any],
    config: Any,
    command: str,
    programs: list[jax.stages.Compiled],
    on_failure: Callable[[Exception], None] | None,
) -> int:
    """Call the application; return the exit status, with its errors in the summary.

    Everything that is compiled is appended to `programs`.
    """
    options, directory = run.options, run.directory
    if (peers := start_heartbeat()) is not None:
        peers.on_lost = lambda line: run.record_failure(f"LostInstance: {line}")
    try:
        if coordination.is_first():
            record_run_directory(directory.path)
            run.writers += open_writers(options, directory, as_plain(config), command)
        with (
            interruptible(),
            deterministic(options.deterministic),
            compiling({}, programs, cache_dir=_find_compile_cache(run.console)),
            listening(show=run.console.progress),
            _stopping(run.console),
        ):
            function(config, run)
            if options.profile and run.is_untrained:
                run.console.warning("--profile has no effect: nothing was trained.")
        return INTERRUPTED if run.summary["status"] == "interrupted" else 0
    except KeyboardInterrupt:
        run.summary |= _STOPPED
        run.signal = last_signal()
        end_with_signal_while(is_compiling)
        if peers is not None:
            peers.report_failure("It was stopped immediately.", INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        if peers is not None and is_communication_error(error):
            # Probably another process is lost. Its name is a better message than the error
            # of a collective, and the thread that finds out ends this process.
            peers.wait_for_lost_process()
        line = f"{type(error).__name__}: {error_message(error)}"
        run.summary |= {"status": "failed", "error": line}
        if (user_line := find_line(error)) is not None:
            run.summary["error_line"] = str(user_line)
        if on_failure is not None:
            on_failure(error)
        if options.debug:
            traceback.print_exc()
        status = _USAGE_ERROR if isinstance(error, ConfigurationError) else 1
        _report_failure(format_error(error), status, silent=options.debug)
        return status


def _find_compile_cache(console: Console) -> Path | None:
    """Return the folder of compiled programs, unless others could put theirs there."""
    chosen = chosen_persistent_cache()
    if chosen and "://" not in chosen and (reason := find_writers(Path(chosen))):
        console.warning(
            "Compiled programs in JAX_COMPILATION_CACHE_DIR are not used, because "
            f"{reason}. Choose a folder of your own."
        )
        refuse_persistent_cache()
    folder = compile_cache_folder()
    if (reason := find_writers(folder)) is None:
        return folder
    console.warning(f"Compiled programs are not kept in {folder}, because {reason}.")
    return None


def _record_end(run: Run) -> None:
    """Leave a summary: the process ends without the main thread, which may be in C++."""
    run.console.stop()
    if coordination.is_first():
        stopped = {} if run.summary["status"] == "completed" else _STOPPED
        run.directory.write_summary(run.summary | stopped)
    run.console.line(f"interrupted; partial results are in {run.place}")


@contextlib.contextmanager
def _stopping(console: Console) -> Iterator[None]:
    """Remove the progress bar at the end, before anything is printed about it."""
    try:
        yield
    finally:
        console.stop()


def _close(run: Run, status: int, on_failure: Callable[[Exception], None] | None) -> int:
    """Write the results and release the directory; return the final exit status."""
    # Only the first process writes; all of them wait until it has.
    actions = _closing_actions(run, status) if coordination.is_first() else []
    for action in [*actions, functools.partial(_finish_upload, run)]:
        try:
            action()
        except Exception as error:
            if not status and on_failure is not None:
                on_failure(error)
            status = status or 1
            _report_failure(format_error(error), status)
    run.directory.close()
    peers = start_heartbeat()
    if status in (0, INTERRUPTED) and not (peers and peers.failure_status):
        coordination.barrier("end")
    return status


def _closing_actions(run: Run, status: int) -> list[Callable[[], Any]]:
    """Return what is left to do; each action is tried even if another one fails."""
    directory, resumed = run.directory, bool(run.options.resume)
    for writer in run.writers:
        if isinstance(writer, Tracker):
            writer.exit_status = status
    actions: list[Callable[[], Any]] = [
        each.close for each in (*run.callbacks, *run.closed_at_end, *run.writers)
    ]
    nothing_ran = not directory.metrics_path.exists() and not resumed
    if status == _USAGE_ERROR and nothing_ran:
        return [*actions, directory.discard]  # the corrected command can use its name
    if status == _USAGE_ERROR and run.previous_summary():
        # The results of the run before it was resumed are as valid as before.
        write_previous = functools.partial(directory.write_summary, run.previous_summary())
        return [*actions, write_previous]
    phases = run.console.phases
    return [
        *actions,
        functools.partial(directory.write_summary, run.summary),
        functools.partial(write_phases, directory.path, phases, resumed=resumed),
        functools.partial(write_report, directory.path),
    ]


def _finish_upload(run: Run) -> None:
    """Wait until all results are in object storage, if they belong there."""
    uploader = run.directory.uploader
    if uploader is None or uploader.is_discarded:
        return
    try:
        with interruptible():
            uploader.finish(run.options.upload_timeout, run.console.line)
    except KeyboardInterrupt:
        raise UploadError(uploader.describe_missing()) from None


def _report_failure(line: str, status: int, *, silent: bool = False) -> None:
    """Print an error once, even if all processes have it."""
    peers = start_heartbeat()
    if peers is not None:
        peers.report_failure(line, status)
        silent |= not coordination.is_first() and peers.wait_for_first_failure(3.0) == line
    if not silent:
        error_line(line)


def _print_result(run: Run) -> None:
    if run.summary["status"] == "failed":
        run.console.line(f"failed; partial results are in {run.place}")
        return
    has_report = (run.directory.home / "report.html").exists()  # a disk may be full
    run.console.table(
        {
            **result_rows(run.summary),
            **run.closing_notes,
            **(time_and_memory_rows(run.summary) if run.console.verbose else {}),
            "results": run.place,
            **({"report": f"{run.place}/report.html"} if has_report else {}),
        },
        result_styles(run.summary),
    )
