"""The progress bar of a run: in a terminal, or as one updating output of a notebook."""

import contextvars
import html
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from millrace.numbers import format_number

TRAINING = "training"
"""The activity whose progress is counted in updates."""

_METRICS_RATIO = 6
"""Maximum width of the metrics next to the progress bar, relative to the bar."""
_TICK_SECONDS = 0.5
_NOTEBOOK_WIDTH = 30


class Progression:
    """What a run is doing and how far it is: the content of a progress bar.

    Args:
        total: Number of updates of the run; None if nothing is trained.
        done: Number of updates already made.
    """

    def __init__(self, total: int | None = None, done: int = 0) -> None:
        self.activity = "starting"
        self.metrics = ""
        self._total, self._done, self._first = total, done, done
        self._training_seconds = 0.0
        self._since = time.perf_counter()
        self._part: tuple[int, int | None] = (0, None)

    @property
    def elapsed(self) -> float:
        """The seconds since the activity began."""
        return time.perf_counter() - self._since

    @property
    def done(self) -> int:
        """How much of the activity is done."""
        return self._done if self._is_training else self._part[0]

    @property
    def total(self) -> int | None:
        """The size of the activity; None if it is unknown."""
        return self._total if self._is_training else self._part[1]

    def begin(self, activity: str) -> None:
        """Begin an activity; training continues where it stopped."""
        if self._is_training:
            self._training_seconds += self.elapsed
        if activity != self.activity or activity == TRAINING:
            self._since = time.perf_counter()
            self._part = (0, None)
        self.activity = activity

    def advance(self, done: int, metrics: str) -> None:
        """Record the number of updates made, and what is shown next to them."""
        self._done, self.metrics = done, metrics

    def report(self, done: int, total: int | None) -> None:
        """Record the progress of an activity other than training."""
        self._part = (done, total)

    def seconds_left(self) -> float | None:
        """Return the time that the activity probably still takes; None if unknown."""
        done, spent = self.done, self.elapsed
        if self._is_training:
            done, spent = self._done - self._first, self._training_seconds + spent
        if not done or self.total is None:
            return None
        return spent / done * (self.total - self.done)

    @property
    def counts(self) -> str:
        """How much is done of the total, as text."""
        return "" if self.total is None else f"{self.done}/{self.total}"

    @property
    def times(self) -> str:
        """The time left, or the time since the activity began, as text."""
        left = self.seconds_left()
        if left is not None:
            return f"{_format_clock(left)} left"
        return "--:-- left" if self._is_training else f"{self.elapsed:.0f} s"

    @property
    def _is_training(self) -> bool:
        return self.activity == TRAINING and self._total is not None


def _format_clock(seconds: float) -> str:
    """Format a duration as minutes and seconds, or with hours.

    >>> _format_clock(75), _format_clock(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_metrics(metrics: Mapping[str, float], speed: float) -> str:
    """Return the metrics and the samples per second as one line."""
    texts = [f"{_short(name)} {format_number(value)}" for name, value in metrics.items()]
    if speed:
        texts.append(f"{speed:,.0f} samples/s")
    return "  ".join(texts)


def _short(name: str) -> str:
    return name.replace("validation_", "val ").replace("_", " ")


class Bar(Protocol):
    """Shows a progression until it is closed."""

    def show(self, shown: Progression) -> None:
        """Show another progression from now on."""

    def update(self, *, at_once: bool = False) -> None:
        """Show a change, soon or at once."""

    def close(self) -> None:
        """Remove the bar."""


class TerminalBar:
    """A line at the bottom of a terminal that is gone when it is closed."""

    def __init__(self, console: RichConsole, shown: Progression) -> None:
        self._shown = shown
        # Gets the width that the other columns leave, and is truncated if necessary.
        self._metrics = Column(no_wrap=True, overflow="ellipsis", ratio=0)
        self._progress = _Line(
            SpinnerColumn(),
            _TextOf(lambda: self._shown.activity),
            BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
            _TextOf(lambda: self._shown.counts, "progress.download"),
            _TextOf(lambda: self._shown.metrics, column=self._metrics),
            _TextOf(lambda: self._shown.times, "progress.remaining"),
            console=console,
        )
        self._task: TaskID = self._progress.add_task("", total=None)
        self.update()
        self._progress.start()

    def show(self, shown: Progression) -> None:
        """Show another progression from now on."""
        self._shown = shown
        self.update(at_once=True)

    def update(self, *, at_once: bool = False) -> None:
        """Show a change, by default at the next of ten refreshes per second."""
        shown = self._shown
        self._metrics.ratio = _METRICS_RATIO if shown.metrics else 0
        task = self._progress.tasks[0]
        task.total, task.completed = shown.total, shown.done
        if at_once:
            self._progress.refresh()

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()


class _Line(Progress):
    """A bar that leaves room at the end of its line.

    The terminal shows Ctrl-C there as ^C. If that went to the next line, Rich would erase
    that one, and the bar would stay.
    """

    def __init__(self, *columns: ProgressColumn, console: RichConsole) -> None:
        self._screen = console
        super().__init__(*columns, console=console, expand=True, transient=True)

    def get_renderable(self) -> RenderableType:
        """Return the bar."""
        return Constrain(super().get_renderable(), self._screen.width - len("^C"))


class _TextOf(ProgressColumn):
    """A column with the result of a function."""

    max_refresh = None

    def __init__(self, text: Any, style: str = "", column: Column | None = None) -> None:
        self._text, self._style = text, style
        super().__init__(column or Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """Return the text."""
        del task
        return Text(self._text(), self._style)


class NotebookBar:
    """One output of a notebook cell that is updated twice per second.

    Args:
        shown: What it shows.
        output: The output of an earlier bar, which it continues.
    """

    def __init__(self, shown: Progression, output: Any = None) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._shown = shown
        self._closed = threading.Event()
        # With display_id, it is never None.
        self.output: Any = output or display(self._content(), raw=True, display_id=True)
        # In the context of the cell, so that the output goes there.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._tick,), daemon=True)
        self._thread.start()

    def show(self, shown: Progression) -> None:
        """Show another progression from the next tick on."""
        self._shown = shown

    def update(self, *, at_once: bool = False) -> None:
        """Show a change at the next tick."""
        del at_once

    def close(self) -> None:
        """Remove the bar."""
        self._closed.set()
        self._thread.join()
        self.output.update({"text/plain": "", "text/html": ""}, raw=True)

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            self.output.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        shown = self._shown
        bar = ""
        if shown.total:
            filled = round(_NOTEBOOK_WIDTH * shown.done / shown.total)
            bar = "█" * filled + "░" * (_NOTEBOOK_WIDTH - filled)
        parts = (shown.activity, bar, shown.counts, shown.metrics, shown.times)
        text = "  ".join(part for part in parts if part)
        return {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    shell = sys.modules.get("IPython")
    return shell is not None and hasattr(shell.get_ipython(), "kernel")
