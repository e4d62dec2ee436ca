"""What a run shows in the terminal: what it will do, how far it is, how it ended."""

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

from millrace.numbers import format_number
from millrace.output import DroppingStream

_METRICS_SHARE = 4
"""How many times as wide as the bar the metrics beside it may be."""


class Phase(NamedTuple):
    """What was being done from when to when, in seconds of the run's clock."""

    name: str
    start: float
    end: float


class _Screen(RichConsole):
    """Drops what cannot be printed; Rich would end the process when a pipe breaks."""

    @property
    def file(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The stream of the moment; nobody sets another one."""
        return DroppingStream(super().file)


class Console:
    """Lines and a progress bar on standard error; plain lines without a terminal.

    Colors are left out where ``NO_COLOR`` is set or there is no terminal.

    Args:
        quiet: Print nothing but warnings and errors.
        verbose: Print also every change of what is being done, and debugging messages.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._rich = _Screen(stderr=True, highlight=False, soft_wrap=True)
        self._quiet = quiet
        self.verbose = verbose and not quiet
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        # Takes what the other columns leave, and is cut where that is too little.
        self._metrics = Column(no_wrap=True, overflow="ellipsis", ratio=0)
        self._said: set[str] = set()
        self._zero = time.perf_counter()
        self._phases: list[Phase] = []
        self._doing: tuple[str, float] | None = None
        logger = logging.getLogger("millrace")
        logger.handlers = [_Handler(self)]
        usual = logging.DEBUG if self.verbose else logging.INFO
        logger.setLevel(logging.WARNING if quiet else usual)
        logger.propagate = False

    @property
    def live(self) -> bool:
        """Whether a progress bar can be drawn."""
        return self._rich.is_terminal and not self._quiet

    @property
    def phases(self) -> list[Phase]:
        """What has been done when, up to now."""
        if self._doing is None:
            return list(self._phases)
        name, start = self._doing
        return [*self._phases, Phase(name, start, self._now())]

    def line(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if not self._quiet:
            self._print(text)

    def warning(self, text: str) -> None:
        """Print a warning, quiet or not."""
        self._print(f"warning: {text}", style="yellow")

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Print names and values in two columns."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self.line(f"{name:<{width}}  {value}")

    def start(self, total: int, done: int, elapsed: float | None = None) -> None:
        """Begin to show progress over `total` updates.

        Args:
            total: How many there are to be.
            done: How many there are already.
            elapsed: What the run's clock, which a resumed run goes on with, shows now; if
                not given, it goes on as it is.
        """
        if elapsed is not None:
            self._end_phase()
            self._zero = time.perf_counter() - elapsed
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
        """Say what is happening now; without a terminal, only the first of each."""
        self._end_phase()
        self._doing = (what, self._now())
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=what, refresh=True)
        if self.verbose:
            self.line(f"{self._now():8.2f} s  {what}")
        elif self._progress is None and what not in self._said:
            self._said.add(what)
            self.line(f"{what} …")

    def advance(self, done: int, metrics: Mapping[str, float], speed: float) -> None:
        """Show how many updates are done and the newest metrics."""
        if self._progress is None or self._task is None:
            return
        chosen = metrics if self.verbose else _most_telling(metrics)
        shown = [f"{_short(name)} {format_number(value)}" for name, value in chosen.items()]
        if speed:
            shown.append(f"{speed:,.0f} samples/s")
        self._metrics.ratio = _METRICS_SHARE if shown else 0
        self._progress.update(self._task, completed=done, metrics="  ".join(shown))

    def event(self, event: Mapping[str, Any]) -> None:
        """Print a log event as a line, where no progress bar shows it."""
        if self.live:
            return
        metrics = {k: v for k, v in event.items() if k not in ("update", "epoch", "time")}
        shown = "  ".join(
            f"{name} {format_number(value)}" for name, value in metrics.items()
        )
        self.line(f"epoch {event['epoch']:g}  update {event['update']}  {shown}")

    def stop(self) -> None:
        """Take the progress bar away; what was being done has ended."""
        self._end_phase()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _end_phase(self) -> None:
        if self._doing is not None:
            name, start = self._doing
            self._phases.append(Phase(name, start, self._now()))
        self._doing = None

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    def _print(self, text: str, style: str | None = None) -> None:
        console = self._progress.console if self._progress is not None else self._rich
        console.print(text, style=style, markup=False)


def _most_telling(metrics: Mapping[str, float], most: int = 2) -> dict[str, float]:
    """Choose what fits beside a bar: the loss, then what validation found, then others."""

    def weight(name: str) -> int:
        if name == "loss":
            return 0
        if name.startswith("validation_"):
            return 1 if name != "validation_loss" else 3
        return 4 if name == "learning_rate" else 2

    return {name: metrics[name] for name in sorted(metrics, key=weight)[:most]}


def _short(name: str) -> str:
    return name.replace("validation_", "val ").replace("_", " ")


class _Handler(logging.Handler):
    """Sends the package's log to the console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            self._console.warning(message)
        else:
            self._console.line(message)
