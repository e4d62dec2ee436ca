"""What ``millrace vcd evaluate`` and ``vcd sample`` can be told. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from millrace.apps.vcd.config.common import (
    DeviceOptions,
    TestOptions,
    at_least_one,
    named,
)
from millrace.run.options import RunOptions


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(DeviceOptions, RunOptions):
    """Which model, and which pictures."""

    checkpoint_dir: Path = field(metadata=named("--results-dir", "-r"))
    """Directory of the run that trained the model, or one checkpoint in it."""
    dataset_path: Path | None = field(default=None, metadata=named("--data-dir"))
    """Folder that holds the data set the model was trained on (default: as then)."""
    split: Literal["test", "validation", "training"] = "test"
    """Which of its pictures; validation only where training held some out."""

    def check_checkpoint(self) -> None:
        """Raise on what cannot be."""
        RunOptions.__post_init__(self)
        self.check_device()
        if self.resume:
            raise ValueError("resume is for training; this begins anew each time.")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(TestOptions, CheckpointOptions):
    """Estimate the log-likelihood of pictures under a trained model."""

    num_pictures: int | None = None
    """Evaluate only this many, evenly spaced over the split (default: all)."""

    def __post_init__(self) -> None:
        self.check_checkpoint()
        self.check_test()
        if self.num_pictures is not None:
            at_least_one(self, "num_pictures")


@dataclass(frozen=True, kw_only=True)
class SampleConfig(CheckpointOptions):
    """Draw pictures: from the prior, beside originals, and along chains."""

    num_columns: int = 10
    """Pictures in a row of samples and of reconstructions."""
    num_rows: int = 10
    """Rows of samples from the prior, of pairs of original and reconstruction (half as
    many), and of chains."""
    num_steps: int = 8
    """HMC steps of the chains shown."""

    def __post_init__(self) -> None:
        self.check_checkpoint()
        at_least_one(self, "num_columns", "num_rows", "num_steps")
