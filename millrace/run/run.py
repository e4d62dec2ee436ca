"""One run of one command: its directory, its screen, and an account of how it ended."""

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from millrace.checkpoint.store import Checkpoints
from millrace.config import ConfigurationError, as_plain, flat_options, replace_options
from millrace.distributed import coordination
from millrace.distributed.agreement import check_same_data, check_same_start
from millrace.distributed.environment import (
    find_process_info,
    note_run_directory,
    noted_run_directory,
)
from millrace.distributed.heartbeat import communication_failed, watch_launcher, watch_peers
from millrace.distributed.interrupts import INTERRUPTED, interruptible
from millrace.drawing.numbers import byte_size, duration
from millrace.feeds.infeed import Infeed
from millrace.loop.async_validation import AsyncValidation
from millrace.loop.event_schedule import EventSchedule
from millrace.loop.runner import Runner, Validate, Writer
from millrace.output import dropping_lost_output, error_line
from millrace.plan import Plan
from millrace.program.compiling import compiling, deterministic
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram
from millrace.report.run_page import write_report
from millrace.run.console import Console, figure
from millrace.run.directory import RunDirectory, open_for_all
from millrace.run.options import RunOptions, run_options
from millrace.run.process import (
    check_address_space,
    kept_programs_folder,
    use_virtual_devices,
)
from millrace.run.provenance import add_earlier, run_metadata, write_phases
from millrace.run.writers import open_writers
from millrace.versions import versions

_WRONG_COMMAND = 2


class Run:
    """What an application needs around its program; ``run_command`` makes one."""

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
        self.summary: dict[str, Any] = {
            "status": "failed",
            "error": None,
            "command": command_line,
            "device": None,
            "updates": 0,
            "samples": 0,
            "samples_per_second": 0.0,
            "compile_seconds": 0.0,
            "metrics": {},
            "versions": versions(),
        }
        self._runner: Runner | None = None
        self._before: dict[str, Any] = {}
        if options.resume:
            self._before = coordination.broadcast(
                "summary-before", directory.take_summary()
            )
        self.closing_facts: dict[str, str] = {}
        """What the application has to say at the end, besides the metrics."""

    def describe(
        self,
        devices: Sequence[Any],
        plan: Plan,
        schedule: EventSchedule | None,
        **facts: str,
    ) -> None:
        """Say what will happen, before it does; without a schedule, no training.

        All processes must call it: they compare what they are about to train on.
        """
        check_same_data(facts | (_training_facts(plan, schedule) if schedule else {}))
        first = devices[0]
        self.summary["device"] = {
            "platform": first.platform,
            "kind": first.device_kind,
            "count": len(devices),
        }
        half = f" ({plan.half_type})" if "16" in plan.precision else ""
        self.summary["facts"] = shown = {
            "device": f"{len(devices)} x {first.device_kind} ({first.platform})",
            **facts,
            "precision": plan.precision + half,
            **_repeatability(first.platform, self.options.deterministic),
            **(_training_facts(plan, schedule) if schedule else {}),
            **_grown_facts(self.directory.grown),
        }
        self.console.facts(shown | {"run directory": str(self.directory.home)})
        for warning in schedule.warnings if schedule else ():
            self.console.warning(warning)

    @contextlib.contextmanager
    def checkpoints(
        self, *, best: str, keep: int, folder: Path | None = None
    ) -> Iterator[Checkpoints]:
        """Open this run's checkpoints; of `best`, a larger value is better."""
        checkpoints = Checkpoints(
            folder or self.directory.checkpoints,
            keep=keep,
            better=lambda new, old: new.get(best, -1.0) > old.get(best, -1.0),
        )
        try:
            yield checkpoints
        finally:
            checkpoints.close()

    def train(
        self,
        program: TrainingProgram,
        state: TrainState,
        infeed: Infeed,
        schedule: EventSchedule,
        *,
        validate: Validate | AsyncValidation | None = None,
        checkpoints: Checkpoints | None = None,
        stops_diverged: bool = False,
        when_compiled: Callable[[], None] | None = None,
    ) -> TrainState:
        """Train to the end of the schedule; the summary records how far the run came.

        Args:
            program: The training program.
            state: The initial state; with ``--resume``, the newest checkpoint replaces it.
            infeed: Where batches come from.
            schedule: How many updates, and after which of them the host does what.
            validate: Returns the validation metrics of a state. With an `AsyncValidation`,
                training continues meanwhile.
            checkpoints: Where to save and resume; see ``Run.checkpoints``.
            stops_diverged: Whether a loss that stays non-finite ends the run. Otherwise it
                is a warning.
            when_compiled: Called before the first update; an error it raises ends the run.
        """
        before = self.summary_before()
        self._runner = runner = Runner(
            program,
            infeed,
            schedule,
            directory=self.directory,
            console=self.console,
            writers=self.writers,
            checkpoints=checkpoints,
            validate=validate,
            stops_diverged=stops_diverged,
            when_compiled=when_compiled,
        )
        try:
            result = runner.run(state, resume=self.options.resume)
        finally:
            progress = runner.progress()
            if not progress["samples_per_second"]:  # nothing was left to do
                progress["samples_per_second"] = before.get("samples_per_second", 0.0)
            self.summary |= progress
        self.summary["status"] = "interrupted" if result.interrupted else "completed"
        return result.state

    def stop(self) -> None:
        """Ask training to end after the current execution, with a checkpoint."""
        assert self._runner is not None, "nothing is being trained"
        self._runner.stop()

    def elapsed(self) -> float:
        """Return the seconds since training began, those before a resume included."""
        assert self._runner is not None, "nothing has been trained"
        return self._runner.elapsed()

    def summary_before(self) -> dict[str, Any]:
        """Return the summary that an earlier part of this run has left, if any."""
        return self._before

    def account_for_loss(self, line: str) -> None:
        """Say in the summary that another process was lost; this one is about to leave."""
        if self._runner is not None:
            self.summary |= self._runner.progress()
        self.summary |= {"status": "failed", "error": f"LostInstance: {line}"}
        self.directory.write_summary(self.summary)


