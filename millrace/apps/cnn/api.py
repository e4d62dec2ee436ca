"""``mr.cnn``: the commands of this application, from Python."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.commands.calling import RunResult, call_command

if TYPE_CHECKING:
    from millrace.apps.cnn.predictor import TrainedCnn

__all__ = ["load", "train", "validate"]


def train(**options: Any) -> "RunResult[TrainedCnn]":
    """Train an image classifier.

    Args:
        options: Options of ``millrace cnn train``, with underscores:
            ``config="digits_demo", num_epochs=5``.
    """
    return call_command("cnn train", options, load)


def validate(**options: Any) -> RunResult[None]:
    """Measure inference; the options are those of ``millrace cnn validate``."""
    return call_command("cnn validate", options, lambda _: None)


def load(run: Path | str) -> "TrainedCnn":
    """Return the model that a run has trained."""
    from millrace.apps.cnn.predictor import load_trained

    return load_trained(run)
