"""What a run shows in the terminal: what it will do, how far it is, how it ended."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class Console:
    """Lines and a progress bar on standard error; plain lines without a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._rich = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        self._quiet = quiet
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._said: set[str] = set()
        logger = logging.getLogger("millrace")
        logger.handlers = [_Handler(self)]
        logger.setLevel(logging.WARNING if quiet else logging.INFO)
        logger.propagate = False

    @property
    def live(self) -> bool:
        """Whether a progress bar can be drawn."""
        return self._rich.is_terminal and not self._quiet

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

    def start(self, total: int, done: int) -> None:
        """Begin to show progress over `total` updates."""
        if not self.live:
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(compact=True),
            console=self._rich,
        )
        self._task = self._progress.add_task(
            "starting", total=total, completed=done, metrics=""
        )
        self._progress.start()

    def status(self, what: str) -> None:
        """Say what is happening now; without a terminal, only the first of each."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=what)
        elif what not in self._said:
            self._said.add(what)
            self.line(f"{what} …")

    def advance(self, done: int, metrics: Mapping[str, float], speed: float) -> None:
        """Show how many updates are done and the newest metrics."""
        if self._progress is None or self._task is None:
            return
        shown = [f"{name} {value:.4g}" for name, value in metrics.items()]
        if speed:
            shown.append(f"{speed:,.0f} samples/s")
        self._progress.update(self._task, completed=done, metrics="  ".join(shown))

    def stop(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, text: str, style: str | None = None) -> None:
        console = self._progress.console if self._progress is not None else self._rich
        console.print(text, style=style, markup=False)


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


def error_line(message: str) -> None:
    """Print a failure as plain text on standard error."""
    print(f"millrace: {message}", file=sys.stderr)
