"""Where metrics go besides the screen: JSON lines, TensorBoard, Weights & Biases."""

from pathlib import Path
from typing import Any, Protocol

from millrace.config import ConfigurationError
from millrace.host.options import RunOptions
from millrace.host.run_directory import RunDirectory


class Writer(Protocol):
    """Receives every log event of a run."""

    def write(self, event: dict[str, Any]) -> None:
        """Take one event: update, epoch, time and the metrics."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


def open_writers(
    options: RunOptions, directory: RunDirectory, config: dict[str, Any], name: str
) -> list[Writer]:
    """Open the writers that the options ask for."""
    writers: list[Writer] = [_JsonLines(directory)]
    if options.tensorboard:
        writers.append(_TensorBoard(directory.path / "tensorboard"))
    if options.wandb:
        writers.append(_WeightsAndBiases(directory.path, config, name))
    return writers


class _JsonLines:
    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def write(self, event: dict[str, Any]) -> None:
        self._directory.append_metrics(event)

    def close(self) -> None:
        pass


class _TensorBoard:
    def __init__(self, path: Path) -> None:
        from tensorboard.summary import Writer as EventWriter

        self._writer = EventWriter(str(path))

    def write(self, event: dict[str, Any]) -> None:
        for name, value in _metrics(event).items():
            self._writer.add_scalar(name, value, event["update"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, path: Path, config: dict[str, Any], name: str) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]  (an optional extra)
        except ImportError as error:
            raise ConfigurationError(
                "--wandb needs the wandb package: pip install 'millrace[wandb]'."
            ) from error
        self._run = wandb.init(
            project="millrace", name=f"{name}-{path.name}", config=config, dir=str(path)
        )

    def write(self, event: dict[str, Any]) -> None:
        self._run.log(_metrics(event), step=event["update"])

    def close(self) -> None:
        self._run.finish()


def _metrics(event: dict[str, Any]) -> dict[str, float]:
    """The numbers of an event, without what only places it in time."""
    return {
        name: value
        for name, value in event.items()
        if name not in ("update", "time") and isinstance(value, int | float)
    }
