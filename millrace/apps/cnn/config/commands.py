"""Options of the other ``millrace cnn`` commands. Imports nothing heavy."""

import dataclasses
import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.augmentation import AugmentationOptions, expand_augmentation
from millrace.apps.cnn.config.data import DataOptions, DatasetName, find_dataset
from millrace.apps.cnn.config.graphcore import GraphcoreOptions, expand_options
from millrace.apps.cnn.config.model import ModelOptions
from millrace.apps.cnn.config.training import WorkflowOptions
from millrace.config import (
    STORED,
    ConfigurationError,
    flat_options,
    open_run,
    option_value,
)
from millrace.plan import HalfType, Plan, PrecisionName
from millrace.run.options import RunOptions, ShortRunOptions, Which
from millrace.run.saved import find_run
from millrace.storage.address import display

ExportFormat = Literal["safetensors", "torch", "stablehlo", "onnx"]

_TRAINING_ONLY = (
    *("bn_momentum", "stable_norm", "dbn_replica_group_size", "gather_conv_output"),
)
"""Options of a model that matter only in training."""
_FROM_RUN = {
    *(field.name for field in dataclasses.fields(ModelOptions)),
    *(field.name for field in dataclasses.fields(DataOptions)),
    *("precision", "half_type"),
} - {"pretrained", "synthetic_data", "dbn_replica_group_size", "gather_conv_output"}
"""Options that ``cnn validate`` takes from the run whose checkpoint it reads."""


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    """Measure inference: throughput, latency and, with real data, accuracy."""

    common_options: ClassVar = (
        *("checkpoint_dir", "model_name", "model_size", "pretrained"),
        *("dataset", "dataset_path", "image_size", "synthetic_data"),
        *("batch_size", "num_replicas", "precision", "latency_calls"),
        *("run_dir", "seed", "quiet", "debug"),
    )

    batch_size: list[int] = field(
        default_factory=lambda: [1], metadata={"aliases": ("--micro-batch-size",)}
    )
    """Samples per batch and replica; several sizes are measured in turn."""
    repeat: int = 1
    """Throughput measurements per batch size. With real data, each is of whole passes over
    the validation set, until the figure is known to 1 % or the measurements have taken 30
    seconds together; accuracy needs one pass, which may take longer."""
    num_batches: int | None = None
    """Batches per throughput measurement, with synthetic data (default: one pass over the
    validation set, or fewer if the figure is known to 1 %, or if the measurements take
    more than 30 seconds together, 3 for each at least)."""
    batches_per_step: int = 1000
    """Approximate number of batches per call when measuring throughput."""
    latency_calls: int | None = None
    """Calls with one batch each that are timed for latency; 0: none. p99 needs 100 calls,
    p99.9 needs 1000 (default: 1000, but at most 30 seconds)."""
    num_replicas: int = field(default=1, metadata={"aliases": ("--replicas",)})
    """Number of devices; each processes its own batches."""
    precision: PrecisionName = "32.32"
    """Bits of computation and of stored weights: 16.16, 16.32 or 32.32. Weights are cast
    to the compute type in advance."""
    half_type: HalfType = "bfloat16"
    """The 16-bit type that precision refers to."""
    fold_batch_norm: bool = True
    """Fold batch norm into the preceding convolutions."""
    checkpoint_dir: Path | None = field(
        default=None,
        metadata={"aliases": ("--restore-path",), "positional": "RUN", **STORED},
    )
    """Directory of the run that trained the model, its folder of checkpoints, or one
    checkpoint; options of the model and the data default to those of the run (default:
    random weights)."""
    which: Which = "best"
    """Checkpoint of the run to use: the best by validation accuracy, the last, or the one
    after this number of updates."""
    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    run: ShortRunOptions = ShortRunOptions()
    graphcore: GraphcoreOptions = GraphcoreOptions()

    replicas_of_each_process = True  # processes do not share batches

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.model.pretrained is not None and self.checkpoint_dir is not None:
            raise ValueError("Give pretrained or checkpoint_dir, not both.")
        if self.num_batches is not None and self.data.synthetic is None:
            raise ValueError(
                "num_batches is for synthetic data: real data are always used in full."
            )
        _ = self.train_config  # raises an error if options contradict each other

    def _check_numbers(self) -> None:
        sizes = [("batch_size", size) for size in self.batch_size or [0]]
        names = ("repeat", "batches_per_step", "num_replicas", "num_batches")
        for name, value in [*sizes, *((name, getattr(self, name)) for name in names)]:
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.latency_calls is not None and self.latency_calls < 0:
            raise ValueError(f"latency_calls must be 0 or more, got {self.latency_calls}.")

    @staticmethod
    def expand_options(values: dict[str, Any]) -> dict[str, Any]:
        """Add the options of the run in `checkpoint_dir`, and replace shorthands."""
        values = _options_of_run(values.get("checkpoint_dir")) | values
        known = flat_options(ValidateConfig)
        expanded = expand_options(values)
        return {name: value for name, value in expanded.items() if name in known}

    @functools.cached_property
    def train_config(self) -> CnnConfig:
        """The configuration that trains this model on this data."""
        return self.train_config_for(max(self.batch_size))

    def train_config_for(self, batch_size: int) -> CnnConfig:
        """Return the training configuration with this micro-batch size."""
        return CnnConfig(
            model=self.model,
            data=self.data,
            workflow=WorkflowOptions(validation=True),
            plan=Plan(
                micro_batch_size=batch_size,
                num_replicas=self.num_replicas,
                precision=self.precision,
                half_type=self.half_type,
            ),
            run=RunOptions(seed=self.run.seed, virtual_devices=self.run.virtual_devices),
        )

    def notices(self) -> list[str]:
        """Return notices about options that have no effect in inference."""
        if self.checkpoint_dir is not None:  # they may come from the run
            return self.graphcore.notices()
        defaults = ModelOptions()
        return self.graphcore.notices() + [
            f"--{name.replace('_', '-')} has no effect: batch norm uses the moving "
            "statistics."
            for name in _TRAINING_ONLY
            if getattr(self.model, name) != getattr(defaults, name)
        ]


