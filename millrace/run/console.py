"""Terminal output of a run: its settings, its progress and its result."""

import logging
import textwrap
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console as RichConsole
from rich.text import Text

from millrace.distributed.progress import enter_phase, move, reach_update
from millrace.loop.event_schedule import EventSchedule
from millrace.numbers import format_bytes, format_duration, format_number
from millrace.output import DroppingStream
from millrace.plan import Plan
from millrace.report.best import describe_checkpoint
from millrace.report.record import as_number
from millrace.run.bar import (
    TRAINING,
    Bar,
    NotebookBar,
    Progression,
    TerminalBar,
    format_metrics,
    in_notebook,
)

_LINE_SECONDS = 30.0
"""Without a bar, a line shows the progress if nothing was printed for this long."""

_LEAST_WAIT = 0.01
"""Share of the time that devices wait for data below which it is not printed."""


_LEAST_TEXT_WIDTH = 30
"""Columns below which a terminal is too narrow for a column of text."""

_DIAGNOSTICS = ("learning_rate", "loss_scale", "gradients_finite")
"""What is logged about the training rather than about the model."""


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

    In a notebook, the bar is one output that is updated. There are no colors if
    ``NO_COLOR`` is set or there is no terminal.

    Args:
        quiet: Print only warnings and errors.
        verbose: Also print every change of activity, and debug messages.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._rich = _Screen(
            stderr=True, highlight=False, soft_wrap=True, force_jupyter=False
        )
        self._quiet = quiet
        self.verbose = verbose and not quiet
        self._in_notebook = in_notebook()
        self._shown = Progression()
        self._bar: Bar | None = None
        self._cell_output: Any = None
        self._line_time = time.perf_counter()
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
        return (self._rich.is_terminal or self._in_notebook) and not self._quiet

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
            self._print(self._wrap(text))

    def warning(self, text: str) -> None:
        """Print a warning, even if quiet."""
        self._print(self._wrap(f"warning: {text}"), style="yellow")

    def table(
        self, rows: Mapping[str, Any], styles: Mapping[str, str] | None = None
    ) -> None:
        """Print names and values in two columns, some in a style such as a color."""
        if self._quiet or not rows:
            return
        width = max(map(len, rows))
        lines = [
            Text(
                self._wrap(f"{name:<{width}}  {value}", width + 2),
                (styles or {}).get(name, ""),
            )
            for name, value in rows.items()
        ]
        self._print(Text("\n").join(lines))  # at once: a notebook has an output for each

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
        self._shown = Progression(total, done)
        if self._bar is not None:
            self._bar.show(self._shown)
        self._open_bar()

    def status(self, what: str) -> None:
        """Show the current activity; without a bar, print each one only once."""
        self._end_phase()
        enter_phase(what)
        self._current = (what, self._now())
        self._shown.begin(what)
        self._open_bar()
        if self.verbose:
            self.line(f"{self._now():8.2f} s  {what}")
        elif not self.live and what not in self._printed:
            self._printed.add(what)
            self.line(f"{what} …")

    def advance(self, done: int, metrics: Mapping[str, float], speed: float) -> None:
        """Show how many updates are done and the newest metrics."""
        reach_update(done)
        chosen = metrics if self.verbose else _most_relevant(metrics)
        self._shown.advance(done, format_metrics(chosen, speed))
        self._show_progress()

    def progress(self, done: int, total: int | None) -> None:
        """Show how much of an activity other than training is done."""
        move()
        if self._current is None or self._current[0] != TRAINING:
            self._shown.report(done, total)
            self._show_progress()

    def _show_progress(self) -> None:
        if self._bar is not None:
            self._bar.update()
        elif time.perf_counter() - self._line_time > _LINE_SECONDS:
            shown = self._shown
            parts = (shown.activity, shown.counts, shown.metrics, shown.times)
            self.line("  ".join(part for part in parts if part))

    def _open_bar(self) -> None:
        """Show a bar if there can be one, until ``stop``."""
        if not self.live:
            return
        if self._bar is not None:
            self._bar.update(at_once=True)
        elif self._in_notebook:
            self._bar = NotebookBar(self._shown, self._cell_output)
            self._cell_output = self._bar.output
        else:
            self._bar = TerminalBar(self._rich, self._shown)

    def _close_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

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
        self._close_bar()
        self._shown = Progression()

    def _end_phase(self) -> None:
        if self._current is not None:
            name, start = self._current
            self._phases.append(Phase(name, start, self._now()))
        self._current = None

    def _now(self) -> float:
        return time.perf_counter() - self._clock_start

    def _wrap(self, text: str, indent: int = 0) -> str:
        """Break lines between words in a terminal, which would break inside of them."""
        room = self._rich.width - indent
        if not self._rich.is_terminal or room < _LEAST_TEXT_WIDTH:
            return text
        head, rest = text[:indent], text[indent:]
        # Paths stay whole, so that they can be copied.
        parts = [
            textwrap.wrap(part, room, break_long_words=False, break_on_hyphens=False)
            for part in rest.split("\n")
        ]
        lines = [line for part in parts for line in part or [""]]
        return head + ("\n" + " " * indent).join(lines)

    def _print(self, text: str | Text, style: str | None = None) -> None:
        self._line_time = time.perf_counter()
        self._rich.print(text, style=style, markup=False)


