"""Sections of the vcd configurations. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from millrace.plan import Plan

TUNED_LEARNING_RATES = {16: 5e-4, 100: 5e-4, 128: 9e-4, 512: 9e-4, 1024: 1.3e-3}
"""Learning rates by batch size, tuned on validation data."""

_EPOCHS, _TIMESCALE = 800, 30  # of the paper: the learning rate decays 26 times in a run
_MAY_CHANGE = {"may_change": True}

DatasetName = Literal[
    "binarized-mnist", "binarised_mnist", "fashion-mnist", "mnist", "digits"
]
ObjectiveName = Literal["vcd", "hoffman", "standard_kl"]
ControlVariateName = Literal["local", "global", "none"]


def named(*aliases: str, **metadata: Any) -> dict[str, Any]:
    """Return the metadata of a field that the reference implementation names otherwise."""
    return {"aliases": aliases, **metadata}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model, objective and gradient estimator."""

    z_dim: int = 10
    """Latent dimensions."""
    num_hidden: int = field(default=200, metadata=named("--n-hidden"))
    """Units in each hidden layer of the encoders and the decoder."""
    objective: ObjectiveName = "vcd"
    """Training objective: the contrastive divergence of Ruiz and Titsias (vcd), that of
    Hoffman 2017 (hoffman), or that of a plain VAE (standard_kl). With hoffman, the ELBO
    trains the encoder and the end of the chain trains the decoder."""
    num_burn_in_steps: int = field(default=8, metadata=named("--n-burn-in-steps"))
    """HMC steps that adapt the step size."""
    num_hmc_steps: int = field(default=0, metadata=named("--n-hmc-steps"))
    """HMC steps after burn-in. Without steps of either kind the model is a plain VAE."""
    num_leapfrog_steps: int = field(default=5, metadata=named("--n-leapfrog-steps"))
    """Leapfrog steps per HMC step."""
    step_size: float = field(default=0.05, metadata=named("--hmc-step-size-init"))
    """Initial HMC step size; all chains share it."""
    step_size_adaption: Literal["ruiz", "constant"] = field(
        default="ruiz", metadata=named("--step-size-adaption-fn")
    )
    """How the step size adapts: ruiz changes it in proportion to how far the acceptance
    rate is from its target."""
    step_size_adaption_rate: float = 0.01
    """Rate of ruiz at a batch size of 100; it scales with the batch size."""
    acceptance_target: float = 0.9
    """Acceptance rate that ruiz aims for."""
    control_variate: ControlVariateName = "local"
    """Reduces the variance of the gradient: local keeps a value per training image, global
    one for all."""
    control_variate_decay: float = 0.9
    """Decay of the moving average that serves as control variate."""
    independent_iterations: int = 3000
    """Updates during which a local control variate is still shared by all images."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "z_dim", "num_hidden", "num_leapfrog_steps")
        for name in ("num_burn_in_steps", "num_hmc_steps", "independent_iterations"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, got {value}.")
        _check_positive(self, "step_size", "step_size_adaption_rate")
        _check_proportion(self, "acceptance_target", "control_variate_decay")

    @property
    def resolved_objective(self) -> ObjectiveName:
        """The objective; standard_kl if there are no HMC steps."""
        if self.num_burn_in_steps + self.num_hmc_steps == 0:
            return "standard_kl"
        return self.objective


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Training length and learning rates."""

    num_epochs: int = field(default=_EPOCHS, metadata=named("--epochs", "--n-epoch"))
    """Passes over the training images."""
    learning_rate: float | None = field(default=None, metadata=named("-l", "--lr"))
    """Learning rate of the encoder mean and the decoder; the encoder std uses half.
    Overrides the next three."""
    encoder_mean_learning_rate: float | None = 5e-4
    """Learning rate of the encoder mean. Here and below, None means the rate tuned for the
    batch size (16, 100, 128, 512 or 1024)."""
    encoder_std_learning_rate: float | None = 2.5e-4
    """Learning rate of the encoder std. None means half of the tuned rate."""
    decoder_learning_rate: float | None = 5e-4
    """Learning rate of the decoder. None means the tuned rate."""
    learning_rate_decay: float = 0.9
    """Factor applied to the learning rates every epoch_timescale epochs."""
    epoch_timescale: float | None = None
    """Epochs between two decays (default: num_epochs x 30 / 800)."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "num_epochs")
        _check_positive(
            self,
            "learning_rate",
            "encoder_mean_learning_rate",
            "encoder_std_learning_rate",
            "decoder_learning_rate",
            "learning_rate_decay",
            "epoch_timescale",
        )

    def learning_rates(self, batch_size: int) -> dict[str, float]:
        """Return the initial learning rate of each scope of weights."""
        scopes = {
            "encoder/mean": (self.encoder_mean_learning_rate, 1.0),
            "encoder/std": (self.encoder_std_learning_rate, 0.5),
            "decoder": (self.decoder_learning_rate, 1.0),
        }
        if (base := self.learning_rate) is not None:
            return {scope: base * factor for scope, (_, factor) in scopes.items()}
        tuned = TUNED_LEARNING_RATES.get(batch_size)
        if tuned is None and None in (own for own, _ in scopes.values()):
            raise ValueError(
                f"There is no tuned learning rate for a batch of {batch_size}, only for "
                f"{', '.join(map(str, TUNED_LEARNING_RATES))}. Set --learning-rate."
            )
        return {
            scope: (tuned or 0.0) * factor if own is None else own
            for scope, (own, factor) in scopes.items()
        }

    def updates_per_decay(self, num_samples: int, batch_size: int) -> int:
        """Return the number of updates between two decays of the learning rates."""
        epochs = self.epoch_timescale
        if epochs is None:
            epochs = _TIMESCALE * self.num_epochs / _EPOCHS
        return max(1, int(epochs * num_samples / batch_size))


@dataclass(frozen=True, kw_only=True)
class WorkflowOptions:
    """Validation, logging, checkpoints and the run directory."""

    testing: bool = field(default=True, metadata={"negations": ("--no-testing",)})
    """Estimate the log-likelihood of the test images after training."""
    validation: bool = field(
        default=False, metadata=named("-v", negations=("--no-validation",))
    )
    """Hold out the last training images (num_validation of them), and estimate their
    log-likelihood too."""
    num_validation: int = field(default=10_000, metadata=named("--n-validation"))
    """Training images to hold out for validation."""
    logs_per_epoch: float = 1.0
    """How often to log metrics per epoch; 0 logs only at the end."""
    checkpoints: bool = field(default=True, metadata=named("--save-checkpoints"))
    """Write checkpoints. A run without them cannot be resumed."""
    ckpts_per_epoch: float | None = None
    """Checkpoints per epoch; 0 writes only the last one (default: up to 20 per run)."""
    pictures: bool = field(default=True, metadata=_MAY_CHANGE)
    """Save images of samples, reconstructions and chains with every checkpoint; the report
    shows them."""
    repeats: int = field(default=1, metadata=named("-R"))
    """Train and test this many times with different seeds, in the folders repeat-0,
    repeat-1 and so on of the run directory."""
    results_dir: Path | None = field(
        default=None,
        metadata=named("-r", may_differ=True, transient=True, **_MAY_CHANGE),
    )
    """Folder in which to create the run directory (instead of --run-dir)."""
    run_name: str = field(default="default", metadata=named("-n", **_MAY_CHANGE))
    """Name of the run directory in --results-dir. If it exists, _0, _1 and so on is
    appended."""
    log_level: Literal["NOTSET", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = field(
        default="INFO", metadata=_MAY_CHANGE
    )
    """Log level: WARNING and above mean --quiet, DEBUG means --debug."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "num_validation", "repeats")

    @property
    def num_held_out(self) -> int:
        """Training images that are not trained on."""
        return self.num_validation if self.validation else 0


