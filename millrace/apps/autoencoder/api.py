"""``mr.autoencoder``: the commands of this application in Python."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.commands.calling import RunResult, call_command, call_without_run

if TYPE_CHECKING:
    from millrace.apps.autoencoder.predictor import Recommender

__all__ = ["convert", "load", "sweep", "train", "validate"]


def train(**options: Any) -> "RunResult[Recommender]":
    """Train a recommender.

    Args:
        options: The options of ``millrace autoencoder train``, with underscores:
            ``training_data_file="mine.csv", epochs=20``.
    """
    return call_command("autoencoder train", options, load)


def validate(**options: Any) -> RunResult[None]:
    """Validate a recommender, with the options of ``millrace autoencoder validate``."""
    return call_command("autoencoder validate", options, lambda _: None)


def sweep(**options: Any) -> RunResult[None]:
    """Train one model per learning rate; ``summary["trials"]`` has the results."""
    return call_command("autoencoder sweep", options, lambda _: None)


def convert(**options: Any) -> None:
    """Split ratings by time into files, like ``millrace autoencoder convert``."""
    call_without_run("autoencoder convert", options)


def load(run: Path | str) -> "Recommender":
    """Load the best checkpoint of a training run."""
    from millrace.apps.autoencoder.predictor import load_recommender

    return load_recommender(run)
