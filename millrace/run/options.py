"""Options that all commands with a run directory share. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from millrace.config import (
    STORED,
    ConfigurationError,
    as_plain,
    flat_options,
    option_name,
    plain_defaults,
)
from millrace.plan import Batching, resolve_batching
from millrace.storage.address import display

_MAY_CHANGE = {"may_change": True}
"""Marks options that may change when a run is resumed: they do not affect results."""
_MAY_DIFFER = {**_MAY_CHANGE, "may_differ": True}
"""Marks options that may also differ between the processes of a run."""
TRANSIENT = {"transient": True}
"""Marks options about one start of a run, which are not taken over by a later one."""

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]

Which = Literal["best", "last", "newest"] | int
"""Which checkpoint of a run: the best, the last (or newest), or that after an update."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run writes its results, and what it prints."""

    common_options: ClassVar = (
        *("run_dir", "resume", "seed", "tensorboard", "quiet", "debug"),
    )

    run_dir: Path | None = field(default=None, metadata=_MAY_DIFFER | TRANSIENT | STORED)
    """Folder for everything the run writes, here or at s3://BUCKET/RUN (default:
    runs/APPLICATION-VERB-TIME)."""
    resume: bool | Path = field(
        default=False, metadata=_MAY_CHANGE | TRANSIENT | STORED | {"bare": True}
    )
    """Continue this run, or the one in --run-dir, from its newest intact checkpoint. Its
    options are those of the run unless they are given again."""
    auto_resume: bool = field(default=False, metadata=_MAY_CHANGE | TRANSIENT)
    """Continue the run in --run-dir if it has begun, and start it otherwise: one command
    for a job that its cluster may restart."""
    seed: int = 0
    """Seed for weights, sample order and all other random numbers."""
    stuck_timeout: float | None = field(default=None, metadata=_MAY_CHANGE | TRANSIENT)
    """Seconds without progress in training after which the run ends with an error that says
    what each process is doing; 0 for never (default: never for a single process, else 1800,
    or ten times the longest step so far; with --updates-per-execution, from the end of the
    first execution on)."""
    upload_timeout: float = field(default=300.0, metadata=_MAY_DIFFER | TRANSIENT)
    """Seconds without progress after which the end of a run no longer waits for its upload
    to object storage."""
    deterministic: bool = False
    """Use only kernels that give the same bits in every run, so that a run can be repeated
    and resumed exactly. CPUs always do; on a GPU this costs some speed."""
    keep_checkpoints: int = field(default=3, metadata=_MAY_CHANGE)
    """Number of newest checkpoints to keep; the best one is kept as well."""
    tensorboard: bool = field(default=False, metadata=_MAY_DIFFER)
    """Also write TensorBoard event files to the run directory."""
    tracker: list[Tracker] = field(
        default_factory=list, metadata=_MAY_DIFFER | {"repeatable": True}
    )
    """Also send metrics to these trackers: tensorboard, wandb, mlflow, trackio. Their
    packages must be installed."""
    tracker_project: str = field(default="millrace", metadata=_MAY_DIFFER)
    """Project (for MLflow, experiment) of the run in trackers."""
    tracker_run_name: str | None = field(
        default=None, metadata=_MAY_DIFFER | {"aliases": ["--wandb-run-name"]}
    )
    """Name of the run in trackers (default: the command and the run directory)."""
    wandb: bool = field(default=False, metadata=_MAY_DIFFER)
    """Also send metrics to Weights & Biases, as --tracker wandb does."""
    wandb_tags: list[str] = field(default_factory=list, metadata=_MAY_DIFFER)
    """Tags of the Weights & Biases run."""
    profile: bool = field(default=False, metadata=_MAY_CHANGE | TRANSIENT)
    """Trace a few calls of the training program after warm-up: the report shows which
    operations took the time, and the folder profile opens in XProf and Perfetto."""
    quiet: bool = field(default=False, metadata=_MAY_DIFFER | TRANSIENT)
    """Print only warnings and errors."""
    verbose: bool = field(default=False, metadata=_MAY_DIFFER | TRANSIENT)
    """Also print every change of activity with its time, and show all metrics."""
    debug: bool = field(default=False, metadata=_MAY_DIFFER | TRANSIENT)
    """Show the full traceback of an error."""
    virtual_devices: int | None = field(default=None, metadata=_MAY_DIFFER)
    """Run on the CPU, divided into this many devices per process, to try replicas on any
    machine."""
    coordinator: str | None = field(default=None, metadata=_MAY_DIFFER | TRANSIENT)
    """Host and port of process 0 (set automatically by millrace launch, Open MPI, Slurm
    and Kubernetes)."""
    process_id: int | None = field(default=None, metadata=_MAY_DIFFER | TRANSIENT)
    """Number of this process, starting from 0."""
    num_processes: int | None = field(default=None, metadata=_MAY_DIFFER | TRANSIENT)
    """Number of processes in the run."""

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
        if self.stuck_timeout is not None and not 0 <= self.stuck_timeout < math.inf:
            raise ValueError(
                f"stuck_timeout must be 0 or more seconds, got {self.stuck_timeout:g}."
            )
        if not 0 <= self.upload_timeout < math.inf:
            raise ValueError(
                f"upload_timeout must be 0 or more seconds, got {self.upload_timeout:g}."
            )
        if not isinstance(self.resume, bool):
            raise ValueError("Set resume to True, and run_dir to the run to continue.")
        if self.resume and self.run_dir is None:
            raise ValueError(
                "--resume needs the run to continue: --resume RUN, such as --resume "
                "runs/first."
            )
        if self.auto_resume and self.run_dir is None:
            raise ValueError("--auto-resume needs a --run-dir, such as runs/first.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be between 0 and 2**32 - 1, got {self.seed}.")

    @property
    def may_resume(self) -> bool:
        """Whether the run may continue an earlier one."""
        return bool(self.resume) or self.auto_resume


