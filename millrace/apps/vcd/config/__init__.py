"""What ``millrace vcd train`` can be told. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from millrace.apps.vcd.config.common import (
    DataOptions,
    DeviceOptions,
    TestOptions,
    at_least_one,
    between_0_and_1,
    named,
    positive,
)
from millrace.plan import Plan
from millrace.run.options import RunOptions

TUNED_LEARNING_RATES = {16: 5e-4, 100: 5e-4, 128: 9e-4, 512: 9e-4, 1024: 1.3e-3}
"""By batch size, what validation found best."""

_CHECKPOINTS_PER_RUN = 20
_EPOCHS, _TIMESCALE = 800, 30  # of the paper: the learning rate falls 26 times in a run
_MAY_CHANGE = {"may_change": True}
_QUIET_LEVELS = ("WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """What is learned, and by which estimate of the gradient."""

    z_dim: int = 10
    """Latent dims."""
    num_hidden: int = field(default=200, metadata=named("--n-hidden"))
    """Units in each hidden layer of the encoders and the decoder."""
    objective: Literal["vcd", "hoffman", "standard_kl"] = "vcd"
    """vcd; hoffman (2017: the encoder by the ELBO, the decoder at the chain's end); or
    standard_kl, the plain VAE."""
    num_burn_in_steps: int = field(default=8, metadata=named("--n-burn-in-steps"))
    """HMC steps after each of which the step size is adapted."""
    num_hmc_steps: int = field(default=0, metadata=named("--n-hmc-steps"))
    """HMC steps after them. With none of either kind the model is the plain VAE."""
    num_leapfrog_steps: int = field(default=5, metadata=named("--n-leapfrog-steps"))
    """Leapfrog steps in each HMC step."""
    step_size: float = field(default=0.05, metadata=named("--hmc-step-size-init"))
    """The HMC step size at the start of the run; one for all chains."""
    step_size_adaption: Literal["ruiz", "constant"] = field(
        default="ruiz", metadata=named("--step-size-adaption-fn")
    )
    """ruiz changes the step size in proportion to what the acceptance is off."""
    step_size_adaption_rate: float = 0.01
    """Of ruiz, for a batch of 100; it grows with the batch."""
    acceptance_target: float = 0.9
    """The share of accepted moves that ruiz aims at."""
    control_variate: Literal["local", "global", "none"] = "local"
    """Lowers the gradient's variance: local has a number for each training picture,
    global one for all."""
    control_variate_decay: float = 0.9
    """Of the moving average that the control variate is."""
    independent_iterations: int = 3000
    """Updates after which a local control variate is no longer the same for all."""

    def check_objective(self) -> None:
        """Raise on what cannot be."""
        at_least_one(self, "z_dim", "num_hidden", "num_leapfrog_steps")
        for name in ("num_burn_in_steps", "num_hmc_steps", "independent_iterations"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must be 0 or more, got {value}.")
        positive(self, "step_size", "step_size_adaption_rate")
        between_0_and_1(self, "acceptance_target", "control_variate_decay")

    @property
    def resolved_objective(self) -> Literal["vcd", "hoffman", "standard_kl"]:
        """The objective; without HMC steps, the plain VAE's."""
        if self.num_burn_in_steps + self.num_hmc_steps == 0:
            return "standard_kl"
        return self.objective


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """How long, and with which learning rates."""

    num_epochs: int = field(default=_EPOCHS, metadata=named("--n-epoch"))
    """Passes over the training data."""
    learning_rate: float | None = field(default=None, metadata=named("-l"))
    """Of the encoder's mean and the decoder; the encoder's standard deviation has half of
    it. Goes before the three that follow."""
    encoder_mean_learning_rate: float | None = 5e-4
    """None, here and below: the one tuned for the batch size (16, 100, 128, 512, 1024)."""
    encoder_std_learning_rate: float | None = 2.5e-4
    """None: half of the tuned one."""
    decoder_learning_rate: float | None = 5e-4
    """None: the tuned one."""
    learning_rate_decay: float = 0.9
    """Factor on the learning rates every epoch_timescale epochs."""
    epoch_timescale: float | None = None
    """Epochs between two decays (default: 30 of 800 epochs, and in proportion)."""

    def check_recipe(self) -> None:
        """Raise on what cannot be."""
        at_least_one(self, "num_epochs")
        positive(
            self,
            "learning_rate",
            "encoder_mean_learning_rate",
            "encoder_std_learning_rate",
            "decoder_learning_rate",
            "learning_rate_decay",
            "epoch_timescale",
        )

    def learning_rates(self, batch_size: int) -> dict[str, float]:
        """Return the learning rate of each scope at the start."""
        scopes = {
            "encoder/mean": (self.encoder_mean_learning_rate, 1.0),
            "encoder/std": (self.encoder_std_learning_rate, 0.5),
            "decoder": (self.decoder_learning_rate, 1.0),
        }
        if (base := self.learning_rate) is not None:
            return {scope: base * share for scope, (_, share) in scopes.items()}
        tuned = TUNED_LEARNING_RATES.get(batch_size)
        if tuned is None and None in (own for own, _ in scopes.values()):
            raise ValueError(
                f"There is no tuned learning rate for a batch of {batch_size}. There "
                f"are some for {', '.join(map(str, TUNED_LEARNING_RATES))}; for "
                "others, give one with --learning-rate."
            )
        return {
            scope: (tuned or 0.0) * share if own is None else own
            for scope, (own, share) in scopes.items()
        }

    def updates_per_decay(self, num_samples: int, batch_size: int) -> int:
        """Return the updates during which the learning rates stay the same."""
        epochs = self.epoch_timescale
        if epochs is None:
            epochs = _TIMESCALE * self.num_epochs / _EPOCHS
        return max(1, int(epochs * num_samples / batch_size))


@dataclass(frozen=True, kw_only=True)
class WorkflowOptions:
    """What is done, and when."""

    testing: bool = field(default=True, metadata={"negations": ("--no-testing",)})
    """Estimate the log-likelihood of the test pictures when training is done."""
    validation: bool = field(
        default=False, metadata=named("-v", negations=("--no-validation",))
    )
    """Hold out the last num_validation training pictures, and estimate their
    log-likelihood as well."""
    num_validation: int = field(default=10_000, metadata=named("--n-validation"))
    """How many are held out."""
    logs_per_epoch: float = 1.0
    """How often metrics are reported; 0: only at the end."""
    checkpoints: bool = field(default=True, metadata=named("--save-checkpoints"))
    """Write checkpoints; without them a run cannot be resumed."""
    ckpts_per_epoch: float | None = None
    """How often a checkpoint is written; 0: only at the end (default: up to 20 times in a
    run)."""
    pictures: bool = field(default=True, metadata=_MAY_CHANGE)
    """At every checkpoint, draw samples, reconstructions and a chain into the run
    directory; the report shows them."""
    repeats: int = field(default=1, metadata=named("-R"))
    """Do all of it this many times, with another seed each, in folders repeat-0 and so on
    of the run directory."""
    results_dir: Path | None = field(
        default=None, metadata=named("-r", may_differ=True, **_MAY_CHANGE)
    )
    """Folder in which the run directory is made (instead of --run-dir)."""
    run_name: str = field(default="default", metadata=named("-n", **_MAY_CHANGE))
    """Its name there; _0, _1 and so on is added where that is taken."""
    log_level: Literal["NOTSET", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = field(
        default="INFO", metadata=_MAY_CHANGE
    )
    """WARNING and above are --quiet; DEBUG is --debug."""

    def check_workflow(self) -> None:
        """Raise on what cannot be."""
        at_least_one(self, "num_validation", "repeats")


@dataclass(frozen=True, kw_only=True)
class VcdConfig(
    ObjectiveOptions,
    RecipeOptions,
    WorkflowOptions,
    TestOptions,
    DataOptions,
    DeviceOptions,
    Plan,
    RunOptions,
):
    """Train a variational autoencoder whose posterior is refined by HMC."""

    micro_batch_size: int = field(default=100, metadata=named("-b"))
    """Pictures one replica processes at a time."""

    def __post_init__(self) -> None:
        if self.log_level in _QUIET_LEVELS:
            object.__setattr__(self, "quiet", True)  # frozen from here on
        if self.log_level == "DEBUG":
            object.__setattr__(self, "debug", True)
        self._place()
        RunOptions.__post_init__(self)
        Plan.__post_init__(self)
        self.check_objective()
        self.check_recipe()
        self.check_workflow()
        self.check_test()
        self.check_device()
        _ = self.learning_rates(self.batching.global_batch_size)
        if self.num_stages > 1:
            raise ValueError("pipeline_splits: this model is too small to be a pipeline.")
        if self.resume and not self.checkpoints:
            raise ValueError("resume needs a checkpoint to go on from; checkpoints is off.")

    def _place(self) -> None:
        """Choose the run directory from the results' directory and the run's name."""
        if self.results_dir is None:
            return
        if self.run_dir is not None:
            raise ValueError("Give results_dir or run_dir, not both.")
        if self.resume:
            raise ValueError(
                "results_dir stands for a new directory in it. To resume, give the one "
                "of the run with --run-dir."
            )
        path, number = self.results_dir / self.run_name, 0
        while path.exists():
            path = self.results_dir / f"{self.run_name}_{number}"
            number += 1
        object.__setattr__(self, "run_dir", path)

    @property
    def events_per_epoch(self) -> dict[str, float]:
        """How often the host steps in for what, worked out."""
        saves = self.ckpts_per_epoch
        if saves is None:  # at the ends of epochs, and the run divides evenly into them
            counts = range(1, min(_CHECKPOINTS_PER_RUN, self.num_epochs) + 1)
            count = max(n for n in counts if self.num_epochs % n == 0)
            saves = count / self.num_epochs
        return {
            "log": self.logs_per_epoch,
            "checkpoint": saves if self.checkpoints else 0.0,
            "validate": saves,
        }
