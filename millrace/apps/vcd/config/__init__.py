"""Options of the ``millrace vcd`` commands. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from millrace.apps.vcd.config.reference import flatten_reference, is_nested
from millrace.apps.vcd.config.sections import (
    DataOptions,
    DeviceOptions,
    LikelihoodOptions,
    ModelOptions,
    TrainingOptions,
    VcdPlan,
    WorkflowOptions,
    check_at_least_one,
    named,
)
from millrace.config import STORED, ConfigurationError
from millrace.run.options import RunOptions, ShortRunOptions, Which

_CHECKPOINTS_PER_RUN = 20
_QUIET_LEVELS = ("WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, kw_only=True)
class VcdConfig:
    """Train a variational autoencoder whose posterior is refined by HMC."""

    common_options: ClassVar = (
        *("objective", "z_dim", "num_hidden", "num_burn_in_steps", "num_hmc_steps"),
        *("num_leapfrog_steps", "num_epochs", "learning_rate", "testing", "validation"),
        *("dataset", "dataset_path", "micro_batch_size", "num_replicas", "precision"),
        *("run_dir", "resume", "seed", "tensorboard", "quiet", "debug"),
    )

    model: ModelOptions = ModelOptions()
    training: TrainingOptions = TrainingOptions()
    workflow: WorkflowOptions = WorkflowOptions()
    likelihood: LikelihoodOptions = LikelihoodOptions()
    data: DataOptions = DataOptions()
    devices: DeviceOptions = DeviceOptions()
    plan: VcdPlan = VcdPlan()
    run: RunOptions = RunOptions()

    @staticmethod
    def read_file(values: dict[str, Any], name: str) -> dict[str, Any]:
        """Return the options in a file, named after it; it may be one of the reference."""
        options = flatten_reference(values) if is_nested(values) else values
        return {"run_name": Path(name).stem} | options

    @staticmethod
    def expand_options(values: dict[str, Any]) -> dict[str, Any]:
        """Resolve log_level and results_dir, which stand for quiet, debug and run_dir."""
        values = dict(values)
        if values.get("log_level") in _QUIET_LEVELS:
            values["quiet"] = True
        if values.get("log_level") == "DEBUG":
            values["debug"] = True
        if values.get("results_dir") is not None:
            values["run_dir"] = _new_run_dir(values)
        return values

    def __post_init__(self) -> None:
        _ = self.training.learning_rates(self.plan.batching.global_batch_size)  # or raises
        if self.plan.num_stages > 1:
            raise ValueError("pipeline_splits: this model is too small for a pipeline.")
        if self.data.arrays is not None and self.workflow.testing:
            if "test_image" not in self.data.arrays["shapes"]:
                raise ValueError("testing needs test_data, the images to test on.")
        if self.run.may_resume and not self.workflow.checkpoints:
            raise ValueError("resume needs a checkpoint, but checkpoints is off.")

    @property
    def events_per_epoch(self) -> dict[str, float]:
        """How often per epoch the host logs, saves and validates."""
        saves = self.workflow.ckpts_per_epoch
        if saves is None:  # at ends of epochs, evenly spaced over the run
            num_epochs = self.training.num_epochs
            counts = range(1, min(_CHECKPOINTS_PER_RUN, num_epochs) + 1)
            saves = max(n for n in counts if num_epochs % n == 0) / num_epochs
        return {
            "log": self.workflow.logs_per_epoch,
            "checkpoint": saves if self.workflow.checkpoints else 0.0,
            "validate": saves,
        }


def _new_run_dir(values: dict[str, Any]) -> Path:
    """Return a directory in results_dir that does not exist yet."""
    if values.get("run_dir") is not None:
        raise ConfigurationError("Set results_dir or run_dir, not both.")
    if values.get("resume"):
        raise ConfigurationError(
            "results_dir creates a new run directory. To resume, pass the directory of the "
            "run as --run-dir."
        )
    folder, name = values["results_dir"], values.get("run_name", WorkflowOptions.run_name)
    path, number = folder / name, 0
    while path.exists():
        path = folder / f"{name}_{number}"
        number += 1
    return path


@dataclass(frozen=True, kw_only=True)
class SavedModelConfig:
    """Trained model and images."""

    checkpoint_dir: Path = field(
        metadata=named("--results-dir", "-r", positional="RUN", **STORED)
    )
    """Run directory of the training, its folder of checkpoints, or one checkpoint."""
    which: Which = "best"
    """Checkpoint of the run to use: the best by validation ELBO, the last, or the one after
    this number of updates."""
    dataset_path: Path | None = field(default=None, metadata=named("--data-dir"))
    """Folder of the dataset (default: the one used in training)."""
    split: Literal["test", "validation", "training"] = "test"
    """Images to use; validation only exists if training held some out."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(SavedModelConfig):
    """Estimate the log-likelihood of images under a trained model."""

    num_pictures: int | None = None
    """Evaluate only this many images, evenly spaced over the split (default: all)."""
    likelihood: LikelihoodOptions = LikelihoodOptions()
    devices: DeviceOptions = DeviceOptions()
    run: ShortRunOptions = ShortRunOptions()

    def __post_init__(self) -> None:
        if self.num_pictures is not None:
            check_at_least_one(self, "num_pictures")


@dataclass(frozen=True, kw_only=True)
class SampleConfig(SavedModelConfig):
    """Save images of samples, reconstructions and chains of a trained model."""

    num_columns: int = 10
    """Images per row of samples and reconstructions."""
    num_rows: int = 10
    """Rows of samples, of chains, and of originals with their reconstructions."""
    num_steps: int = 8
    """HMC steps to show per chain."""
    devices: DeviceOptions = DeviceOptions()
    run: ShortRunOptions = ShortRunOptions()

    def __post_init__(self) -> None:
        check_at_least_one(self, "num_columns", "num_rows", "num_steps")
