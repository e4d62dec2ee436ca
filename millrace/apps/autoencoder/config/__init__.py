"""What ``millrace autoencoder train`` can be told. Imports nothing heavy."""

import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.apps.autoencoder.config.data import RECOMMENDED, DataOptions, Recommended
from millrace.apps.autoencoder.config.model import ModelOptions
from millrace.apps.autoencoder.config.training import RecipeOptions
from millrace.plan import Plan
from millrace.precision import resolve_precision
from millrace.run.options import RunOptions

_MAY_CHANGE = {"may_change": True}

LARGEST_EXPONENT = 100
"""Of a learning rate, up or down: 2^-100 is as good as none."""
_EPOCHS = {"file": 160.0, "random": 2.0, "generated": 60.0}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(DataOptions, ModelOptions, RecipeOptions, RunOptions):
    """What every command that trains shares."""

    epochs: float | None = field(default=None, metadata={"may_grow": True})
    """Passes over the training rows (default: 160, 60 for generated ratings, 2 for
    random ones); more of them, with --resume, train a run on."""
    batches_per_step: int = 250
    """Batches the device trains on without returning to the host; at most an epoch."""
    validation_batch_size: int | None = None
    """Rows validated at a time (default: batch_size, 128 for random ratings)."""
    no_validation: bool = False
    """Do not validate, whatever there is to validate with."""
    valid_per_epoch: float = 1.0
    """How often per epoch the model is validated, and a checkpoint written; 0: only at
    the end."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        self.check_data_options()
        self.check_model_options()
        self.check_recipe_options()
        self._check_numbers()
        _ = self.plan, self.resolved_size  # each raises on what does not fit

    def _check_numbers(self) -> None:
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be more than 0, got {self.epochs:g}.")
        if self.batches_per_step < 1:
            raise ValueError(
                f"batches_per_step must be at least 1, got {self.batches_per_step}."
            )
        size = self.validation_batch_size
        if size is not None and size < 1:
            raise ValueError(f"validation_batch_size must be at least 1, got {size}.")
        if not 0 <= self.valid_per_epoch < math.inf:
            raise ValueError(
                f"valid_per_epoch must be 0 or more, got {self.valid_per_epoch:g}."
            )

    @property
    def resolved_size(self) -> int:
        """The size, worked out from the data where it is not given."""
        return self.size or self._recommendation("size").size

    @property
    def resolved_batch_size(self) -> int:
        """The batch, worked out from the data where it is not given."""
        return self.batch_size or self._recommendation("batch_size").batch_size

    def _recommendation(self, missing: str) -> Recommended:
        found = self.recommended
        if found is None:
            file = self.training_data_file
            assert file is not None
            if not file.exists():
                raise ValueError(f"There is no training_data_file {file}.")
            raise ValueError(
                f"{missing} must be given for {file.name}: it is known "
                f"only for files called {', '.join(RECOMMENDED)}."
            )
        return found

    @property
    def resolved_validation_batch_size(self) -> int:
        """Rows validated at a time, worked out."""
        usual = 128 if self.data_kind == "random" else self.resolved_batch_size
        return self.validation_batch_size or usual

    @property
    def resolved_epochs(self) -> float:
        """The epochs, worked out from the data where they are not given."""
        return self.epochs or _EPOCHS[self.data_kind]

    @property
    def plan(self) -> Plan:
        """How the runtime carries out an update."""
        scaling = self.loss_scaling
        compute = resolve_precision(self.precision, self.half_type).compute
        if scaling == 1 or (scaling == "dynamic" and compute != "float16"):
            scaling = 0.0
        return Plan(
            micro_batch_size=self.resolved_batch_size,
            precision=self.precision,
            half_type=self.half_type,
            stochastic_rounding=self.precision == "16.16" and not self.no_prng,
            loss_scaling=scaling,
            fp_exceptions=self.fp_exceptions,
        )


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(TrainingOptions):
    """Train a deep autoencoder to foretell ratings."""

    base_learning_rate: float = -16.0
    """Exponent of the learning rate, which is 2^this x batch_size."""
    learning_rate: float | None = None
    """The learning rate itself, whatever the batch."""
    num_replicas: int = field(
        default=1, metadata=_MAY_CHANGE | {"aliases": ("--replicas",)}
    )
    """Copies of the model, one per device, that share every batch's rows."""
    early_stopping: int | None = None
    """Stop after so many validations without a better one, and go back to the best."""
    steps_per_log: int = field(default=1, metadata=_MAY_CHANGE)
    """Steps between two reports."""
    select_devices: str = field(
        default="AUTO", metadata=_MAY_CHANGE | {"aliases": ("--select-ipus",)}
    )
    """Numbers of the devices that train and validate, such as 0,1, which then do so at the
    same time (default: the first)."""
    multiprocessing: bool = field(default=False, metadata=_MAY_CHANGE)
    """Validate while training goes on, on the second device if there is one. It takes a
    thread here, and no process."""
    build_init: bool = field(default=False, metadata=_MAY_CHANGE)
    """Only write the first weights as a checkpoint, from which --resume trains."""
    logdir: Path | None = field(
        default=None, metadata={"may_change": True, "may_differ": True}
    )
    """Make the run directory in this folder, named by batch, size and time."""
    testing_on_checkpoint: Path | None = field(default=None, metadata=_MAY_CHANGE)
    """Do not train: validate the newest checkpoint of this run."""

    def __post_init__(self) -> None:
        if self.logdir is not None:
            self._name_run_directory(self.logdir)
        if self.testing_on_checkpoint is not None:
            return RunOptions.__post_init__(self)  # the checkpoint knows everything else
        super().__post_init__()
        if self.early_stopping is not None and self.early_stopping < 1:
            raise ValueError(
                f"early_stopping must be at least 1, got {self.early_stopping}."
            )
        if self.steps_per_log < 1:
            raise ValueError(f"steps_per_log must be at least 1, got {self.steps_per_log}.")
        rate = self.learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"learning_rate must be more than 0, got {rate:g}.")
        if not abs(self.base_learning_rate) <= LARGEST_EXPONENT:
            raise ValueError(
                "base_learning_rate is an exponent of 2, such as -16, and at most "
                f"{LARGEST_EXPONENT}; got {self.base_learning_rate:g}."
            )
        if self.multiprocessing and self.early_stopping is not None:
            raise ValueError(
                "early_stopping waits for every validation, and multiprocessing goes on "
                "beside it. Give one of them."
            )
        if self.multiprocessing and self.num_replicas > 1:
            raise ValueError(
                "multiprocessing is for one replica; several validate together."
            )
        _ = self.device_numbers

    def _check_replicas(self) -> None:
        count = self.num_replicas
        if count < 1 or self.resolved_batch_size % count:
            raise ValueError(
                f"num_replicas must divide the batch of {self.resolved_batch_size} "
                f"{self.rows}, got {count}."
            )
        if count == 1:
            return
        if self.refeeding == "detached":
            raise ValueError(
                "refeeding detached keeps one batch's reconstruction, which replicas do "
                "not share. Use refeeding joint or none, or one replica."
            )
        if self.data_on_device:
            raise ValueError("data_on_device is for one replica.")
        if self.select_devices.upper() != "AUTO":
            raise ValueError("select_devices is for one replica; several take one each.")

    @property
    def plan(self) -> Plan:
        """How the runtime carries out an update."""
        self._check_replicas()
        rows = self.resolved_batch_size // self.num_replicas
        return dataclasses.replace(
            super().plan, micro_batch_size=rows, num_replicas=self.num_replicas
        )

    def _name_run_directory(self, folder: Path) -> None:
        if self.run_dir is not None:
            raise ValueError("Give logdir or run_dir, not both.")
        name = "test"
        if self.testing_on_checkpoint is None:
            name = f"bs{self.resolved_batch_size}-rn{self.resolved_size}"
        stamp = time.strftime("%Y%m%d_%H%M%S")
        self._set("run_dir", folder / f"{name}-{stamp}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen from here on

    @property
    def first_learning_rate(self) -> float:
        """The learning rate that the run starts with."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 2.0**self.base_learning_rate * self.resolved_batch_size

    @property
    def validates_beside_training(self) -> bool:
        """Whether training goes on while the model is validated."""
        training, validation = self.device_numbers
        apart = training != validation and self.early_stopping is None
        return self.multiprocessing or apart

    @property
    def device_numbers(self) -> tuple[int, int]:
        """The devices that train and validate."""
        if self.select_devices.upper() == "AUTO":
            return 0, 0
        try:
            chosen = [int(word) for word in self.select_devices.split(",")]
            training, validation = chosen if len(chosen) == 2 else chosen * 2
            if min(chosen) < 0:
                raise ValueError
        except ValueError:
            raise ValueError(
                "select_devices must be AUTO, a device's number, or two with a comma "
                f"between; got {self.select_devices!r}."
            ) from None
        return training, validation
