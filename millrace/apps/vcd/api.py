"""``mr.vcd``: the commands of this application from Python."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.commands.calling import RunResult, call_command

if TYPE_CHECKING:
    from millrace.apps.vcd.predictor import Generator

__all__ = ["evaluate", "load", "sample", "train"]


def train(**options: Any) -> "RunResult[Generator]":
    """Train a VAE refined by Markov chains, like ``millrace vcd train``.

    Args:
        options: Options with underscores: ``config="digits_demo", num_epochs=20``.
    """
    return call_command("vcd train", options, load)


def evaluate(**options: Any) -> RunResult[None]:
    """Estimate the log-likelihood of a trained model, like ``millrace vcd evaluate``."""
    return call_command("vcd evaluate", options, lambda _: None)


def sample(**options: Any) -> RunResult[None]:
    """Save images of a trained model, like ``millrace vcd sample``."""
    return call_command("vcd sample", options, lambda _: None)


def load(run: Path | str) -> "Generator":
    """Load the model of a run directory or a checkpoint."""
    from millrace.apps.vcd.predictor import load_generator

    return load_generator(run)
