"""What ``cnn verify-dataset`` and ``cnn benchmark-dataset`` can be told; not heavy."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.data import DataOptions, DatasetName
from millrace.precision import PrecisionName


@dataclass(frozen=True, kw_only=True)
class VerifyDatasetConfig:
    """Check that a data set on disk is what it should be.

    The sizes of both splits are compared with the published ones, samples are read, and
    each thing that is not as it should be is a line. The exit status is 1 if there are any.
    """

    dataset: DatasetName = "cifar10"
    """Data set: mnist, fashion-mnist, cifar10, cifar100, imagenet, imagefolder (only that
    its pictures can be read), or digits."""
    dataset_path: Path = Path(".")
    """Folder that holds the data set. Where it has none, what millrace data fetch has
    downloaded is checked."""
    num_samples: int = 256
    """Pictures of each split of imagenet and imagefolder to decode, evenly spaced; 0:
    all. The other data sets are always read whole."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            raise ValueError(f"num_samples must be 0 or more, got {self.num_samples}.")

    @property
    def training(self) -> CnnConfig:
        """What reads every sample as it lies on disk."""
        return CnnConfig(
            dataset=self.dataset,
            dataset_path=self.dataset_path,
            accelerator_side_preprocess=True,
            eight_bit_transfer=True,
            max_corrupt=sys.maxsize,  # all are listed
        )


@dataclass(frozen=True, kw_only=True)
class BenchmarkDatasetConfig(DataOptions):
    """Measure how fast the host can read and prepare a data set.

    Batches are made as for training and copied once, as staging for a device would; the
    speed of every epoch goes to standard error. The first two epochs of three or more are
    left out of the mean, which is printed as "Throughput = ... examples/sec".
    """

    dataset: DatasetName = "cifar10"
    """Data set to read."""
    micro_batch_size: int = 8
    """Samples in a batch."""
    num_epochs: int = 1
    """How often to measure."""
    elements_per_epoch: int | None = None
    """Batches in one measurement (default: as many as the data set has)."""
    split: Literal["train", "validation"] = "train"
    """Which samples to read; validation's are neither shuffled nor augmented."""
    precision: PrecisionName | None = None
    """Accepted; the host prepares bytes or 32-bit numbers whatever the device computes
    in."""
    seed: int = 0
    """Of the order of samples and the augmentation."""
    run_dir: Path | None = None
    """Folder for the results (default: runs/cnn-benchmark-dataset-TIME)."""
    json: bool = False
    """Print the measurements to standard output as JSON; they are written to a folder
    only if run_dir is given."""
    quiet: bool = False
    """Print nothing but the result."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        for name in ("num_epochs", "elements_per_epoch"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}.")
        if self.synthetic == "device":
            raise ValueError(
                "synthetic_data device makes nothing on the host, so there is nothing to "
                "measure. Choose host."
            )
        _ = self.training  # raises on what does not go together

    @property
    def training(self) -> CnnConfig:
        """A training run that would read the same batches."""
        shared = [*dataclasses.fields(DataOptions), "micro_batch_size", "seed"]
        names = [field if isinstance(field, str) else field.name for field in shared]
        return CnnConfig(**{name: getattr(self, name) for name in names})
