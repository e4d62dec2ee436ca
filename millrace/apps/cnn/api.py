"""``mr.cnn``: the CNN application from Python."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.host.calling import Callee, Finished, run_application

if TYPE_CHECKING:
    from millrace.apps.cnn.trained import TrainedCnn

__all__ = ["load", "train", "validate"]

_TRAIN = Callee(
    "cnn train",
    "millrace.apps.cnn.config:CnnConfig",
    "millrace.apps.cnn.train:train",
    "millrace.apps.cnn:runs.yml",
)
_VALIDATE = Callee(
    "cnn validate",
    "millrace.apps.cnn.validate_options:ValidateConfig",
    "millrace.apps.cnn.validate:validate",
)


def train(**options: Any) -> "Finished[TrainedCnn]":
    """Train an image classifier; the options are those of ``millrace cnn train``.

    Args:
        options: With underscores: ``config="digits_demo", num_epochs=5``.
    """
    return run_application(_TRAIN, options, load)


def validate(**options: Any) -> Finished[None]:
    """Measure inference; the options are those of ``millrace cnn validate``."""
    return run_application(_VALIDATE, options, lambda _: None)


def load(run: Path | str) -> "TrainedCnn":
    """Return the network that a run has trained."""
    from millrace.apps.cnn.trained import load_trained

    return load_trained(run)
