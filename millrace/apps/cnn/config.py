"""What ``millrace cnn train`` can be told. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from millrace.host.options import RunOptions
from millrace.plan import Plan

ScheduleName = Literal["const", "cosine", "stepped", "polynomial", "exponential"]
DatasetName = Literal["digits", "mnist", "fashion-mnist", "cifar10", "cifar100"]

_RATES = ("logs_per_epoch", "ckpts_per_epoch", "validations_per_epoch")
_NORMS = {
    "batch_norm": {"momentum", "epsilon"},
    "group_norm": {"num_groups", "channels_per_group", "epsilon"},
}


@dataclass(frozen=True, kw_only=True)
class CnnConfig(RunOptions, Plan):
    """Train a convolutional network for image classification."""

    dataset: DatasetName | None = None
    """Data set to train and validate on (default: cifar10, or digits for digits_cnn)."""
    dataset_path: Path = Path(".")
    """Folder that holds the data set."""
    model_name: str | None = field(default=None, metadata={"aliases": ("--model",)})
    """Model to train: digits_cnn, toy_model, cifar_resnet8/20/32/44/56, resnet18/34/50
    (default: digits_cnn for digits, otherwise toy_model)."""
    accelerator_side_preprocess: bool = False
    """Normalise and flip images on the device instead of the host."""
    eight_bit_transfer: bool = False
    """Send images to the device as bytes; needs accelerator_side_preprocess."""
    num_epochs: int = 1
    """Passes over the training data."""
    weight_updates_per_epoch: int = -1
    """Weight updates that count as an epoch (-1: as many as the data gives)."""
    optimizer: Literal["sgd", "lars", "rmsprop"] = "sgd"
    """Optimiser."""
    optimizer_params: dict[str, Any] = field(default_factory=lambda: {"momentum": 0})
    """Its parameters: momentum; lars also weight_decay, eeta, epsilon; rmsprop also
    base_decay_exponent, epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay, in proportion to the learning rate."""
    l2_regularization: float = 0.0
    """Added to the gradient: this times the weight."""
    lr_schedule: Literal["const", "cosine", "stepped", "polynomial", "exponential"] = (
        "const"
    )
    """How the learning rate changes over the run."""
    lr_schedule_params: dict[str, Any] = field(
        default_factory=lambda: {"initial_learning_rate": 0.0001}
    )
    """Its parameters; initial_learning_rate is per sample of the global batch."""
    lr_warmup_params: dict[str, Any] | None = None
    """warmup_mode (shift or mask) and warmup_epochs."""
    lr_staircase: bool = False
    """Keep the learning rate constant within an epoch."""
    label_smoothing: float = 0.0
    """Share of each label's weight given to all classes alike."""
    norm_layer: dict[str, Any] = field(default_factory=lambda: {"name": "batch_norm"})
    """name batch_norm (momentum, epsilon) or group_norm (num_groups or
    channels_per_group, epsilon)."""
    bn_momentum: float = 0.97
    """Of batch norm's moving statistics, unless norm_layer gives one."""
    stable_norm: bool = False
    """Compute batch norm's variance in a second pass over the data."""
    dbn_replica_group_size: int = 1
    """Pool batch norm's statistics over groups of this many consecutive replicas."""
    logs_per_epoch: float = 1.0
    """How often metrics are reported; 0: only at the end."""
    ckpts_per_epoch: float = 1.0
    """How often a checkpoint is written; 0: only at the end."""
    validations_per_epoch: float = 1.0
    """How often the model is validated; 0: only at the end."""
    validation: bool = True
    """Whether to validate at all."""
    validation_micro_batch_size: int | None = None
    """Samples each replica validates at a time (default: micro_batch_size)."""
    pipeline_num_parallel: int = field(default=2, metadata={"may_change": True})
    """Batches prepared at the same time on the host."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        Plan.__post_init__(self)
        self._check_numbers()
        self._check_norm()
        if self.eight_bit_transfer and not self.accelerator_side_preprocess:
            raise ValueError(
                "eight_bit_transfer sends images as they are read, so "
                "accelerator_side_preprocess must be on as well."
            )

    def _check_numbers(self) -> None:
        sizes = {
            "num_epochs": self.num_epochs,
            "validation_micro_batch_size": self.validation_micro_batch_size,
            "dbn_replica_group_size": self.dbn_replica_group_size,
            "pipeline_num_parallel": self.pipeline_num_parallel,
        }
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}.")
        updates = self.weight_updates_per_epoch
        if updates < 1 and updates != -1:
            raise ValueError(
                f"weight_updates_per_epoch must be at least 1, or -1; got {updates}."
            )
        for name in (*_RATES, "weight_decay", "l2_regularization"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value:g}.")
        for name in ("label_smoothing", "bn_momentum"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {value}.")

    def _check_norm(self) -> None:
        name = self.norm_layer.get("name")
        if name not in _NORMS:
            raise ValueError(
                f"norm_layer's name must be {' or '.join(_NORMS)}, got {name!r}."
            )
        unknown = set(self.norm_layer) - _NORMS[name] - {"name"}
        if unknown:
            raise ValueError(
                f"norm_layer {name} takes {', '.join(sorted(_NORMS[name]))}; got "
                f"{', '.join(sorted(unknown))} as well."
            )
        groups = {"num_groups", "channels_per_group"} & set(self.norm_layer)
        if name == "group_norm" and len(groups) != 1:
            raise ValueError(
                "norm_layer group_norm needs num_groups or channels_per_group, and only "
                f"one of them; got {', '.join(sorted(groups)) or 'neither'}."
            )
        if self.num_replicas % self.dbn_replica_group_size:
            raise ValueError(
                f"num_replicas ({self.num_replicas}) cannot be divided into groups of "
                f"dbn_replica_group_size ({self.dbn_replica_group_size})."
            )

    @property
    def resolved_dataset(self) -> DatasetName:
        """The data set, worked out from the model where it is not given."""
        small = self.model_name in (None, "digits_cnn")
        return self.dataset or ("digits" if small else "cifar10")

    @property
    def resolved_model(self) -> str:
        """The model, worked out from the data set where it is not given."""
        digits = self.resolved_dataset == "digits"
        return self.model_name or ("digits_cnn" if digits else "toy_model")
