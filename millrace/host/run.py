"""One run of one command: its directory, its screen, and an account of how it ended."""

import contextlib
import functools
import json
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from millrace.config import ConfigurationError, as_plain
from millrace.host.checkpoint import Checkpoints
from millrace.host.console import Console, error_line
from millrace.host.events import Schedule
from millrace.host.options import RunOptions
from millrace.host.report import write_report
from millrace.host.run_directory import (
    RunDirectory,
    open_run_directory,
    versions,
)
from millrace.host.runner import Runner
from millrace.host.writers import Writer, open_writers
from millrace.plan import Plan
from millrace.program.step import TrainState

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


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
        self.closing_facts: dict[str, str] = {}
        """What the application has to say at the end, besides the metrics."""

    def describe(
        self,
        devices: Sequence[Any],
        plan: Plan,
        schedule: Schedule | None,
        **facts: str,
    ) -> None:
        """Say what will happen, before it does; without a schedule, no training."""
        first = devices[0]
        self.summary["device"] = {
            "platform": first.platform,
            "kind": first.device_kind,
            "count": len(devices),
        }
        half = f" ({plan.half_type})" if "16" in plan.precision else ""
        self.console.facts(
            {
                "device": f"{len(devices)} x {first.device_kind} ({first.platform})",
                **facts,
                "precision": plan.precision + half,
                **(_training_facts(plan, schedule) if schedule else {}),
                "run directory": str(self.directory.path),
            }
        )
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

    def train(self, runner: Runner, state: TrainState) -> TrainState:
        """Run to the end; the summary says how far it came, whatever the end was."""
        before = self.summary_before()
        try:
            result = runner.run(state, resume=self.options.resume)
        finally:
            progress = runner.progress()
            if not progress["samples_per_second"]:  # nothing was left to do
                progress["samples_per_second"] = before.get("samples_per_second", 0.0)
            self.summary |= progress
        self.summary["status"] = "interrupted" if result.interrupted else "completed"
        return result.state

    def summary_before(self) -> dict[str, Any]:
        """Return the summary that an earlier part of this run has left, if any."""
        try:
            return json.loads((self.directory.path / "summary.json").read_text())
        except (OSError, ValueError):
            return {}


def run_command(
    function: Any, options: RunOptions, *, command: str, command_line: str
) -> int:
    """Run an application's function inside a run directory; return the exit status."""
    console = Console(quiet=options.quiet)
    _prepare_process(options)
    directory = open_run_directory(
        options.run_dir, options, command=command, resume=options.resume
    )
    started = time.time()
    writers: list[Writer] = []
    run = Run(options, directory, console, writers, command_line)
    status = 1
    try:
        writers += open_writers(options, directory, as_plain(options), command)
        function(options, run)
        interrupted = run.summary["status"] == "interrupted"
        status = INTERRUPTED if interrupted else 0
    except KeyboardInterrupt:
        run.summary |= {"status": "interrupted", "error": "stopped at once"}
        status = INTERRUPTED
    except Exception as error:
        status = _WRONG_COMMAND if isinstance(error, ConfigurationError) else 1
        message = " ".join(str(error).split()) or type(error).__name__
        run.summary |= {
            "status": "failed",
            "error": f"{type(error).__name__}: {message}",
        }
        if options.debug:
            traceback.print_exc()
        else:
            error_line(_plain(error, message))
    run.summary["wall_seconds"] = time.time() - started
    nothing_ran = not directory.metrics_path.exists() and not options.resume
    endings = [writer.close for writer in writers]
    if status == _WRONG_COMMAND and nothing_ran:
        endings.append(directory.discard)  # leave the name free
    else:
        endings.append(functools.partial(directory.write_summary, run.summary))
        endings.append(functools.partial(write_report, directory, run.summary))
    for end in endings:
        try:
            end()
        except Exception as error:
            error_line(_plain(error, " ".join(str(error).split())))
            status = status or 1
    if status == _WRONG_COMMAND:
        return status
    _say_how_it_ended(run, directory.path)
    return status


def _training_facts(plan: Plan, schedule: Schedule) -> dict[str, str]:
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
        name.replace("_", " "): f"{value:.4f}" for name, value in summary["metrics"].items()
    }
    said = f"in {summary['wall_seconds']:.1f} s"
    if summary["updates"]:
        speed = summary["samples_per_second"]
        said = f"{summary['updates']} updates {said}, {speed:,.0f} samples/s"
    if summary["compile_seconds"]:
        said += f", compiled in {summary['compile_seconds']:.1f} s"
    run.console.facts(
        {
            summary["status"]: said,
            **shown,
            **run.closing_facts,
            "results": str(path),
            "report": str(path / "report.html"),
        }
    )


def _prepare_process(options: RunOptions) -> None:
    """Settings that must be made before the devices are first used."""
    if options.virtual_devices is not None:
        try:
            jax.config.update("jax_num_cpu_devices", options.virtual_devices)
        except RuntimeError as error:
            raise ConfigurationError(
                "--virtual-devices must be set before any device is used."
            ) from error