@dataclass(frozen=True, kw_only=True)
class ShortRunOptions(RunOptions):
    """Where a run writes its results, and what it prints."""

    # Of commands that do not train: there is nothing to resume, and no curve to follow.
    common_options: ClassVar = ("run_dir", "seed", "quiet", "debug")

    def __post_init__(self) -> None:
        if self.may_resume:
            option = "--resume" if self.resume else "--auto-resume"
            raise ValueError(f"Only training can be resumed; leave out {option}.")
        if self.stuck_timeout is not None:
            raise ValueError("Only training is watched; leave out --stuck-timeout.")
        super().__post_init__()


def compare_options(
    old: dict[str, Any], config: Any, *, command: str, path: Path
) -> dict[str, Any]:
    """Refuse to resume a run with other options; return those with larger values.

    Options marked ``may_change`` may differ; those marked ``may_grow`` may be larger.

    Args:
        old: The options that the run was started with, and its command.
        config: The configuration of the resumed run.
        command: Its command.
        path: The run directory.
    """
    if old.get("command") != command:
        raise ConfigurationError(
            f"{display(path)} holds a run of {old.get('command')}, not of {command}."
        )
    # Older versions spelled some options differently. Options that did not exist when the
    # run was started had today's default.
    old = {option_name(type(config), key): value for key, value in old.items()}
    old, new = plain_defaults(type(config)) | old, as_plain(config)
    may_change = _batching_options_that_may_change(old, config)
    differing = {
        name: option
        for name, option in flat_options(type(config)).items()
        if not option.metadata.get("may_change")
        and name not in may_change
        and old.get(name) != new[name]
    }
    extended = {
        name: new[name]
        for name, option in differing.items()
        if option.metadata.get("may_grow") and _is_larger(new[name], old.get(name))
    }
    changed = [
        f"{name} was {_show(old.get(name))}, now {_show(new[name])}"
        for name in differing
        if name not in extended
    ]
    if changed:
        raise ConfigurationError(
            f"{display(path)} belongs to another configuration: {'; '.join(changed)}. "
            "Leave out these options to continue it as it was started, or start a new run "
            f"with --config {display(path)} and another --run-dir."
        )
    return extended


def _show(value: Any) -> str:
    """Return a value as text; of arrays from Python, only the checksum."""
    if isinstance(value, dict) and "checksum" in value:
        return f"data with the checksum {value['checksum']}"
    return repr(value)


def _is_larger(new: Any, old: Any) -> bool:
    return all(isinstance(x, int | float) for x in (new, old)) and new > old


def _batching_options_that_may_change(old: dict[str, Any], config: Any) -> set[str]:
    """Return how samples are split over devices, if every update keeps its samples."""
    batching = getattr(getattr(config, "plan", config), "batching", None)
    names = {"num_replicas", "gradient_accumulation_count", "global_batch_size"}
    if not isinstance(batching, Batching):
        return set()
    given: dict[str, Any] = {n: old[n] for n in names if old.get(n) is not None}
    try:
        before = resolve_batching(micro_batch_size=old["micro_batch_size"], **given)
    except (KeyError, TypeError, ValueError):
        return set()
    same = before.global_batch_size == batching.global_batch_size
    return names if same else set()
