"""Terminal output of a run: its settings, its progress and its result."""

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from millrace.loop.event_schedule import EventSchedule
from millrace.numbers import format_bytes, format_duration, format_number
from millrace.output import DroppingStream
from millrace.plan import Plan

_METRICS_RATIO = 4
"""Maximum width of the metrics next to the progress bar, relative to the bar."""

_LEAST_WAIT = 0.01
"""Share of the time that devices wait for data below which it is not printed."""


class Phase(NamedTuple):
    """An activity of the run, with start and end in seconds on its clock."""

    name: str
    start: float
    end: float


class _Screen(RichConsole):
    """Drops output that cannot be printed; Rich would exit when a pipe breaks."""

    @property
    def file(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The current standard error."""
        return DroppingStream(super().file)


class Console:
    """Lines and a progress bar on standard error; plain lines without a terminal.

    There are no colors if ``NO_COLOR`` is set or there is no terminal.

    Args:
        quiet: Print only warnings and errors.
        verbose: Also print every change of activity, and debug messages.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._rich = _Screen(stderr=True, highlight=False, soft_wrap=True)
        self._quiet = quiet
        self.verbose = verbose and not quiet
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        # Gets the width that the other columns leave, and is truncated if necessary.
        self._metrics = Column(no_wrap=True, overflow="ellipsis", ratio=0)
        self._printed: set[str] = set()
        self._clock_start = time.perf_counter()
        self._phases: list[Phase] = []
        self._current: tuple[str, float] | None = None
        logger = logging.getLogger("millrace")
        logger.handlers = [_Handler(self)]
        level = logging.DEBUG if self.verbose else logging.INFO
        logger.setLevel(logging.WARNING if quiet else level)
        logger.propagate = False

    @property
    def live(self) -> bool:
        """Whether a progress bar can be drawn."""
        return self._rich.is_terminal and not self._quiet

    @property
    def phases(self) -> list[Phase]:
        """All activities so far, including the current one."""
        if self._current is None:
            return list(self._phases)
        name, start = self._current
        return [*self._phases, Phase(name, start, self._now())]

    def line(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if not self._quiet:
            self._print(text)

    def warning(self, text: str) -> None:
        """Print a warning, even if quiet."""
        self._print(f"warning: {text}", style="yellow")

    def table(self, rows: Mapping[str, Any]) -> None:
        """Print names and values in two columns."""
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self.line(f"{name:<{width}}  {value}")

    def start(self, total: int, done: int, elapsed: float | None = None) -> None:
        """Start to show progress over `total` updates.

        Args:
            total: Number of updates of the run.
            done: Number of updates already made.
            elapsed: Sets the clock of the run, which a resumed run continues. If not
                given, it keeps running.
        """
        if elapsed is not None:
            self._end_phase()
            self._clock_start = time.perf_counter() - elapsed
        if not self.live:
            return
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}", table_column=self._metrics),
            TimeRemainingColumn(compact=True),
            console=self._rich,
            expand=True,
        )
        self._task = self._progress.add_task(
            "starting", total=total, completed=done, metrics=""
        )
        self._progress.start()

    def status(self, what: str) -> None:
        """Show the current activity; without a terminal, print each one only once."""
        self._end_phase()
        self._current = (what, self._now())
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=what, refresh=True)
        if self.verbose:
            self.line(f"{self._now():8.2f} s  {what}")
        elif self._progress is None and what not in self._printed:
            self._printed.add(what)
            self.line(f"{what} …")

    def advance(self, done: int, metrics: Mapping[str, float], speed: float) -> None:
        """Show how many updates are done and the newest metrics."""
        if self._progress is None or self._task is None:
            return
        chosen = metrics if self.verbose else _most_relevant(metrics)
        texts = [f"{_short(name)} {format_number(value)}" for name, value in chosen.items()]
        if speed:
            texts.append(f"{speed:,.0f} samples/s")
        self._metrics.ratio = _METRICS_RATIO if texts else 0
        self._progress.update(self._task, completed=done, metrics="  ".join(texts))

    def event(self, event: Mapping[str, Any]) -> None:
        """Print a log event as a line, unless a progress bar shows it."""
        if self.live:
            return
        hidden = {"update", "epoch", "time"}
        if event.get("input_wait", 0.0) < _LEAST_WAIT:
            hidden.add("input_wait")
        metrics = {k: v for k, v in event.items() if k not in hidden}
        texts = [f"{name} {format_number(value)}" for name, value in metrics.items()]
        place = f"epoch {event['epoch']:g}  update {event['update']}"
        self.line("  ".join([place, *texts]))

    def stop(self) -> None:
        """Remove the progress bar and end the current activity."""
        self._end_phase()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _end_phase(self) -> None:
        if self._current is not None:
            name, start = self._current
            self._phases.append(Phase(name, start, self._now()))
        self._current = None

    def _now(self) -> float:
        return time.perf_counter() - self._clock_start

    def _print(self, text: str, style: str | None = None) -> None:
        console = self._progress.console if self._progress is not None else self._rich
        console.print(text, style=style, markup=False)


