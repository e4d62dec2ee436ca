"""What the CNN application can be told about its recipe. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

ScheduleName = Literal["const", "cosine", "stepped", "polynomial", "exponential"]


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What is learned, and how."""

    optimizer: Literal["sgd", "momentum", "lars", "rmsprop"] = field(
        default="sgd", metadata={"aliases": ("--optimiser",)}
    )
    """Optimizer; momentum is sgd with a momentum of 0.9."""
    optimizer_params: dict[str, Any] = field(default_factory=lambda: {"momentum": 0})
    """Its parameters: momentum; lars also weight_decay, eeta, epsilon; rmsprop also
    base_decay_exponent, epsilon and, if it is not 0, initial_accumulator."""
    weight_decay: float = 0.0
    """Decoupled weight decay, in proportion to the learning rate."""
    l2_regularization: float = 0.0
    """Added to the gradient: this times the weight."""
    decay_kernels_only: bool = False
    """Whether weight_decay and l2_regularization leave biases and norms alone."""
    lr_schedule: ScheduleName = "const"
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
    """Share of each label's weight given to the classes alike."""
    label_smoothing_over: Literal["all", "others"] = "all"
    """To which classes: all of them, the label's own as well, or only the others."""
    mixup_alpha: float = 0.0
    """Blend each sample with the one before it in its micro-batch, by shares drawn from
    the distribution Beta(alpha, alpha), the larger its own; 0: off."""
    cutmix_lambda: float = 1.0
    """Replace a box, the same in all samples of a micro-batch, by that of the sample two
    before; about this part of the area stays a sample's own; 1: off."""
    weight_avg_exp: list[float] = field(default_factory=list)
    """After training, average the weights of all checkpoints, each one's average being
    this times the last one's plus the rest times its own; save that as a checkpoint and
    validate it. Several numbers make several averages."""
    weight_avg_n: list[float] = field(
        default_factory=list, metadata={"aliases": ("--weight-avg-N",)}
    )
    """Likewise the mean of the checkpoints of the last so many epochs."""

    def check_recipe(self, micro_batch_size: int, *, checkpoints: bool) -> None:
        """Raise on what cannot be, or does not go together."""
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
        if self.mixes and micro_batch_size < 2:
            raise ValueError(
                "mixup_alpha and cutmix_lambda blend the samples of a micro-batch, so "
                f"micro_batch_size must be at least 2, got {micro_batch_size}."
            )
        self._check_averages(checkpoints)

    def _check_averages(self, checkpoints: bool) -> None:
        for decay in self.weight_avg_exp:
            if not 0 < decay < 1:
                raise ValueError(
                    f"weight_avg_exp must be more than 0 and below 1, got {decay:g}."
                )
        for epochs in self.weight_avg_n:
            if not 0 < epochs < math.inf:
                raise ValueError(
                    f"weight_avg_n is a number of epochs, more than 0; got {epochs:g}."
                )
        if self.averages_weights and not checkpoints:
            raise ValueError(
                "weight_avg_exp and weight_avg_n average checkpoints, and checkpoints is "
                "off."
            )

    @property
    def mixes(self) -> bool:
        """Whether samples are blended."""
        return self.mixup_alpha > 0 or self.cutmix_lambda < 1

    @property
    def averages_weights(self) -> bool:
        """Whether checkpoints are averaged after training."""
        return bool(self.weight_avg_exp or self.weight_avg_n)
