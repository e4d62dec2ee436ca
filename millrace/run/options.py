"""Options that every command that does work shares. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAY_CHANGE = {"may_change": True}
"""Marks options that a resumed run may be given differently: results do not change."""
_MAY_DIFFER = {**_MAY_CHANGE, "may_differ": True}
"""Marks those that every process of a run may be given differently as well."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run keeps its results, and what it shows."""

    run_dir: Path | None = field(default=None, metadata=_MAY_DIFFER)
    """Folder for everything the run writes (default: runs/APPLICATION-VERB-TIME)."""
    resume: bool = field(default=False, metadata=_MAY_CHANGE)
    """Continue the run in --run-dir from its last good checkpoint."""
    seed: int = 0
    """Of weights, order of samples and every other random number."""
    deterministic: bool = False
    """Use only kernels that give the same bits in every run, so that a run can be repeated
    and resumed exactly. CPUs always do; on a GPU this costs some speed."""
    keep_checkpoints: int = field(default=3, metadata=_MAY_CHANGE)
    """How many of the newest checkpoints to keep; the best one is kept besides."""
    tensorboard: bool = field(default=False, metadata=_MAY_DIFFER)
    """Also write TensorBoard event files into the run directory."""
    wandb: bool = field(default=False, metadata=_MAY_DIFFER)
    """Also send metrics to Weights & Biases (needs the wandb extra)."""
    wandb_run_name: str | None = field(default=None, metadata=_MAY_DIFFER)
    """What the run is called there (default: the command and the run directory)."""
    wandb_tags: list[str] = field(default_factory=list, metadata=_MAY_DIFFER)
    """Labels that the run gets there."""
    quiet: bool = field(default=False, metadata=_MAY_DIFFER)
    """Print nothing but warnings and errors."""
    verbose: bool = field(default=False, metadata=_MAY_DIFFER)
    """Print also every change of what is being done, with its time, and all metrics."""
    debug: bool = field(default=False, metadata=_MAY_DIFFER)
    """Show the full traceback of an error."""
    virtual_devices: int | None = field(default=None, metadata=_MAY_DIFFER)
    """Run on the CPU, divided into this many devices, to try replicas on any machine; of
    several processes, each does so."""
    coordinator: str | None = field(default=None, metadata=_MAY_DIFFER)
    """Of several processes, host and port of the first (millrace launch, Open MPI, Slurm
    and Kubernetes say it by themselves)."""
    process_id: int | None = field(default=None, metadata=_MAY_DIFFER)
    """The number of this process, from 0."""
    num_processes: int | None = field(default=None, metadata=_MAY_DIFFER)
    """How many processes take part."""

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ValueError("quiet and verbose are opposites: give one of them.")
        if self.keep_checkpoints < 1:
            raise ValueError(
                f"keep_checkpoints must be at least 1, got {self.keep_checkpoints}."
            )
        if self.virtual_devices is not None and self.virtual_devices < 1:
            raise ValueError(
                f"virtual_devices must be at least 1, got {self.virtual_devices}."
            )
        if self.resume and self.run_dir is None:
            raise ValueError("resume needs run_dir: the directory of the run to continue.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be between 0 and 2**32 - 1, got {self.seed}.")


def run_options(config: Any) -> RunOptions:
    """Return the run options of a configuration, which are its section ``run``."""
    return config if isinstance(config, RunOptions) else config.run