@dropping_lost_output()
def run_command(
    function: Any,
    config: Any,
    *,
    command: str,
    command_line: str,
    on_failure: Callable[[Exception], None] | None = None,
) -> int:
    """Run an application's function inside a run directory; return the exit status.

    Args:
        function: ``(config, run)``.
        config: Its configuration, with the section ``run``.
        command: Such as ``cnn-train``.
        command_line: How to do the same again.
        on_failure: Called with the error that ended it, besides its being printed.
    """
    check_address_space()
    config = _prepare_process(config)
    options = run_options(config)
    check_same_start(config, command)
    kind = Console if coordination.is_first() else _Unheard
    console = kind(quiet=options.quiet, verbose=options.verbose)
    directory = open_for_all(
        options.run_dir, config, command=command, resume=options.resume
    )
    started = time.time()
    writers: list[Writer] = []
    run = Run(options, directory, console, writers, command_line)
    if (peers := watch_peers()) is not None:
        peers.on_lost = run.account_for_loss
    status = 1
    programs: list[jax.stages.Compiled] = []
    try:
        if coordination.is_first():
            note_run_directory(directory.path)
            writers += open_writers(options, directory, as_plain(config), command)
        with (
            interruptible(),
            deterministic(options.deterministic),
            compiling({}, programs, cache_dir=kept_programs_folder()),
        ):
            function(config, run)
        interrupted = run.summary["status"] == "interrupted"
        status = INTERRUPTED if interrupted else 0
    except KeyboardInterrupt:
        run.summary |= {"status": "interrupted", "error": "stopped at once"}
        status = INTERRUPTED
        if peers is not None:
            peers.tell_failure("It was stopped at once.", status)
    except Exception as error:
        if peers is not None and communication_failed(error):
            peers.wait_for_verdict()
        status = _WRONG_COMMAND if isinstance(error, ConfigurationError) else 1
        message = " ".join(str(error).split()) or type(error).__name__
        run.summary |= {
            "status": "failed",
            "error": f"{type(error).__name__}: {message}",
        }
        if on_failure is not None:
            on_failure(error)
        if options.debug:
            traceback.print_exc()
        _report_failure(_plain(error, message), status, silently=options.debug)
    run.summary["wall_seconds"] = time.time() - started
    run.summary |= run_metadata(config, console.phases, programs)
    if options.resume:
        add_earlier(run.summary, run.summary_before())
    nothing_ran = not directory.metrics_path.exists() and not options.resume
    endings: list[Callable[[], Any]] = [writer.close for writer in writers]
    if status == _WRONG_COMMAND and nothing_ran:
        endings.append(directory.discard)  # leave the name free
    elif status == _WRONG_COMMAND and run.summary_before():
        # What had been done is as good as before.
        endings.append(functools.partial(directory.write_summary, run.summary_before()))
    else:
        endings.append(functools.partial(directory.write_summary, run.summary))
        write = functools.partial(write_phases, directory.path, console.phases)
        endings.append(functools.partial(write, resumed=options.resume))
        endings.append(functools.partial(write_report, directory.path))
    for end in endings if coordination.is_first() else ():
        try:
            end()
        except Exception as error:
            status = status or 1
            _report_failure(_plain(error, " ".join(str(error).split())), status)
    directory.close()
    if status in (0, INTERRUPTED) and not (peers and peers.failed_with):
        coordination.barrier("end")  # what the first process writes is there for all
    if status == _WRONG_COMMAND:
        return status
    _say_how_it_ended(run, directory.home)
    return status


