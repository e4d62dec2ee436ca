"""Options of the training recipe and of the steps of a run. Imports nothing heavy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

RecipeName = Literal["auto", "modern", "graphcore"]
OptimizerName = Literal[
    "sgd",
    "momentum",
    "nesterov",
    "adam",
    "adamw",
    "lamb",
    "lion",
    "muon",
    "muon_sgd",
    "lars",
    "rmsprop",
]
ScheduleName = Literal["const", "cosine", "stepped", "polynomial", "exponential"]
When = Literal["during", "every", "last"]
TestTimeName = Literal["none", "flip", "shift"]


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Recipe options."""

    recipe: RecipeName = "auto"
    """Where options that are not given come from. modern: a recipe for the dataset, with
    momentum, a cosine schedule and augmentation. graphcore: the defaults shown here, those
    of Graphcore's applications. auto: modern, unless there is a --config or an option that
    only Graphcore's applications have; the run prints which."""
    optimizer: OptimizerName = field(default="sgd", metadata={"aliases": ("--optimiser",)})
    """Optimizer: sgd, momentum (sgd with momentum 0.9), nesterov, adam, adamw, lamb, lion,
    muon (adamw for biases and norms), muon_sgd (sgd for them), lars or rmsprop."""
    optimizer_params: dict[str, Any] = field(default_factory=lambda: {"momentum": 0})
    """Optimizer parameters: momentum and nesterov of sgd; b1, b2 and epsilon of adam,
    adamw, lamb, lion and muon; momentum, sgd_momentum, sgd_factor (learning rate of sgd, in
    units of learning_rate), iterations and epsilon of muon_sgd; lars: momentum,
    weight_decay, eeta and epsilon; rmsprop: momentum, base_decay_exponent, epsilon and
    optionally initial_accumulator."""
    learning_rate: float | None = field(default=None, metadata={"aliases": ("--lr",)})
    """Learning rate of the optimizer at the peak of the schedule, for any batch size and
    number of replicas."""
    momentum: float | None = None
    """Momentum of sgd and muon; b1 of adam, adamw, lamb and lion. Sets optimizer_params."""
    weight_decay: float = 0.0
    """Decoupled weight decay, scaled by the learning rate."""
    l2_regularization: float = 0.0
    """L2 regularization: adds this factor times the weight to the gradient. PyTorch calls
    this the weight decay of SGD."""
    decay_kernels_only: bool = False
    """Apply weight_decay and l2_regularization to kernels only, not to biases and norms."""
    clip_norm: float | None = None
    """Scale the gradients down if the norm of all of them together is larger than this."""
    ema: float | None = None
    """Validate, save and load an exponential moving average of the weights with this decay,
    such as 0.999, instead of the weights themselves."""
    lr_schedule: ScheduleName = "const"
    """Learning rate schedule."""
    lr_schedule_params: dict[str, Any] = field(
        default_factory=lambda: {"initial_learning_rate": 0.0001}
    )
    """Schedule parameters; initial_learning_rate is per sample of the global batch. With
    learning_rate, the others follow from num_epochs."""
    warmup_epochs: float | None = None
    """Epochs over which the learning rate rises to its peak; 0: none."""
    lr_warmup_params: dict[str, Any] | None = None
    """Warmup: warmup_mode (shift or mask) and warmup_epochs."""
    lr_staircase: bool = False
    """Keep the learning rate constant within an epoch."""
    freeze: list[str] = field(default_factory=list)
    """Layers that are not trained, as patterns such as 'b[0-3]/*'. Their batch norm
    uses and keeps its moving statistics."""
    freeze_after: list[str] = field(default_factory=list)
    """Layers that are trained only for the first epochs, as PATTERN=EPOCHS. Their batch
    norm continues as before."""
    lr_scale: list[str] = field(default_factory=list)
    """Factors of the learning rate of layers, as PATTERN=FACTOR; the last pattern that
    matches a layer counts."""
    label_smoothing: float = 0.0
    """Fraction of each label that is spread evenly over the classes."""
    label_smoothing_over: Literal["all", "others"] = "all"
    """Classes that label_smoothing spreads over: all of them, or all but the label."""
    mixup_alpha: float = 0.0
    """Mixup: blend each sample with the one before it in its micro-batch. Shares are drawn
    from Beta(alpha, alpha); the sample itself gets the larger one. 0 turns it off."""
    cutmix_lambda: float = 1.0
    """CutMix: replace a box, the same for all samples of a micro-batch, with that of the
    sample two before. Keeps about this fraction of the area. 1 turns it off."""
    weight_avg_exp: list[float] = field(default_factory=list)
    """After training, save and validate the exponential moving average of all checkpoints
    with this decay. Several numbers give several averages."""
    weight_avg_n: list[float] = field(
        default_factory=list, metadata={"aliases": ("--weight-avg-N",)}
    )
    """After training, save and validate the mean of the checkpoints from the last N
    epochs. Several numbers give several averages."""

    def __post_init__(self) -> None:
        for name in ("weight_decay", "l2_regularization", "mixup_alpha"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value:g}.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                "label_smoothing must be at least 0 and below 1, got "
                f"{self.label_smoothing}."
            )
        if not 0 < self.cutmix_lambda <= 1:
            raise ValueError(
                "cutmix_lambda must be more than 0 and at most 1 (off), got "
                f"{self.cutmix_lambda:g}."
            )
        for name in ("learning_rate", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be more than 0, got {value:g}.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must be more than 0 and below 1, got {self.ema:g}.")
        _ = self.lr_scales, self.freeze_epochs  # checks them
        for decay in self.weight_avg_exp:
            if not 0 < decay < 1:
                raise ValueError(
                    f"weight_avg_exp must be more than 0 and below 1, got {decay:g}."
                )
        for epochs in self.weight_avg_n:
            if not 0 < epochs < math.inf:
                raise ValueError(
                    f"weight_avg_n must be a positive number of epochs, got {epochs:g}."
                )

    @property
    def lr_scales(self) -> dict[str, float]:
        """The factors of the learning rate by pattern."""
        return _parse_patterns(
            self.lr_scale,
            "lr_scale must be PATTERN=FACTOR with a factor above 0, such as "
            "'b[0-3]/*=0.1', got {}. (--freeze stops training layers.)",
        )

    @property
    def freeze_epochs(self) -> dict[str, float]:
        """The epochs for which layers are trained, by pattern."""
        return _parse_patterns(
            self.freeze_after,
            "freeze_after must be PATTERN=EPOCHS with a number above 0, such as "
            "'b0/*=3', got {}.",
        )

    @property
    def mixes_samples(self) -> bool:
        """Whether mixup or CutMix is on."""
        return self.mixup_alpha > 0 or self.cutmix_lambda < 1

    @property
    def averages_weights(self) -> bool:
        """Whether checkpoints are averaged after training."""
        return bool(self.weight_avg_exp or self.weight_avg_n)


def _parse_patterns(texts: list[str], error: str) -> dict[str, float]:
    """Return the numbers above 0 of patterns of layers, such as 'b0/*=3'."""
    numbers = {}
    for text in texts:
        pattern, separator, number = text.rpartition("=")
        try:
            numbers[pattern] = float(number)
        except ValueError:
            separator = ""
        if not (separator and pattern and 0 < numbers[pattern] < math.inf):
            raise ValueError(error.format(text))
    return numbers


@dataclass(frozen=True, kw_only=True)
class WorkflowOptions:
    """Workflow options."""

    training: bool = True
    """Train. If False, only validate the checkpoints in checkpoint_dir."""
    compile_only: bool = False
    """Compile, report compile time and memory, and exit."""
    profile_pipeline: bool = False
    """Before training, measure one update in the pipeline and draw it next to the
    prediction, in pipeline.html in the run directory."""
    num_epochs: int = field(
        default=1, metadata={"aliases": ("--epochs",), "may_grow": True}
    )
    """Passes over the training data. With --resume, a larger number trains a run for more
    epochs."""
    weight_updates_per_epoch: int = -1
    """Weight updates per epoch (-1: one pass over the data)."""
    shuffle: bool = True
    """Shuffle the training samples in every epoch."""
    logs_per_epoch: float = 1.0
    """Logs of metrics per epoch; 0: only at the end."""
    checkpoints: bool = True
    """Write checkpoints; a run without them cannot be resumed."""
    ckpts_per_epoch: float | None = None
    """Checkpoints per epoch; 0: only at the end (default: as often as logs, at most once
    per epoch)."""
    first_ckpt_epoch: float = 0.0
    """Epoch after which the first checkpoint is written."""
    checkpoint_dir: Path | None = field(
        default=None, metadata={"aliases": ("--checkpoint-output-dir",)}
    )
    """Folder for checkpoints (default: in the run directory). Without training, the
    checkpoints to validate: such a folder, a run directory or one checkpoint."""
    checkpoint_input_dir: Path | None = None
    """Same as checkpoint_dir, for validation without training."""
    clean_dir: bool = False
    """Delete the checkpoints at the end of the run."""
    validation: bool = field(default=True, metadata={"negations": ("--no-validation",)})
    """Validate the model. With synthetic data, off by default."""
    validate: When | None = None
    """When to validate: during training (the default), or after it, on every checkpoint
    (all are kept) or only on the last."""
    validations_per_epoch: float | None = None
    """Validations per epoch, during training; 0: only at the end (default: as often as
    logs, at most once per epoch)."""
    validation_micro_batch_size: int | None = None
    """Samples per replica and validation batch (default: micro_batch_size)."""
    validation_num_replicas: int | None = None
    """Replicas that validate (default: one on every device that trains)."""
    test_time_augmentation: TestTimeName = field(
        default="none", metadata={"aliases": ("--tta",), "bare": "shift"}
    )
    """Validate with the mean logits of several views of each image. flip: the image and its
    mirror image. shift (or no value): also those of the image shifted by one pixel up and
    left, and down and right, which count half. Predictions of the trained model do not."""
    target_accuracy: float | None = field(default=None, metadata={"may_change": True})
    """Report the epoch and time at which validation first reaches this accuracy."""
    prefetch_depth: int = field(
        default=2, metadata={"may_change": True, "may_differ": True}
    )
    """Chunks of batches staged on the device ahead of the current one."""
    resident_data: bool = False
    """Keep all training images on every device, and gather batches there. For small images
    that are preprocessed on the device (accelerator_side_preprocess). The weights equal
    those of images that are sent."""
    max_cross_replica_buffer_size: int | None = None
    """Bytes up to which gradients are combined into one all-reduce; 0: never combine (GPU
    only; default: chosen by XLA)."""

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.training:
            self._check_training()
        else:
            self._check_validation_only()

    def _check_numbers(self) -> None:
        for name in (
            "num_epochs",
            "validation_micro_batch_size",
            "validation_num_replicas",
            "prefetch_depth",
        ):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}.")
        updates = self.weight_updates_per_epoch
        if updates < 1 and updates != -1:
            raise ValueError(
                f"weight_updates_per_epoch must be at least 1, or -1; got {updates}."
            )
        for name in (
            "logs_per_epoch",
            "ckpts_per_epoch",
            "validations_per_epoch",
            "first_ckpt_epoch",
            "max_cross_replica_buffer_size",
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value:g}.")
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise ValueError(
                "target_accuracy must be more than 0 and at most 1, got "
                f"{self.target_accuracy:g}."
            )

    def _check_training(self) -> None:
        if self.checkpoint_input_dir is not None:
            raise ValueError(
                "checkpoint_input_dir is for validation without training (--training "
                "False). With training, use checkpoint_dir."
            )
        if self.when_to_validate in ("every", "last") and not self.checkpoints:
            raise ValueError(
                f"validate {self.when_to_validate} reads checkpoints, but checkpoints is "
                "off. Turn checkpoints on, or validate during training."
            )

    def _check_validation_only(self) -> None:
        if not self.validation:
            raise ValueError("Both training and validation are off: nothing to do.")
        if self.compile_only:
            raise ValueError("compile_only compiles training, but training is off.")
        if self.validate == "during":
            raise ValueError(
                "validate during needs training, but training is off. Use every or last."
            )
        if self.checkpoint_dir is None and self.checkpoint_input_dir is None:
            raise ValueError(
                "Validation without training needs checkpoint_dir: a folder of "
                "checkpoints, or the directory of an earlier run."
            )

    @property
    def when_to_validate(self) -> When | None:
        """When validation takes place; None for never."""
        if not self.validation:
            return None
        return self.validate or ("during" if self.training else "every")

    @property
    def events_per_epoch(self) -> dict[str, float]:
        """How often per epoch the host logs, saves a checkpoint and validates."""
        default = min(1.0, self.logs_per_epoch)
        checkpoint = default if self.ckpts_per_epoch is None else self.ckpts_per_epoch
        validate = (
            default if self.validations_per_epoch is None else self.validations_per_epoch
        )
        return {
            "log": self.logs_per_epoch,
            "checkpoint": checkpoint if self.checkpoints else 0.0,
            "validate": validate if self.when_to_validate == "during" else 0.0,
        }

    def compiler_options(self) -> dict[str, Mapping[str, bool | int]]:
        """Return the XLA options by platform."""
        size = self.max_cross_replica_buffer_size
        if size is None:
            return {"gpu": {}}
        return {"gpu": {"xla_gpu_all_reduce_combine_threshold_bytes": size}}

    def platform_notices(self, platform: str) -> list[str]:
        """Return notices about options that have no effect on this platform."""
        if platform == "gpu" or self.max_cross_replica_buffer_size is None:
            return []
        return [f"--max-cross-replica-buffer-size has no effect on {platform}."]
