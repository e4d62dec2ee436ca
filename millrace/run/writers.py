"""Writers of log events: JSON lines, and trackers of other projects."""

import contextlib
import importlib
import importlib.util
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from millrace.config import ConfigurationError
from millrace.distributed.signals import INTERRUPTED
from millrace.durable import write_atomically
from millrace.loop.progress import Writer
from millrace.run.directory import RunDirectory
from millrace.run.options import RunOptions

_MAX_MLFLOW_TEXT = 500
"""The longest value of a parameter that every MLflow store takes."""


class RunFacts(NamedTuple):
    """What a tracker records of a run besides its metrics."""

    path: Path
    """The run directory."""
    config: dict[str, Any]
    """The configuration as plain values."""
    project: str
    name: str
    tags: list[str]


def open_writers(
    options: RunOptions, directory: RunDirectory, config: dict[str, Any], name: str
) -> list[Writer]:
    """Open the writers that the options ask for.

    Args:
        options: The options of the run.
        directory: Its directory.
        config: Its configuration as plain values.
        name: Its command.
    """
    name = options.tracker_run_name or f"{name}-{directory.path.name}"
    facts = RunFacts(
        directory.path, config, options.tracker_project, name, options.wandb_tags
    )
    chosen = set(options.tracker)
    chosen |= {"tensorboard"} if options.tensorboard else set()
    chosen |= {"wandb"} if options.wandb else set()
    writers: list[Writer] = [_JsonLines(directory)]
    if "tensorboard" in chosen:
        writers.append(_TensorBoard(directory.path / "tensorboard", directory))
    with contextlib.ExitStack() as opened:  # closed if the next one cannot be opened
        for tracker in sorted(chosen - {"tensorboard"}):
            writers.append(_TRACKERS[tracker](facts))
            opened.callback(writers[-1].close)
        opened.pop_all()
    return writers


class _JsonLines:
    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def write(self, event: dict[str, Any]) -> None:
        self._directory.append_metrics(event)

    def close(self) -> None:
        pass


class _TensorBoard:
    """Writes event files; a resumed run rewrites them from all metrics so far."""

    def __init__(self, path: Path, directory: RunDirectory) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigurationError(
                "--tensorboard needs the tensorboard package: pip install tensorboard."
            )
        self._path = path
        self._directory = directory
        self._writer: Any = None

    def write(self, event: dict[str, Any]) -> None:
        events = [event]
        if self._writer is None:
            from tensorboard.summary import Writer as EventWriter

            shutil.rmtree(self._path, ignore_errors=True)
            self._writer = EventWriter(str(self._path))
            # The JSON lines are written first, so they include this event.
            events = self._directory.read_metrics()
        for each in events:
            for name, value in _metrics(each).items():
                self._writer.add_scalar(name, value, each["update"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Tracker:
    """A tracker of another project, which shows whether a run has failed."""

    exit_status = 0
    """That of the run, from before `close`."""


class _WandbLike(Tracker):
    """Weights & Biases, or Trackio, which has nearly the same interface."""

    package = "wandb"

    def __init__(self, facts: RunFacts) -> None:
        self._run = self._start(_import_tracker(self.package), facts)

    def _start(self, package: Any, facts: RunFacts) -> Any:
        # A resumed run continues the same Weights & Biases run.
        id_path = facts.path / "wandb-id"
        run_id = id_path.read_text() if id_path.exists() else secrets.token_hex(8)
        write_atomically(id_path, run_id, private=True)
        run = package.init(
            project=facts.project,
            name=facts.name,
            tags=facts.tags,
            config=facts.config,
            dir=str(facts.path),
            id=run_id,
            resume="allow",
        )
        # The steps of wandb cannot decrease, as updates do when old checkpoints are
        # validated after training: the update is the x axis instead.
        run.define_metric("update")
        run.define_metric("*", step_metric="update")
        return run

    def write(self, event: dict[str, Any]) -> None:
        self._run.log({"update": event["update"], **_metrics(event)})

    def close(self) -> None:
        self._run.finish(exit_code=self.exit_status)


class _Trackio(_WandbLike):
    package = "trackio"

    def _start(self, package: Any, facts: RunFacts) -> Any:
        # Runs are known by name. Nothing is embedded in a notebook.
        return package.init(
            project=facts.project,
            name=facts.name,
            config=facts.config,
            resume="allow",
            embed=False,
        )

    def write(self, event: dict[str, Any]) -> None:
        self._run.log(_metrics(event), step=event["update"])

    def close(self) -> None:
        self._run.finish()


class _Mlflow(Tracker):
    """Writes through a client, so that a run of the user's own stays active."""

    def __init__(self, facts: RunFacts) -> None:
        package = _import_tracker("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = package.MlflowClient()
        # A resumed run continues the same MLflow run.
        id_path = facts.path / "mlflow-id"
        if id_path.exists():
            self._run_id = id_path.read_text()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(facts.project)
        experiment = (
            self._client.create_experiment(facts.project)
            if found is None
            else found.experiment_id
        )
        run = self._client.create_run(experiment, run_name=facts.name)
        self._run_id = run.info.run_id
        write_atomically(id_path, self._run_id, private=True)
        for name, value in facts.config.items():
            self._client.log_param(self._run_id, name, str(value)[:_MAX_MLFLOW_TEXT])

    def write(self, event: dict[str, Any]) -> None:
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(name, value, now, event["update"])
            for name, value in _metrics(event).items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        ends = {0: "FINISHED", INTERRUPTED: "KILLED"}
        self._client.set_terminated(self._run_id, ends.get(self.exit_status, "FAILED"))


_TRACKERS: dict[str, Callable[[RunFacts], Writer]] = {
    "mlflow": _Mlflow,
    "trackio": _Trackio,
    "wandb": _WandbLike,
}


def _import_tracker(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"--tracker {package} needs the {package} package: pip install {package}."
        ) from error


def _metrics(event: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of an event, with its epoch."""
    return {
        name: float(value)  # NaN and infinities are text in the JSON lines
        for name, value in event.items()
        if name not in ("update", "time")
    }
