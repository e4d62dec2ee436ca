"""Run commands from Python, with the same options and the same run directory."""

import dataclasses
import functools
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from millrace.card import Card, format_html, format_text
from millrace.commands.registry import COMMANDS, Command
from millrace.config import ConfigurationError, as_typed, parse
from millrace.distributed.environment import (
    StartError,
    add_launcher_replicas,
    format_mistake,
)
from millrace.output import drop_lost_output
from millrace.report.best import NOT_SAVED, describe_checkpoint
from millrace.report.record import read_events

Model = TypeVar("Model")


class Best(NamedTuple):
    """The best validation result of a run."""

    metric: str
    value: float
    update: int | None
    epoch: float | None
    checkpoint: Path | None
    """The checkpoint with these weights, unless none was written."""
    place: str = ""
    """The checkpoint as text: its path, or that none was written and which is the best."""

    def format(self) -> str:
        """Return one line: ``validation accuracy 0.75 at epoch 11``."""
        text = f"{self.metric.replace('_', ' ')} {_format_metric(self.value)}"
        if self.epoch is not None:
            text += f" at epoch {self.epoch:g}"
        return f"{text} ({NOT_SAVED})" if self.place.startswith(NOT_SAVED) else text


def read_best(run: Path, summary: Mapping[str, Any]) -> Best | None:
    """Return the best validation result in a summary, if it has one."""
    best = summary.get("best") or {}
    if best.get("value") is None:
        return None
    checkpoint = best.get("checkpoint")
    return Best(
        best["metric"],
        best["value"],
        best.get("update"),
        best.get("epoch"),
        None if checkpoint is None else run / checkpoint,
        describe_checkpoint(best),
    )


@dataclasses.dataclass(frozen=True)
class RunResult(Generic[Model]):
    """A finished run: its directory, its summary and the trained model."""

    path: Path
    """The run directory."""
    summary: dict[str, Any]
    """The contents of ``summary.json``: status, metrics, throughput, versions."""
    load: Callable[[Path], Model] = dataclasses.field(repr=False)
    arrays: Any = dataclasses.field(default=None, repr=False, compare=False)
    """The arrays that were passed from Python, if any; they stay in memory with this."""

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return self.summary["metrics"]

    @property
    def best(self) -> "Best | None":
        """The best validation result; None without validation."""
        return read_best(self.path, self.summary)

    @functools.cached_property
    def model(self) -> Model:
        """The trained model, loaded from its best checkpoint on first use."""
        return self.load(self.path)

    @property
    def events(self) -> list[dict[str, Any]]:
        """All log events, each with update, epoch, time and metrics."""
        return read_events(self.path)

    def card(self) -> Card:
        """Return what a notebook shows: status, metrics and the place of the report."""
        rows = self._outcome()
        if self.best is not None and self.best.place:
            rows["checkpoint"] = self.best.place
        rows |= {name: _format_metric(value) for name, value in self.metrics.items()}
        return Card("Run", rows | {"report": self.path / "report.html"})

    def _outcome(self) -> dict[str, str]:
        """Return how the run ended, and its best validation result."""
        status = self.summary["status"]
        verdict = "diverged" if self.summary.get("diverged") else ""
        verdict = "the loss rose" if self.summary.get("rising_loss") else verdict
        if verdict:
            status += f", but {verdict}" if status == "completed" else f", {verdict}"
        best = self.best
        return {"status": status} | ({} if best is None else {"best": best.format()})

    def __repr__(self) -> str:
        first = ("validation", "test", "train")
        names = sorted(
            self.metrics,
            key=lambda name: (
                first.index(name.split("_")[0])
                if name.split("_")[0] in first
                else len(first)
            ),
        )
        shown = {name: _format_metric(self.metrics[name]) for name in names[:4]}
        rows = self._outcome() | shown | {"path": self.path}
        return format_text(Card("RunResult", rows))

    def _repr_html_(self) -> str:
        return format_html(self.card())


