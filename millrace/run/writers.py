"""Where metrics go besides the screen: JSON lines, TensorBoard, Weights & Biases."""

import secrets
import shutil
from pathlib import Path
from typing import Any

from millrace.config import ConfigurationError
from millrace.durable import write_atomically
from millrace.loop.runner import Writer
from millrace.run.directory import RunDirectory
from millrace.run.options import RunOptions


def open_writers(
    options: RunOptions, directory: RunDirectory, config: dict[str, Any], name: str
) -> list[Writer]:
    """Open the writers that the options ask for."""
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
    """Event files, made anew from the metrics so far when a run is resumed."""

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
            # The JSON lines come first, so they hold this event and those before.
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
        kept = path / "wandb-id"  # so that a resumed run goes on with the same one
        identity = kept.read_text() if kept.exists() else secrets.token_hex(8)
        write_atomically(kept, identity)
        self._run = wandb.init(
            project="millrace",
            name=name,
            tags=tags,
            config=config,
            dir=str(path),
            id=identity,
            resume="allow",
        )
        self._step = 0

    def write(self, event: dict[str, Any]) -> None:
        # Steps must not go back, as they do when old checkpoints are validated; what
        # such an event belongs to, its epoch tells.
        self._step = max(self._step, event["update"])
        self._run.log(_metrics(event), step=self._step)

    def close(self) -> None:
        self._run.finish()


def _metrics(event: dict[str, Any]) -> dict[str, float]:
    """The numbers of an event, without what only places it in time."""
    return {
        name: float(value)  # what is not finite is text in the JSON lines
        for name, value in event.items()
        if name not in ("update", "time")
    }