class _Unheard(Console):
    """The console of another process than the first, which does the talking for all."""

    @property
    def live(self) -> bool:
        """Never: one progress bar is enough."""
        return False

    def _print(self, *_: Any, **__: Any) -> None:
        pass


def _report_failure(line: str, status: int, *, silently: bool = False) -> None:
    """Say what went wrong, once, however many processes it happened to."""
    peers = watch_peers()
    if peers is not None:
        peers.tell_failure(line, status)
        silently |= not coordination.is_first() and peers.first_failure(3.0) == line
    if not silently:
        error_line(line)


def _grown_facts(grown: dict[str, Any]) -> dict[str, str]:
    """Say that a run goes on for longer than it was started for."""
    if not grown:
        return {}
    asked = ", ".join(f"{name} {value:g}" for name, value in grown.items())
    return {"goes on": f"{asked}; a learning rate that is planned over the run follows it"}


def _repeatability(platform: str, deterministic: bool) -> dict[str, str]:
    """Say whether the run gives the same bits again; on a CPU every run does."""
    if platform == "cpu":
        return {}
    if deterministic:
        return {"deterministic": "yes: the same bits again from this kind of device"}
    return {"deterministic": "no: last digits differ between runs (--deterministic)"}


def _training_facts(plan: Plan, schedule: EventSchedule) -> dict[str, str]:
    batch = plan.batching
    pipeline = {}
    if plan.num_stages > 1:
        order = f", {plan.pipeline_schedule}"
        again = ", recomputed" if plan.recomputation else ""
        pipeline["pipeline"] = f"{plan.num_stages} stages{order}{again}"
    return {
        **pipeline,
        "global batch": f"{batch.global_batch_size} = micro batch "
        f"{batch.micro_batch_size} x accumulation "
        f"{batch.gradient_accumulation_count} x replicas {batch.num_replicas}",
        "updates": f"{schedule.total_updates} = {schedule.updates_per_epoch} per"
        f" epoch x {schedule.total_updates // schedule.updates_per_epoch} epochs,"
        f" {schedule.updates_per_execution} per execution",
    }


def _plain(error: Exception, message: str) -> str:
    """Errors of ours speak for themselves; others say what they are."""
    if type(error).__module__.startswith("millrace"):
        return message
    return f"{type(error).__name__}: {message} (--debug shows where)"


def _say_how_it_ended(run: Run, path: Path) -> None:
    summary = run.summary
    if summary["status"] == "failed":
        run.console.line(f"failed; what there is lies in {path}")
        return
    shown = {
        name.replace("_", " "): figure(value) for name, value in summary["metrics"].items()
    }
    said = f"in {summary['wall_seconds']:.1f} s"
    if summary["updates"]:
        speed = summary["samples_per_second"]
        said = f"{summary['updates']} updates {said}"
        said += f", {speed:,.0f} samples/s" if speed else ""
    if summary["compile_seconds"]:
        said += f", compiled in {summary['compile_seconds']:.1f} s"
    run.console.facts(
        {
            summary["status"]: said,
            **shown,
            **run.closing_facts,
            **(_time_and_memory(summary) if run.console.verbose else {}),
            "results": str(path),
            "report": str(path / "report.html"),
        }
    )


def _time_and_memory(summary: dict[str, Any]) -> dict[str, str]:
    """What ``--verbose`` adds to the table at the end."""
    times = {name: duration(seconds) for name, seconds in summary["seconds"].items()}
    sizes = {
        name.removesuffix("_bytes").replace("_", " ") + " memory": byte_size(size)
        for name, size in summary["memory"].items()
    }
    return times | sizes


def _prepare_process(config: Any) -> Any:
    """Make the settings that must be made before a device is used.

    Returns:
        The configuration; where the launcher restarts a run, it resumes that run.
    """
    options = run_options(config)
    if options.virtual_devices is not None:
        try:
            use_virtual_devices(options.virtual_devices)
        except RuntimeError as error:
            raise ConfigurationError(
                "--virtual-devices must be set before any device is used."
            ) from error
    if coordination.join(
        find_process_info(options.coordinator, options.process_id, options.num_processes)
    ):
        watch_peers()
    else:
        watch_launcher()
    noted = None if _begun else noted_run_directory()
    _begun.append(True)
    return config if noted is None else _continued(config, noted)


_begun: list[bool] = []
"""Not empty where a run is inside another one: then it has a directory of its own."""


def _continued(config: Any, path: Path) -> Any:
    """Return the configuration that continues an interrupted run."""
    known = flat_options(type(config))
    changes: dict[str, Any] = {n: None for n in ("logdir", "results_dir") if n in known}
    changes |= {"run_dir": path, "resume": (path / "config.yml").exists()}
    try:
        return replace_options(config, **changes)
    except ConfigurationError as error:
        raise ConfigurationError(f"Cannot continue the run in {path}: {error}") from error