def _options_of_run(path: Path | None) -> dict[str, Any]:
    """Return the model and data options of the run that a checkpoint belongs to."""
    if path is None:
        return {}
    if not open_run(path).exists():
        raise ConfigurationError(
            f"There is no {display(path)}. Give the directory of a run of `millrace cnn "
            "train`, or one of its checkpoints."
        )
    saved = find_run(path, command="cnn train", needs_checkpoints=False)
    if saved.directory is None:
        return {}
    saved.check_command("cnn-train")
    config = saved.build_config(CnnConfig)
    values = {name: option_value(config, name) for name in _FROM_RUN}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class VerifyDatasetConfig:
    """Check that a dataset on disk is complete and readable.

    Compares the sizes of both splits with the published ones, reads samples, and prints
    one line per mismatch. The exit status is 1 if there are any.
    """

    dataset: DatasetName = "cifar10"
    """Dataset: mnist, fashion-mnist, cifar10, cifar100, imagenet, imagefolder (checks
    only that images can be read) or digits."""
    dataset_path: Path = Path(".")
    """Folder of the dataset. If it is not there, the copy downloaded by millrace data
    fetch is checked."""
    num_samples: int = 256
    """Images to decode per split of imagenet and imagefolder, evenly spaced; 0: all. Other
    datasets are always read in full."""
    debug: bool = False
    """Show the full traceback of an error."""

    expand_options = staticmethod(find_dataset)

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            raise ValueError(f"num_samples must be 0 or more, got {self.num_samples}.")

    @property
    def train_config(self) -> CnnConfig:
        """The configuration of a training run that reads every sample unprocessed."""
        data = DataOptions(
            dataset=self.dataset,
            dataset_path=self.dataset_path,
            accelerator_side_preprocess=True,
            eight_bit_transfer=True,
            max_corrupt=sys.maxsize,  # to list all of them
        )
        return CnnConfig(data=data)