@dataclass(frozen=True, kw_only=True)
class LikelihoodOptions:
    """Log-likelihood estimate by importance sampling."""

    num_importance_samples: int = field(
        default=20_000, metadata=named("--n-iwae-samples-test", may_change=True)
    )
    """Importance samples per image and proposal."""
    importance_group_size: int = field(
        default=50,
        metadata=named("--iwae-samples-test-micro-batch-size", may_change=True),
    )
    """Importance samples in memory at a time; must divide num_importance_samples."""
    test_micro_batch_size: int = field(
        default=128, metadata=named("--micro-batch-size-test", may_change=True)
    )
    """Images per batch; their chains share a step size."""
    num_test_burn_in_steps: int = field(default=300, metadata=_MAY_CHANGE)
    """HMC steps that adapt the step size before the proposals are built."""
    num_test_hmc_steps: int = field(default=300, metadata=_MAY_CHANGE)
    """HMC steps whose mean and standard deviation give two of the three proposals."""
    num_test_leapfrog_steps: int = field(default=5, metadata=_MAY_CHANGE)
    """Leapfrog steps per HMC step."""
    test_step_size: float = field(default=0.05, metadata=_MAY_CHANGE)
    """Initial HMC step size for every batch of images."""
    test_acceptance_target: float = field(default=0.9, metadata=_MAY_CHANGE)
    """Acceptance rate that the step size is adapted to."""

    def __post_init__(self) -> None:
        check_at_least_one(
            self,
            "num_importance_samples",
            "importance_group_size",
            "test_micro_batch_size",
            "num_test_burn_in_steps",
            "num_test_hmc_steps",
            "num_test_leapfrog_steps",
        )
        if self.num_importance_samples % self.importance_group_size:
            raise ValueError(
                f"num_importance_samples ({self.num_importance_samples}) must be a "
                f"multiple of importance_group_size ({self.importance_group_size})."
            )
        _check_positive(self, "test_step_size")
        _check_proportion(self, "test_acceptance_target")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Dataset."""

    dataset: DatasetName = "binarized-mnist"
    """binarized-mnist (text files; binarised_mnist is the same), fashion-mnist or mnist
    (IDX files), or digits (embedded). All but the first are binarized at half intensity."""
    dataset_path: Path = field(default=Path("."), metadata=named("--data-dir"))
    """Folder of the dataset. If it is not there, the copy that millrace data fetch
    downloaded is used."""
    fetch: bool = field(
        default=True, metadata={**_MAY_CHANGE, "negations": ("--no-fetch",)}
    )
    """Download the dataset if it is nowhere to be found, as millrace data fetch does.
    MILLRACE_NO_FETCH=1 in the environment forbids it too."""
    arrays: dict[str, Any] | None = field(default=None, metadata={"hidden": True})
    """Record of arrays passed from Python: their shapes and a checksum."""

    @property
    def resolved_dataset(self) -> str:
        """The name of the dataset in American spelling."""
        return self.dataset.replace("binarised_mnist", "binarized-mnist")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Devices and their matrix precision."""

    device: Literal["auto", "cpu", "gpu", "tpu"] = field(
        default="auto", metadata=_MAY_CHANGE
    )
    """Device to use; auto is an accelerator if there is one, otherwise the CPU."""
    only_accelerator: bool = field(
        default=False, metadata=named("--only-ipu", may_change=True)
    )
    """Fail if there is no accelerator instead of using the CPU."""
    matmul_precision: Literal["default", "tensorfloat32", "float32"] = "default"
    """Precision of 32-bit matrix products on an accelerator; default is its fastest, which
    is tensorfloat32 on NVIDIA GPUs. (Use --precision 16.32 for 16-bit products.)"""

    def __post_init__(self) -> None:
        if self.only_accelerator and self.device == "cpu":
            raise ValueError("only_accelerator and device cpu contradict each other.")


@dataclass(frozen=True, kw_only=True, repr=False)
class VcdPlan(Plan):
    """Batch size, replicas, precision and memory."""

    micro_batch_size: int = field(default=100, metadata=named("-b", "--batch-size"))
    """Images one replica processes in one forward-backward pass."""


def check_at_least_one(options: Any, *names: str) -> None:
    """Raise if one of these options is below 1."""
    for name in names:
        if (value := getattr(options, name)) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


def _check_positive(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {value:g}.")


def _check_proportion(options: Any, *names: str) -> None:
    for name in names:
        if not 0 < (value := getattr(options, name)) < 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value:g}.")
