"""``mr.cnn``: the CNN application from Python."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.commands.calling import AppCommand, RunResult, run_application

if TYPE_CHECKING:
    from millrace.apps.cnn.predictor import TrainedCnn

__all__ = ["load", "train", "validate"]

_TRAIN = AppCommand(
    "cnn train",
    "millrace.apps.cnn.config:CnnConfig",
    "millrace.apps.cnn.train:train",
    "millrace.apps.cnn:runs.yml",
)
_VALIDATE = AppCommand(
    "cnn validate",
    "millrace.apps.cnn.config.inference:ValidateConfig",
    "millrace.apps.cnn.inference.command:validate",
)


def train(**options: Any) -> "RunResult[TrainedCnn]":
    """Train an image classifier; the options are those of ``millrace cnn train``.

    Args:
        options: With underscores: ``config="digits_demo", num_epochs=5``.
    """
    return run_application(_TRAIN, options, load)


def validate(**options: Any) -> RunResult[None]:
    """Measure inference; the options are those of ``millrace cnn validate``."""
    return run_application(_VALIDATE, options, lambda _: None)


def load(run: Path | str) -> "TrainedCnn":
    """Return the network that a run has trained."""
    from millrace.apps.cnn.predictor import load_trained

    return load_trained(run)