@dataclass(frozen=True, kw_only=True)
class BenchmarkDatasetConfig:
    """Measure how fast the host reads and preprocesses a dataset.

    Batches are prepared as in training and copied once, as for transfer to a device. The
    speed of each epoch goes to standard error; the mean, without the first two epochs of
    three or more, is printed as "Throughput = ... examples/sec". For images in files, it
    also shows the speed per core and the time for reading, decoding, resizing, staging in a
    buffer and copying to a device.
    """

    micro_batch_size: int = 8
    """Samples per batch."""
    num_epochs: int = 1
    """Number of measurements."""
    elements_per_epoch: int | None = None
    """Batches per measurement (default: one pass over the dataset)."""
    split: Literal["train", "validation"] = "train"
    """Split to read; validation is neither shuffled nor augmented."""
    precision: PrecisionName | None = None
    """No effect: the host prepares bytes or 32-bit numbers for any precision."""
    seed: int = 0
    """Seed for the order of samples and for augmentation."""
    run_dir: Path | None = None
    """Folder for the results (default: runs/cnn-benchmark-dataset-TIME)."""
    json: bool = False
    """Print the measurements to standard output as JSON, and write them to a folder only
    if run_dir is given."""
    quiet: bool = False
    """Print nothing but the result."""
    debug: bool = False
    """Show the full traceback of an error."""
    data: DataOptions = DataOptions(dataset="cifar10")

    expand_options = staticmethod(find_dataset)

    def __post_init__(self) -> None:
        for name in ("num_epochs", "elements_per_epoch"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}.")
        if self.data.synthetic == "device":
            raise ValueError(
                "With synthetic_data device the host generates nothing, so there is "
                "nothing to measure. Use host."
            )
        _ = self.train_config  # raises an error if options contradict each other

    @property
    def train_config(self) -> CnnConfig:
        """The configuration of a training run that reads the same batches."""
        return CnnConfig(
            data=self.data,
            plan=Plan(micro_batch_size=self.micro_batch_size),
            run=RunOptions(seed=self.seed),
        )


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Print the most likely classes of image files.

    IMAGES are files, folders (searched for images, with their subfolders) and patterns such
    as 'photos/*.jpg'. Images are cropped and scaled as in the validation of RUN. Images
    that cannot be read are named and left out, and the exit status is then 1.
    """

    run: Path = field(metadata={"positional": True, **STORED})
    """Directory of a run of cnn train, or one of its checkpoints."""
    images: list[str] = field(metadata={"positional": True})
    """Image files, folders or patterns."""
    which: Which = "best"
    """Checkpoint of the run to use: the best by validation accuracy, the last, or the one
    after this number of updates."""
    top: int = 5
    """Classes per image, the most likely first."""
    format: Literal["table", "csv", "json"] | None = None
    """Format: table, csv (a line per image and class) or json (a list with an entry per
    image) (default: by the ending of --output, otherwise table)."""
    output: Path | None = field(default=None, metadata={"aliases": ("--out",)})
    """Write to this file instead of the terminal."""
    batch_size: int = 64
    """Images that are classified at a time."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        for name in ("top", "batch_size"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not self.images:
            raise ValueError("IMAGES is required: a file, a folder or a pattern.")

    @property
    def resolved_format(self) -> str:
        """The format of the output."""
        ending = self.output.suffix.lower() if self.output else ""
        return self.format or {".csv": "csv", ".json": "json"}.get(ending, "table")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a trained model to a folder, for use without millrace.

    The folder gets config.json (classes, image size, normalization), README.md (a model
    card with the metrics and the code that loads the model; one of your own stays), and
    in each format:

    safetensors: model.safetensors, the weights as float32. The families resnet, resnext
    and efficientnet have the names and shapes of torchvision, which cnn train --pretrained
    reads as well; other models have the names of our layers.

    torch: model.pt, the same as a state dict for torch.load; needs no PyTorch to write.

    stablehlo: model.stablehlo, a program with weights and preprocessing inside. It takes
    any number of images as bytes, returns logits, and runs on CPUs and NVIDIA GPUs with
    jax.export.

    onnx: model.onnx, the same program for ONNX Runtime and others.
    """

    run: Path = field(metadata={"positional": True, **STORED})
    """Directory of a run of cnn train, or one of its checkpoints."""
    which: Which = "best"
    """Checkpoint of the run to use: the best by validation accuracy, the last, or the one
    after this number of updates."""
    format: list[ExportFormat] = field(default_factory=lambda: ["safetensors"])
    """Formats: safetensors, torch, stablehlo, onnx."""
    output: Path | None = field(default=None, metadata={"aliases": ("--out",)})
    """Folder to write; created if needed (default: export in the run directory)."""
    names: Literal["torchvision", "timm"] = "torchvision"
    """Names of the weights of an efficientnet; other models have the same in both."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        if not self.format:
            raise ValueError("Give a format: safetensors, torch, stablehlo, onnx.")


@dataclass(frozen=True, kw_only=True)
class ShowAugmentationConfig:
    """Draw a grid of augmented training images.

    Each row has an original image on the left and random versions of it, as the network
    would get them in training. Nothing is trained.
    """

    output: Path = field(default=Path("augmentation.png"), metadata={"aliases": ("-o",)})
    """File to write: PNG, or JPEG or WebP by its ending."""
    num_images: int = 4
    """Images, one per row."""
    num_versions: int = 8
    """Augmented versions of each image."""
    seed: int = 0
    """Seed for the choice of images and for augmentation."""
    debug: bool = False
    """Show the full traceback of an error."""
    data: DataOptions = DataOptions()
    augmentation: AugmentationOptions = AugmentationOptions()

    def __post_init__(self) -> None:
        for name in ("num_images", "num_versions"):
            if (number := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {number}.")
        if self.data.synthetic:
            raise ValueError("synthetic_data has no images to look at.")
        _ = self.train_config  # raises an error if options contradict each other

    @staticmethod
    def expand_options(values: dict[str, Any]) -> dict[str, Any]:
        """Find the dataset in its folder, and send bytes if pixels are changed."""
        values = find_dataset(dict(values))
        expand_augmentation(values)
        return values

    @property
    def train_config(self) -> CnnConfig:
        """The configuration of a training run with the same augmentation."""
        # Blending takes at least two samples.
        samples = max(2, self.num_images * self.num_versions)
        return CnnConfig(
            data=self.data,
            augmentation=self.augmentation,
            workflow=WorkflowOptions(validation=False),
            plan=Plan(micro_batch_size=samples),
            run=RunOptions(seed=self.seed),
        )
