"""What ``millrace cnn validate`` can be told. Imports nothing heavy."""

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.apps.cnn.config import CnnConfig, graphcore
from millrace.apps.cnn.config.data import DataOptions
from millrace.apps.cnn.config.ipu import IpuOptions
from millrace.apps.cnn.config.model import ModelOptions
from millrace.config import ConfigurationError
from millrace.precision import HalfType, PrecisionName
from millrace.run.options import RunOptions
from millrace.run.saved import find_run

_OF_A_RUN = (
    *(field.name for field in dataclasses.fields(ModelOptions)),
    *(field.name for field in dataclasses.fields(DataOptions)),
    "precision",
    "half_type",
)
_NOT_OF_A_RUN = {"pretrained", "synthetic_data", "dbn_replica_group_size"}

_OF_TRAINING = {
    "bn_momentum": 0.97,
    "stable_norm": False,
    "dbn_replica_group_size": 1,
}
"""Options of a network that matter only while it is trained, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class SpeedOptions:
    """What is measured."""

    batch_size: list[int] = field(
        default_factory=lambda: [1], metadata={"aliases": ("--micro-batch-size",)}
    )
    """Samples each replica takes at a time; several sizes are measured in turn."""
    repeat: int = 1
    """How often the throughput of each batch size is measured; a line for each."""
    num_batches: int | None = None
    """Batches in a repeat (default: as many as the validation set has; with real data
    always these)."""
    batches_per_step: int = 1000
    """About how many batches the device takes in one call, for throughput."""
    latency_calls: int | None = None
    """Calls of one batch each that are timed for latency, going round over the batches;
    0: none. p99 needs 100, p99.9 1000 (default: 1000, or as many as half a minute has)."""
    num_replicas: int = field(default=1, metadata={"aliases": ("--replicas",)})
    """Devices that each take a batch of their own."""
    precision: PrecisionName = "32.32"
    """Bits of computation and of the weights that are kept: 16.16, 16.32 or 32.32.
    Weights are brought to the type of computation beforehand."""
    half_type: HalfType = "bfloat16"
    """The 16-bit type that precision means."""
    fold_batch_norm: bool = True
    """Take batch norm into the convolutions before it."""
    checkpoint_dir: Path | None = field(
        default=None, metadata={"aliases": ("--restore-path",)}
    )
    """Directory of the run that trained the network, or one of its checkpoints; network
    and data set are then the run's unless they are given (default: random weights)."""

    def check_speed(self) -> None:
        """Raise on what cannot be."""
        sizes = {f"batch_size {n}": n for n in self.batch_size or [0]}
        for name in ("repeat", "batches_per_step", "num_replicas"):
            sizes[name] = getattr(self, name)
        if self.num_batches is not None:
            sizes["num_batches"] = self.num_batches
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name.split()[0]} must be at least 1, got {value}.")
        if self.latency_calls is not None and self.latency_calls < 0:
            raise ValueError(f"latency_calls must be 0 or more, got {self.latency_calls}.")


@dataclass(frozen=True, kw_only=True)
class ValidateConfig(SpeedOptions, ModelOptions, DataOptions, RunOptions, IpuOptions):
    """Measure a network's inference: throughput, latency and, of real data, accuracy."""

    batch_norm: bool | None = field(default=None, metadata={"stands_for": ("norm_layer",)})
    """norm_layer: batch_norm; False: group_norm."""
    groups: int | None = None
    """norm_layer: group_norm with so many groups."""
    eight_bit_io: bool | None = field(
        default=None,
        metadata={"stands_for": ("eight_bit_transfer", "accelerator_side_preprocess")},
    )
    """eight_bit_transfer and accelerator_side_preprocess."""
    generated_data: bool | None = field(
        default=None, metadata={"stands_for": ("synthetic_data",)}
    )
    """synthetic_data host."""

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        self.check_speed()
        if self.resume:
            raise ValueError("resume is for training; this begins anew each time.")
        if self.pretrained is not None and self.checkpoint_dir is not None:
            raise ValueError("Give pretrained or checkpoint_dir, not both.")
        if self.num_batches is not None and self.synthetic is None:
            raise ValueError(
                "num_batches is for synthetic data: of real data every sample counts."
            )
        _ = self.training  # raises on what does not go together

    replicas_of_each_process = True  # each takes batches of its own

    @staticmethod
    def expand_options(values: dict[str, Any]) -> dict[str, Any]:
        """Complete options by those of a trained run, and by what others stand for."""
        known = {field.name for field in dataclasses.fields(ValidateConfig)}
        values = _options_of(values.get("checkpoint_dir")) | values
        meant = graphcore.expand_options(values)
        return {name: value for name, value in meant.items() if name in known}

    @functools.cached_property
    def training(self) -> CnnConfig:
        """The configuration that trains this network on this data."""
        return self.for_batch(max(self.batch_size))

    def for_batch(self, size: int) -> CnnConfig:
        """The same for one batch size."""
        names = {field.name for field in dataclasses.fields(CnnConfig)}
        shared = {*_OF_A_RUN, "num_replicas", "seed", "virtual_devices"} & names
        values = {name: getattr(self, name) for name in shared}
        return CnnConfig(micro_batch_size=size, validation=True, **values)

    def lines_about(self) -> list[str]:
        """Say which of the options given change nothing here."""
        return [
            f"--{name.replace('_', '-')} changes nothing here: batch norm uses the moving "
            "statistics."
            for name, default in _OF_TRAINING.items()
            if getattr(self, name) != default and self.checkpoint_dir is None
        ]


def _options_of(given: Path | None) -> dict[str, Any]:
    """Return network and data set of the run that a checkpoint is of, if it is known."""
    if given is None:
        return {}
    if not given.exists():
        raise ConfigurationError(f"checkpoint_dir: there is no {given}.")
    saved = find_run(given, command="cnn train", needs_checkpoints=False)
    if saved.directory is None:
        return {}
    saved.check_command("cnn-train")
    options = {
        name: saved.options[name]
        for name in _OF_A_RUN
        if saved.options.get(name) is not None and name not in _NOT_OF_A_RUN
    }
    if "dataset_path" in options:
        options["dataset_path"] = Path(options["dataset_path"])
    return options
