"""What ``millrace cnn train`` can be told. Imports nothing heavy."""

import math
from dataclasses import dataclass
from typing import Literal

from millrace.host.options import RunOptions
from millrace.plan import Plan


@dataclass(frozen=True, kw_only=True)
class CnnConfig(RunOptions, Plan):
    """Train a convolutional network for image classification."""

    dataset: Literal["digits"] = "digits"
    """Data set to train and validate on."""
    model_name: Literal["digits_cnn"] = "digits_cnn"
    """Model to train."""
    num_epochs: int = 1
    """Passes over the training data."""
    learning_rate: float = 0.05
    """Largest learning rate; it falls to zero along a cosine."""
    momentum: float = 0.9
    """Of stochastic gradient descent."""
    label_smoothing: float = 0.0
    """Share of each label's weight given to all classes alike."""
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

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        Plan.__post_init__(self)
        if self.num_epochs < 1:
            raise ValueError(f"num_epochs must be at least 1, got {self.num_epochs}.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                "label_smoothing must be at least 0 and below 1, "
                f"got {self.label_smoothing}."
            )
        for name in (
            "learning_rate",
            "momentum",
            "logs_per_epoch",
            "ckpts_per_epoch",
            "validations_per_epoch",
        ):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value:g}.")
        size = self.validation_micro_batch_size
        if size is not None and size < 1:
            raise ValueError(f"validation_micro_batch_size must be at least 1, got {size}.")
