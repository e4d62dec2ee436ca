"""What the commands of this application share. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_MAY_CHANGE = {"may_change": True}

DatasetName = Literal[
    "binarized-mnist", "binarised_mnist", "fashion-mnist", "mnist", "digits"
]


def named(*aliases: str, **metadata: Any) -> dict[str, Any]:
    """Return a field's metadata with the names that the reference has for it."""
    return {"aliases": aliases, **metadata}


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which pictures."""

    dataset: DatasetName = "binarized-mnist"
    """binarized-mnist (its text files; binarised_mnist is the same), fashion-mnist or mnist
    (IDX files, black where a pixel is above a half), or digits (embedded, likewise)."""
    dataset_path: Path = field(default=Path("."), metadata=named("--data-dir"))
    """Folder that holds the data set. Where it has none, what millrace data fetch has
    downloaded is used."""

    @property
    def resolved_dataset(self) -> str:
        """The data set under the name it has everywhere."""
        return self.dataset.replace("binarised_mnist", "binarized-mnist")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where the work is done, and how exactly."""

    device: Literal["auto", "cpu", "gpu", "tpu"] = field(
        default="auto", metadata=_MAY_CHANGE
    )
    """auto takes an accelerator if there is one, otherwise the CPU."""
    only_accelerator: bool = field(
        default=False, metadata=named("--only-ipu", may_change=True)
    )
    """Fail where there is no accelerator, instead of using the CPU."""
    matmul_precision: Literal["default", "tensorfloat32", "float32"] = "default"
    """Of 32-bit matrix products on an accelerator; default is its fastest, on NVIDIA's
    tensorfloat32. (precision 16.32 multiplies in 16 bits.)"""

    def check_device(self) -> None:
        """Raise on what contradicts itself."""
        if self.only_accelerator and self.device == "cpu":
            raise ValueError("only_accelerator and device cpu contradict each other.")


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """How the log-likelihood of test pictures is estimated."""

    __test__ = False  # not pytest's

    num_importance_samples: int = field(
        default=20_000, metadata=named("--n-iwae-samples-test", may_change=True)
    )
    """Samples of each proposal for each picture."""
    importance_group_size: int = field(
        default=50,
        metadata=named("--iwae-samples-test-micro-batch-size", may_change=True),
    )
    """Of them, how many are held at a time; must divide num_importance_samples."""
    test_micro_batch_size: int = field(
        default=128, metadata=named("--micro-batch-size-test", may_change=True)
    )
    """Pictures at a time; their chains share a step size."""
    num_test_burn_in_steps: int = field(default=300, metadata=_MAY_CHANGE)
    """Steps of each picture's chain before those that make the proposals."""
    num_test_hmc_steps: int = field(default=300, metadata=_MAY_CHANGE)
    """Steps whose mean and standard deviation make two of the three proposals."""
    num_test_leapfrog_steps: int = field(default=5, metadata=_MAY_CHANGE)
    """Leapfrog steps in each of them."""
    test_step_size: float = field(default=0.05, metadata=_MAY_CHANGE)
    """Where the step size begins, for every batch of pictures."""
    test_acceptance_target: float = field(default=0.9, metadata=_MAY_CHANGE)
    """The acceptance that the step size is adapted to."""

    def check_test(self) -> None:
        """Raise on what cannot be."""
        at_least_one(
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
        positive(self, "test_step_size")
        between_0_and_1(self, "test_acceptance_target")


def at_least_one(options: Any, *names: str) -> None:
    """Raise where one of these is below 1."""
    for name in names:
        if (value := getattr(options, name)) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


def positive(options: Any, *names: str) -> None:
    """Raise where one of these is given and not above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be more than 0, got {value:g}.")


def between_0_and_1(options: Any, *names: str) -> None:
    """Raise where one of these is not a proportion."""
    for name in names:
        if not 0 < (value := getattr(options, name)) < 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value:g}.")
