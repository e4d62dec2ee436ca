"""Writers of log events: JSON lines, TensorBoard, Weights & Biases."""

import secrets
import shutil
from pathlib import Path
from typing import Any

from millrace.config import ConfigurationError
from millrace.durable import write_atomically
from millrace.loop.progress import Writer
from millrace.run.directory import RunDirectory
from millrace.run.options import RunOptions


def open_writers(
    options: RunOptions, directory: RunDirectory, config: dict[str, Any], name: str
) -> list[Writer]:
    """Open the writers that the options ask for.

    Args:
        options: The options of the run.
        directory: Its directory.
        config: Its configuration as plain values, for Weights & Biases.
        name: Its command.
    """
    writers: list[Writer] = [_JsonLines(directory)]
    if options.tensorboard:
        writers.append(_TensorBoard(directory.path / "tensorboard", directory))
    if options.wandb:
        name = options.wandb_run_name or f"{name}-{directory.path.name}"
        tags = options.wandb_tags
        writers.append(_WeightsAndBiases(directory.path, config, name, tags))
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


class _WeightsAndBiases:
    def __init__(
        self, path: Path, config: dict[str, Any], name: str, tags: list[str]
    ) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]  (an optional extra)
        except ImportError as error:
            raise ConfigurationError(
                "--wandb needs the wandb package: pip install wandb."
            ) from error
        # A resumed run continues the same Weights & Biases run.
        id_path = path / "wandb-id"
        run_id = id_path.read_text() if id_path.exists() else secrets.token_hex(8)
        write_atomically(id_path, run_id)
        self._run = wandb.init(
            project="millrace",
            name=name,
            tags=tags,
            config=config,
            dir=str(path),
            id=run_id,
            resume="allow",
        )
        self._step = 0

    def write(self, event: dict[str, Any]) -> None:
        # Steps must not decrease, as they would when old checkpoints are validated; the
        # epoch in the event tells which one it is.
        self._step = max(self._step, event["update"])
        self._run.log(_metrics(event), step=self._step)

    def close(self) -> None:
        self._run.finish()


def _metrics(event: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of an event, with its epoch."""
    return {
        name: float(value)  # NaN and infinities are text in the JSON lines
        for name, value in event.items()
        if name not in ("update", "time")
    }