def _most_relevant(metrics: Mapping[str, float], count: int = 2) -> dict[str, float]:
    """Return the metrics that fit next to a bar: the loss, then those of validation."""

    def rank(name: str) -> int:
        if name == "loss":
            return 0
        if name.startswith("validation_"):
            return 1 if name != "validation_loss" else 3
        return 4 if name == "learning_rate" else 2

    return {name: metrics[name] for name in sorted(metrics, key=rank)[:count]}


def _short(name: str) -> str:
    return name.replace("validation_", "val ").replace("_", " ")


class SilentConsole(Console):
    """The console of all processes but the first."""

    @property
    def live(self) -> bool:
        """Whether a progress bar can be drawn: never."""
        return False

    def _print(self, *_: Any, **__: Any) -> None:
        pass


class _Handler(logging.Handler):
    """Sends the log of the package to the console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            self._console.warning(message)
        else:
            self._console.line(message)


def training_rows(plan: Plan, schedule: EventSchedule) -> dict[str, str]:
    """Return table rows about the batches and updates of a run."""
    batch = plan.batching
    pipeline = {}
    if plan.num_stages > 1:
        recomputed = ", recomputed" if plan.recomputation else ""
        stages = f"{plan.num_stages} stages, {plan.pipeline_schedule}"
        pipeline["pipeline"] = stages + recomputed
    return {
        **pipeline,
        "global batch": f"{batch.global_batch_size} = micro batch "
        f"{batch.micro_batch_size} x accumulation "
        f"{batch.gradient_accumulation_count} x replicas {batch.num_replicas}",
        "updates": f"{schedule.total_updates} = {schedule.updates_per_epoch} per"
        f" epoch x {schedule.total_updates // schedule.updates_per_epoch} epochs,"
        f" {schedule.updates_per_execution} per execution",
    }


def determinism_rows(platform: str, deterministic: bool) -> dict[str, str]:
    """Return a table row about repeatability; none on a CPU, which is deterministic."""
    if platform == "cpu":
        return {}
    if deterministic:
        return {"deterministic": "yes: same bits in every run on this kind of device"}
    return {"deterministic": "no: last digits differ between runs (--deterministic)"}


def extension_rows(extended_options: Mapping[str, Any]) -> dict[str, str]:
    """Return a table row about a run that is resumed for more epochs than before."""
    if not extended_options:
        return {}
    values = ", ".join(f"{name} {value:g}" for name, value in extended_options.items())
    return {"extended": f"{values}; learning rate schedules adapt to the new length"}


def result_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return table rows about how a run ended, with its metrics."""
    result = f"in {summary['wall_seconds']:.1f} s"
    if summary["updates"]:
        speed = summary["samples_per_second"]
        result = f"{summary['updates']} updates {result}"
        result += f", {speed:,.0f} samples/s" if speed else ""
    if summary["compile_seconds"]:
        result += f", compiled in {summary['compile_seconds']:.1f} s"
    metrics = summary["metrics"].items()
    return {
        summary["status"]: result,
        **{name.replace("_", " "): format_number(value) for name, value in metrics},
    }


def time_and_memory_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the table rows that ``--verbose`` adds at the end of a run."""
    times = {name: format_duration(seconds) for name, seconds in summary["seconds"].items()}
    sizes = {
        name.removesuffix("_bytes").replace("_", " ") + " memory": format_bytes(size)
        for name, size in summary["memory"].items()
    }
    return times | sizes
