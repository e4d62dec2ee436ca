"""``mr.vcd``: the VCD application from Python."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.host.calling import Callee, Finished, run_application

if TYPE_CHECKING:
    from millrace.apps.vcd.generator import Generator

__all__ = ["evaluate", "load", "sample", "train"]

_TRAIN = Callee(
    "vcd train",
    "millrace.apps.vcd.config:VcdConfig",
    "millrace.apps.vcd.train:train",
    "millrace.apps.vcd:runs.yml",
)
_EVALUATE = Callee(
    "vcd evaluate",
    "millrace.apps.vcd.checkpoint_options:EvaluateConfig",
    "millrace.apps.vcd.evaluate:evaluate",
)
_SAMPLE = Callee(
    "vcd sample",
    "millrace.apps.vcd.checkpoint_options:SampleConfig",
    "millrace.apps.vcd.sample:sample",
)


def train(**options: Any) -> "Finished[Generator]":
    """Train a VAE refined by Markov chains; options as of ``millrace vcd train``.

    Args:
        options: With underscores: ``config="digits_demo", num_epochs=20``.
    """
    return run_application(_TRAIN, options, load)


def evaluate(**options: Any) -> Finished[None]:
    """Estimate a log-likelihood; the options are those of ``millrace vcd evaluate``."""
    return run_application(_EVALUATE, options, lambda _: None)


def sample(**options: Any) -> Finished[None]:
    """Draw pictures into a run directory, as ``millrace vcd sample`` does."""
    return run_application(_SAMPLE, options, lambda _: None)


def load(run: Path | str) -> "Generator":
    """Return the model that a run has trained."""
    from millrace.apps.vcd.generator import load_generator

    return load_generator(run)
