"""Applications as Python calls: the same options, and the same run directory."""

import dataclasses
import functools
import html
import importlib
import json
import shlex
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Generic, TypeVar

from millrace.config import configure
from millrace.report.record import read_events

Model = TypeVar("Model")


@dataclasses.dataclass(frozen=True)
class RunResult(Generic[Model]):
    """A run that has ended: what came of it, and the model that it trained."""

    path: Path
    """The run directory."""
    summary: dict[str, Any]
    """What ``summary.json`` holds: status, metrics, speed, versions."""
    load: Callable[[Path], Model] = dataclasses.field(repr=False)

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return self.summary["metrics"]

    @functools.cached_property
    def model(self) -> Model:
        """The trained model, read from the run's checkpoints when first asked for."""
        return self.load(self.path)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What was logged, in order: update, epoch, time and metrics."""
        return read_events(self.path)

    def _repr_html_(self) -> str:
        """Show the figures where a notebook shows values."""
        rows = "".join(
            f"<tr><td>{html.escape(name.replace('_', ' '))}</td><td>{value:.4g}</td></tr>"
            for name, value in self.metrics.items()
        )
        where = html.escape(str(self.path / "report.html"))
        return (
            f"<p><b>{self.summary['status']}</b>, report in <code>{where}</code></p>"
            f"<table>{rows}</table>"
        )


@dataclasses.dataclass(frozen=True)
class AppCommand:
    """A command that can be called; where its parts are, as the command line has it."""

    command: str
    """Such as ``cnn train``."""
    config: str
    function: str
    named_configs: str | None = None

    def configured(self, options: Mapping[str, Any]) -> Any:
        """Return the configuration that these options ask for."""
        named = None
        if self.named_configs is not None:
            package, name = self.named_configs.split(":")
            named = Path(str(resources.files(package) / name))
        config, _ = configure(_load(self.config), options, named)
        return config


def run_application(
    callee: AppCommand, options: Mapping[str, Any], load: Callable[[Path], Model]
) -> RunResult[Model]:
    """Run an application as its command would; an error is raised, not only printed.

    A run that is interrupted comes back with ``summary["status"] == "interrupted"``.
    """
    config = callee.configured(options)
    from millrace.run.process import tune_memory_allocation

    tune_memory_allocation()
    from millrace.run.run import Run, run_command

    function = _load(callee.function)
    runs: list[Run] = []
    errors: list[Exception] = []

    def remembering(config: Any, run: Run) -> None:
        runs.append(run)
        function(config, run)

    run_command(
        remembering,
        config,
        command=callee.command.replace(" ", "-"),
        command_line=command_line(callee.command, options),
        on_failure=errors.append,
    )
    if errors:
        raise errors[0]
    if not runs:
        raise KeyboardInterrupt
    return RunResult(runs[0].directory.path, runs[0].summary, load)


def answer(callee: AppCommand, options: Mapping[str, Any]) -> Any:
    """Call a command that needs no run directory."""
    return _load(callee.function)(callee.configured(options))


def command_line(command: str, options: Mapping[str, Any]) -> str:
    """Write a call as the command that does the same."""
    words = ["millrace", *command.split()]
    for name, value in options.items():
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list | tuple):
            words += map(str, value)
        elif isinstance(value, dict):
            words.append(json.dumps(value))
        else:
            words.append(str(value))
    return shlex.join(words)


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)
