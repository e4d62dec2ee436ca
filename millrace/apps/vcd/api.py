"""``mr.vcd``: the VCD application from Python."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.commands.calling import AppCommand, RunResult, run_application

if TYPE_CHECKING:
    from millrace.apps.vcd.predictor import Generator

__all__ = ["evaluate", "load", "sample", "train"]

_TRAIN = AppCommand(
    "vcd train",
    "millrace.apps.vcd.config:VcdConfig",
    "millrace.apps.vcd.train:train",
    "millrace.apps.vcd:runs.yml",
)
_EVALUATE = AppCommand(
    "vcd evaluate",
    "millrace.apps.vcd.config.commands:EvaluateConfig",
    "millrace.apps.vcd.evaluate:evaluate",
)
_SAMPLE = AppCommand(
    "vcd sample",
    "millrace.apps.vcd.config.commands:SampleConfig",
    "millrace.apps.vcd.sample:sample",
)


def train(**options: Any) -> "RunResult[Generator]":
    """Train a VAE refined by Markov chains; options as of ``millrace vcd train``.

    Args:
        options: With underscores: ``config="digits_demo", num_epochs=20``.
    """
    return run_application(_TRAIN, options, load)


def evaluate(**options: Any) -> RunResult[None]:
    """Estimate a log-likelihood; the options are those of ``millrace vcd evaluate``."""
    return run_application(_EVALUATE, options, lambda _: None)


def sample(**options: Any) -> RunResult[None]:
    """Draw pictures into a run directory, as ``millrace vcd sample`` does."""
    return run_application(_SAMPLE, options, lambda _: None)


def load(run: Path | str) -> "Generator":
    """Return the model that a run has trained."""
    from millrace.apps.vcd.predictor import load_generator

    return load_generator(run)
