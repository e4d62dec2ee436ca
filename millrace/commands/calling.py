"""Run commands from Python, with the same options and the same run directory."""

import dataclasses
import functools
import html
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from millrace.commands.registry import COMMANDS
from millrace.config import ConfigurationError, parse
from millrace.distributed.environment import add_launcher_replicas, is_follower
from millrace.output import drop_lost_output
from millrace.report.record import read_events

Model = TypeVar("Model")


@dataclasses.dataclass(frozen=True)
class RunResult(Generic[Model]):
    """A finished run: its directory, its summary and the trained model."""

    path: Path
    """The run directory."""
    summary: dict[str, Any]
    """The contents of ``summary.json``: status, metrics, throughput, versions."""
    load: Callable[[Path], Model] = dataclasses.field(repr=False)

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return self.summary["metrics"]

    @functools.cached_property
    def model(self) -> Model:
        """The trained model, loaded from a checkpoint on first use."""
        return self.load(self.path)

    @property
    def events(self) -> list[dict[str, Any]]:
        """All log events, each with update, epoch, time and metrics."""
        return read_events(self.path)

    def _repr_html_(self) -> str:
        """Return a table of the metrics, for notebooks."""
        rows = "".join(
            f"<tr><td>{html.escape(name.replace('_', ' '))}</td><td>{value:.4g}</td></tr>"
            for name, value in self.metrics.items()
        )
        where = html.escape(str(self.path / "report.html"))
        return (
            f"<p><b>{self.summary['status']}</b>, report in <code>{where}</code></p>"
            f"<table>{rows}</table>"
        )


def call_command(
    name: str, options: Mapping[str, Any], load: Callable[[Path], Model]
) -> RunResult[Model]:
    """Run a command in a run directory; errors are both reported there and raised.

    An interrupted run returns with ``summary["status"] == "interrupted"``.

    Args:
        name: The command, such as ``cnn train``.
        options: Options by name.
        load: Loads the trained model from a run directory.
    """
    command = COMMANDS[name]
    config = command.configure(options)
    from millrace.run.process import tune_memory_allocation

    tune_memory_allocation()
    from millrace.run.run import Run, run_command

    function = command.load_function()
    runs: list[Run] = []
    errors: list[Exception] = []

    def call(config: Any, run: Run) -> None:
        runs.append(run)
        function(config, run)

    run_command(
        call,
        config,
        command=name.replace(" ", "-"),
        command_line=format_command_line(name, options),
        on_failure=errors.append,
    )
    if errors:
        raise errors[0]
    if not runs:  # interrupted before the function was called
        raise KeyboardInterrupt
    return RunResult(runs[0].directory.path, runs[0].summary, load)


def call_without_run(name: str, options: Mapping[str, Any]) -> Any:
    """Call a command that needs no run directory; return its result."""
    command = COMMANDS[name]
    return command.load_function()(command.configure(options))


def format_command_line(name: str, options: Mapping[str, Any]) -> str:
    """Return the command line that is equivalent to a call."""
    args = ["millrace", *name.split()]
    for option, value in options.items():
        args.append("--" + option.replace("_", "-"))
        if isinstance(value, list | tuple):
            args += map(str, value)
        elif isinstance(value, dict):
            args.append(json.dumps(value))
        else:
            args.append(str(value))
    return shlex.join(args)


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
        )
        from millrace.run.process import tune_memory_allocation

        tune_memory_allocation()
        from millrace.run.run import run_command

        line = shlex.join([name, *args])
        sys.exit(run_command(function, config, command=name, command_line=line))
    except ConfigurationError as error:
        if not is_follower():  # process 0 reports for all
            print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
