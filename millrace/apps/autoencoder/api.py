"""``mr.autoencoder``: the recommender from Python."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.commands.calling import AppCommand, RunResult, answer, run_application

if TYPE_CHECKING:
    from millrace.apps.autoencoder.predictor import Recommender

__all__ = ["convert", "load", "sweep", "train", "validate"]

_TRAIN = AppCommand(
    "autoencoder train",
    "millrace.apps.autoencoder.config:AutoencoderConfig",
    "millrace.apps.autoencoder.train:train",
    "millrace.apps.autoencoder:runs.yml",
)
_VALIDATE = AppCommand(
    "autoencoder validate",
    "millrace.apps.autoencoder.config.evaluate:ValidateConfig",
    "millrace.apps.autoencoder.evaluate:validate",
)
_SWEEP = AppCommand(
    "autoencoder sweep",
    "millrace.apps.autoencoder.config.sweep:SweepConfig",
    "millrace.apps.autoencoder.sweep:sweep",
    "millrace.apps.autoencoder:runs.yml",
)
_CONVERT = AppCommand(
    "autoencoder convert",
    "millrace.apps.autoencoder.config.convert:ConvertConfig",
    "millrace.apps.autoencoder.convert:convert",
)


def train(**options: Any) -> "RunResult[Recommender]":
    """Train a recommender; the options are those of ``millrace autoencoder train``.

    Args:
        options: With underscores: ``training_data_file="mine.csv", epochs=20``.
    """
    return run_application(_TRAIN, options, load)


def validate(**options: Any) -> RunResult[None]:
    """Measure a recommender; the options are those of ``millrace autoencoder validate``."""
    return run_application(_VALIDATE, options, lambda _: None)


def sweep(**options: Any) -> RunResult[None]:
    """Train one model for each learning rate; ``summary["trials"]`` has them all."""
    return run_application(_SWEEP, options, lambda _: None)


def convert(**options: Any) -> None:
    """Split ratings by time into files, as ``millrace autoencoder convert`` does."""
    answer(_CONVERT, options)


def load(run: Path | str) -> "Recommender":
    """Return the recommender that a run has trained: the best of its checkpoints."""
    from millrace.apps.autoencoder.predictor import load_recommender

    return load_recommender(run)
