"""What ``millrace cnn train`` can be told. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.apps.cnn.data_options import DataOptions
from millrace.apps.cnn.device_options import DeviceOptions
from millrace.apps.cnn.ipu_options import IpuOptions
from millrace.apps.cnn.workflow_options import WorkflowOptions
from millrace.host.options import RunOptions
from millrace.plan import Plan

ScheduleName = Literal["const", "cosine", "stepped", "polynomial", "exponential"]

_NORMS = {
    "batch_norm": {"momentum", "epsilon"},
    "custom_batch_norm": {"momentum", "epsilon"},
    "group_norm": {"num_groups", "channels_per_group", "epsilon"},
}


@dataclass(frozen=True, kw_only=True)
class CnnConfig(DataOptions, WorkflowOptions, Plan, DeviceOptions, RunOptions, IpuOptions):
    """Train a convolutional network for image classification."""

    model_name: str | None = field(default=None, metadata={"aliases": ("--model",)})
    """Model to train: digits_cnn, toy_model, cifar_resnet8/20/32/44/56, resnet18/34/50
    (default: digits_cnn for digits, otherwise toy_model)."""
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
    channels_per_group, epsilon); custom_batch_norm is batch_norm."""
    bn_momentum: float = 0.97
    """Of batch norm's moving statistics, unless norm_layer gives one."""
    stable_norm: bool = False
    """Compute batch norm's variance in a second pass over the data."""
    dbn_replica_group_size: int = 1
    """Pool batch norm's statistics over groups of this many consecutive replicas."""

    def __post_init__(self) -> None:
        if self.auto_loss_scaling:
            self._scale_loss_dynamically()
        if self.validation is None:
            wanted = self.synthetic_data is None or not self.training
            object.__setattr__(self, "validation", wanted)
        RunOptions.__post_init__(self)
        Plan.__post_init__(self)
        self.check_workflow()
        self.check_data_options(self.resolved_dataset)
        self.check_device_options(self.num_stages)
        self._check_numbers_of_the_recipe()
        self._check_norm()
        if self.resume and not self.checkpoints:
            raise ValueError("resume needs a checkpoint to go on from; checkpoints is off.")
        if self.fused_preprocessing and not self.accelerator_side_preprocess:
            raise ValueError(
                "fused_preprocessing is about preparing images on the device, so "
                "accelerator_side_preprocess must be on as well."
            )

    def _scale_loss_dynamically(self) -> None:
        if self.loss_scaling not in (0, "dynamic"):
            raise ValueError(
                "Give auto_loss_scaling or a fixed loss_scaling, not both; got "
                f"loss_scaling {self.loss_scaling}."
            )
        object.__setattr__(self, "loss_scaling", "dynamic")  # frozen from here on

    def _check_numbers_of_the_recipe(self) -> None:
        for name in ("dbn_replica_group_size", "pipeline_num_parallel"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {size}.")
        for name in ("weight_decay", "l2_regularization"):
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
    def resolved_dataset(self) -> str:
        """The data set, worked out from the model where it is not given."""
        if self.dataset == "gc-imagenet":
            return "imagenet"
        small = self.model_name in (None, "digits_cnn")
        return self.dataset or ("digits" if small else "cifar10")

    @property
    def resolved_model(self) -> str:
        """The model, worked out from the data set where it is not given."""
        digits = self.resolved_dataset == "digits"
        return self.model_name or ("digits_cnn" if digits else "toy_model")