def _format_metric(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def call_command(
    name: str,
    options: Mapping[str, Any],
    load: Callable[[Path], Model],
    *,
    arrays: Any = None,
    callbacks: Sequence[Any] | None = None,
    tracker: Sequence[Any] | None = None,
) -> RunResult[Model]:
    """Run a command in a run directory; errors are both reported there and raised.

    After Ctrl-C, a run saves a checkpoint and returns with ``summary["status"] ==
    "interrupted"``. After SIGTERM or SIGHUP it saves one too, and then ``SystemExit`` ends
    the script with the status of the signal (143 for SIGTERM), as if nobody had handled it.

    Args:
        name: The command, such as ``cnn train``.
        options: Options by name.
        load: Loads the trained model from a run directory.
        arrays: ``HeldArrays`` to train on instead of a dataset.
        callbacks: ``mr.Callback`` objects, for a command that trains.
        tracker: Names of trackers, which are options, and ``mr.Writer`` objects.
    """
    command = COMMANDS[name]
    given = [tracker] if isinstance(tracker, str) else tracker or ()
    if names := [each for each in given if isinstance(each, str)]:
        options = {**options, "tracker": names}
    line = format_command_line(name, options)
    if arrays is not None:
        line = _format_call(name, options)
        options = {**options, "arrays": arrays.record}
    config = _configure(command, options, name)
    from millrace.run.process import tune_memory_allocation

    tune_memory_allocation()
    from millrace.distributed import coordination
    from millrace.loop.callbacks import check_callbacks
    from millrace.loop.progress import check_trackers
    from millrace.run.run import Run, run_command

    checked_callbacks = check_callbacks(callbacks or ())
    trackers = check_trackers(each for each in given if not isinstance(each, str))
    function = command.load_function()
    runs: list[Run] = []
    errors: list[Exception] = []

    def call(config: Any, run: Run) -> None:
        runs.append(run)
        run.callbacks += checked_callbacks
        run.writers += trackers if coordination.is_first() else []
        function(config, run)

    run_command(
        call,
        config,
        command=name.replace(" ", "-"),
        command_line=line,
        on_failure=errors.append,
    )
    if errors:
        _raise(errors[0])
    if not runs:  # interrupted before the function was called
        raise KeyboardInterrupt
    if runs[0].signal not in (None, signal.SIGINT):
        raise SystemExit(128 + runs[0].signal)
    return RunResult(runs[0].directory.path, runs[0].summary, load, arrays)


def _configure(command: Command, options: Mapping[str, Any], name: str) -> Any:
    """Build a configuration; a mistake in the options has a short traceback."""
    try:
        return command.configure(options, name=name)
    except ConfigurationError as error:
        message = str(error)
    raise ConfigurationError(message)


def _raise(error: Exception) -> NoReturn:
    """Raise the error of a run; one that explains itself, without its traceback."""
    if type(error).__module__.startswith("millrace."):
        raise error.with_traceback(None) from None
    raise error


def call_without_run(name: str, options: Mapping[str, Any]) -> Any:
    """Call a command that needs no run directory; return its result."""
    command = COMMANDS[name]
    return command.load_function()(_configure(command, options, name))


def _format_call(name: str, options: Mapping[str, Any]) -> str:
    """Return the Python call that repeats a run on arrays."""
    given = [f"{option}={value!r}" for option, value in options.items()]
    return f"mr.{name.replace(' ', '.')}({', '.join(['data=…', *given])})"


def format_command_line(name: str, options: Mapping[str, Any]) -> str:
    """Return the command line that is equivalent to a call."""
    from millrace.run.provenance import format_options

    return shlex.join(["millrace", *name.split(), *format_options(dict(options))])


def format_script_line(name: str, args: Sequence[str]) -> str:
    """Return the command line of your own application, as it was typed.

    Args:
        name: Name of the application, for a notebook, which has no command line.
        args: Arguments of the application, for a notebook.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is None:
        return shlex.join([name, *args])
    args = sys.argv[1:]  # a script may pass others, and repeats them itself
    module = getattr(getattr(main, "__spec__", None), "name", None)
    if module is not None:
        return shlex.join(["python", "-m", module.removesuffix(".__main__"), *args])
    if not script.endswith(".py"):  # an installed command
        return shlex.join([Path(script).name, *args])
    return shlex.join(["python", sys.argv[0], *args])


def run_as_command(
    function: Callable[[Any, Any], None],
    config_type: type,
    *,
    name: str,
    argv: Sequence[str] | None = None,
    named_configs: Path | None = None,
) -> NoReturn:
    """Run your own application as a command, and exit with its status.

    Args:
        function: The application, called with ``(config, run)``.
        config_type: A frozen dataclass with a section ``run: RunOptions``.
        name: Name of the command, for messages and the run directory.
        argv: Arguments of the command (default: those of this process).
        named_configs: YAML file of named configurations for ``--config``.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    drop_lost_output()
    try:
        config, _ = parse(
            config_type,
            add_launcher_replicas(config_type, args),
            program=name,
            named_configs=named_configs,
            command=name,
        )
        from millrace.run.process import tune_memory_allocation

        tune_memory_allocation()
        from millrace.run.run import run_command

        line = format_script_line(name, args)
        sys.exit(run_command(function, config, command=name, command_line=line))
    except ConfigurationError as error:
        if (message := format_mistake(as_typed(str(error)))) is not None:
            print(f"{name}: {message}", file=sys.stderr)
        sys.exit(2)
    except StartError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
