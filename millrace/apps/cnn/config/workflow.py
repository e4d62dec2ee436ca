"""What a run of the CNN application does, and when. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_MAY_CHANGE = {"may_change": True}

When = Literal["during", "every", "last"]

_RATES = ("logs_per_epoch", "ckpts_per_epoch", "validations_per_epoch", "first_ckpt_epoch")


@dataclass(frozen=True, kw_only=True)
class WorkflowOptions:
    """What is done, and when."""

    training: bool = True
    """Train; if not, only validate the checkpoints in checkpoint_dir."""
    compile_only: bool = False
    """Compile, say how long that took and how much memory the program needs, and stop."""
    profile_pipeline: bool = False
    """Before training, watch one update go through the pipeline, and draw what each device
    did beside what was to be expected: pipeline.html in the run directory."""
    num_epochs: int = field(
        default=1, metadata={"aliases": ("--epochs",), "may_grow": True}
    )
    """Passes over the training data; more of them, with --resume, train a run on."""
    weight_updates_per_epoch: int = -1
    """Weight updates that count as an epoch (-1: as many as the data gives)."""
    shuffle: bool = True
    """Draw a new order of the training samples for every epoch."""
    logs_per_epoch: float = 1.0
    """How often metrics are reported; 0: only at the end."""
    checkpoints: bool = True
    """Write checkpoints; without them a run cannot be resumed."""
    ckpts_per_epoch: float | None = None
    """How often a checkpoint is written; 0: only at the end (default: as often as
    logs, at most once per epoch)."""
    first_ckpt_epoch: float = 0.0
    """The epoch after which the first checkpoint is written; the others follow it."""
    checkpoint_dir: Path | None = field(
        default=None, metadata={"aliases": ("--checkpoint-output-dir",)}
    )
    """Folder of the checkpoints (default: in the run directory). Without training, the
    checkpoints to validate; another run's directory will do."""
    checkpoint_input_dir: Path | None = None
    """The same as checkpoint_dir, where there is no training."""
    clean_dir: bool = False
    """Delete the checkpoints when all is done."""
    validation: bool | None = field(
        default=None, metadata={"negations": ("--no-validation",)}
    )
    """Whether to validate at all (default: yes, but not with synthetic data)."""
    validate: When | None = None
    """When to validate: during training, validations_per_epoch times (the default);
    afterwards every checkpoint (all are kept for that), as the references do; or only
    the last one."""
    validations_per_epoch: float | None = None
    """How often the model is validated during training; 0: only at the end (default: as
    often as logs, at most once per epoch)."""
    validation_micro_batch_size: int | None = None
    """Samples each replica validates at a time (default: micro_batch_size)."""
    validation_num_replicas: int | None = None
    """Replicas that validate (default: one on every device that trains)."""
    target_accuracy: float | None = field(default=None, metadata=_MAY_CHANGE)
    """Report when the validation accuracy first reached this, in epochs and seconds."""

    skips_validation = False  # becomes True where it is off though nobody said so

    def check_workflow(self) -> None:
        """Raise on what cannot be, or does not go together."""
        self._check_numbers()
        self._check_combinations()

    def _check_numbers(self) -> None:
        sizes = {
            "num_epochs": self.num_epochs,
            "validation_micro_batch_size": self.validation_micro_batch_size,
            "validation_num_replicas": self.validation_num_replicas,
        }
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}.")
        updates = self.weight_updates_per_epoch
        if updates < 1 and updates != -1:
            raise ValueError(
                f"weight_updates_per_epoch must be at least 1, or -1; got {updates}."
            )
        for name in _RATES:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value:g}.")
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise ValueError(
                "target_accuracy must be more than 0 and at most 1, got "
                f"{self.target_accuracy:g}."
            )

    def _check_combinations(self) -> None:
        if not self.training:
            return self._check_validation_alone()
        if self.checkpoint_input_dir is not None:
            raise ValueError(
                "checkpoint_input_dir is for validation without training (--training "
                "False). With training, checkpoint_dir says where checkpoints are kept."
            )
        if self.validates in ("every", "last") and not self.checkpoints:
            raise ValueError(
                f"validate {self.validates} reads checkpoints, and checkpoints is off. "
                "Leave checkpoints on, or validate during training."
            )

    def _check_validation_alone(self) -> None:
        if not self.validation:
            raise ValueError("Both training and validation are off: nothing is left to do.")
        if self.compile_only:
            raise ValueError("compile_only compiles training, and training is off.")
        if self.validate == "during":
            raise ValueError(
                "validate during is for training, and training is off. Choose every or "
                "last."
            )
        if self.checkpoint_dir is None and self.checkpoint_input_dir is None:
            raise ValueError(
                "Without training there must be something to validate: give "
                "checkpoint_dir, a folder of checkpoints or the directory of an earlier "
                "run."
            )

    @property
    def validates(self) -> When | None:
        """When to validate, worked out; None for never."""
        if not self.validation:
            return None
        return self.validate or ("during" if self.training else "every")

    @property
    def events_per_epoch(self) -> dict[str, float]:
        """How often the host steps in for what, worked out."""
        often = min(1.0, self.logs_per_epoch)
        checkpoint = often if self.ckpts_per_epoch is None else self.ckpts_per_epoch
        validate = (
            often if self.validations_per_epoch is None else self.validations_per_epoch
        )
        return {
            "log": self.logs_per_epoch,
            "checkpoint": checkpoint if self.checkpoints else 0.0,
            "validate": validate if self.validates == "during" else 0.0,
        }