def _most_relevant(metrics: Mapping[str, float], count: int = 2) -> dict[str, float]:
    """Return the metrics that fit next to a bar: the loss, then those of validation."""

    def rank(name: str) -> int:
        if name == "loss":
            return 0
        if name.startswith("validation_"):
            return 1 if name != "validation_loss" else 3
        return 4 if name in _DIAGNOSTICS else 2

    return {name: metrics[name] for name in sorted(metrics, key=rank)[:count]}


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
    length = f", {schedule.updates_per_execution} per execution" * schedule.is_fixed
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
        f" epoch x {schedule.total_updates // schedule.updates_per_epoch} epochs{length}",
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
    if summary["status"] == "interrupted":
        result += _describe_lost_work(summary)
    metrics = dict(summary["metrics"])
    if metrics.get("train_gradients_finite") == 1.0:  # as they should be
        del metrics["train_gradients_finite"]
    shown = {n.replace("_", " "): format_number(v) for n, v in metrics.items()}
    return {
        summary["status"]: result,
        **divergence_rows(summary),
        **rising_loss_rows(summary),
        **shown,
        **best_rows(summary.get("best") or {}),
    }


def _describe_lost_work(summary: Mapping[str, Any]) -> str:
    """Return what an interrupt has lost: all of a training without an update."""
    if summary["updates"]:
        return ""
    if not (facts := summary.get("facts")):
        return ", before it began: nothing was saved"
    return ", before the first update: nothing was saved" if "updates" in facts else ""


def best_rows(best: Mapping[str, Any]) -> dict[str, str]:
    """Return a table row about the best validation result, if there is one."""
    if best.get("value") is None:
        return {}
    text = f"{best['metric'].replace('_', ' ')} {format_number(best['value'])}"
    if best.get("update") is not None:
        text += f" at update {best['update']:,}"
    if best.get("epoch") is not None:
        text += f", epoch {best['epoch']:g}"
    place = describe_checkpoint(best)
    return {"best": f"{text} ({place})" if place else text}


def divergence_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return a table row about a run whose loss has exploded."""
    if not (diverged := summary.get("diverged")):
        return {}
    first, then = _format_losses(diverged)
    return {
        "diverged": f"the loss was {then} at update {diverged['update']}, {first} at the "
        "start; use a smaller learning rate"
    }


def rising_loss_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return a table row about a run whose loss is larger at the end than at its start."""
    if not (rising := summary.get("rising_loss")):
        return {}
    first, then = _format_losses(rising)
    return {
        "loss rose": f"the training loss was {first} at the start and {then} in the last "
        f"{rising['updates']} updates; use a smaller --learning-rate"
    }


def _format_losses(found: Mapping[str, Any]) -> list[str]:
    """Return the loss at the start and the one found later."""
    # A summary that was read again has texts for what is not finite.
    return [format_number(as_number(found[name])) for name in ("first_loss", "loss")]


def result_styles(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the colors of the rows: green only for a run that is as it should be."""
    is_worse = summary.get("diverged") or summary.get("rising_loss")
    fine = summary["status"] == "completed" and not is_worse
    colors = {summary["status"]: "green" if fine else "yellow"}
    return colors | {"diverged": "bold red", "loss rose": "bold yellow"}


def time_and_memory_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the table rows that ``--verbose`` adds at the end of a run."""
    times = {name: format_duration(seconds) for name, seconds in summary["seconds"].items()}
    sizes = {
        name.removesuffix("_bytes").replace("_", " ") + " memory": format_bytes(size)
        for name, size in summary["memory"].items()
    }
    return times | sizes
