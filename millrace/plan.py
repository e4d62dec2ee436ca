"""The plan: how the work of training is replicated, accumulated, rounded, offloaded."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from millrace.batching import Batching, resolve_batching
from millrace.precision import HalfType, Precision, PrecisionName, resolve_precision

Reduction = Literal["sum", "mean", "running_mean"]
PipelineSchedule = Literal["grouped", "interleaved", "sequential"]

AccumulatorType = str | type | None | Callable[[str, Any], Any]
"""None (each variable's own type), a type, or ``f(path, variable) -> type``."""

_FLOATS = ("float16", "bfloat16", "float32")

_WHOLE_NUMBERS = (
    "micro_batch_size",
    "num_replicas",
    "gradient_accumulation_count",
    "global_batch_size",
    "updates_per_execution",
)

_SWITCHES = (
    "stochastic_rounding",
    "optimizer_state_offloading",
    "recomputation",
    "fp_exceptions",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one weight update is carried out; the model and the loss know none of it."""

    micro_batch_size: int = field(default=1, metadata={"aliases": ("--batch-size",)})
    """Samples one replica processes in one forward-backward pass."""
    num_replicas: int = field(default=1, metadata={"aliases": ("--replicas",)})
    """Copies of the model, one per device, whose gradients are averaged."""
    gradient_accumulation_count: int | None = field(
        default=None, metadata={"aliases": ("--gradient-accumulation",)}
    )
    """Micro-batches each replica accumulates before a weight update."""
    global_batch_size: int | None = None
    """Samples per weight update, from which the accumulation count is worked out."""
    gradient_accumulation_dtype: AccumulatorType = "float32"
    """Type of the gradient accumulator: None for each variable's own type, a type (but
    float64 stays float64), or a function of the variable's path and value. 128
    bfloat16 gradients summed in bfloat16 are off by 1 %, in float32 by 1e-8."""
    gradient_accumulation_reduction: Reduction = "mean"
    """How micro-batch gradients become one: sum, mean, or running_mean (the mean with
    an accumulator that never exceeds one gradient's size)."""
    precision: PrecisionName = "32.32"
    """Bits of computation and of weights with their update: 16.16, 16.32 or 32.32. The
    batch's float32 arrays are cast to the compute type too; integers are not."""
    half_type: HalfType = "bfloat16"
    """The 16-bit type that precision means."""
    stochastic_rounding: bool = False
    """Round 16-bit weights and optimizer state up or down at random, without bias."""
    loss_scaling: float | Literal["dynamic"] = 0.0
    """Factor on the loss while differentiating (0: none), or "dynamic" for float16."""
    optimizer_state_offloading: bool = field(
        default=False, metadata={"negations": ("--disable-variable-offloading",)}
    )
    """Keep the optimizer's state in host memory; stream it through the device at each
    weight update. Saves device memory and costs time; arrays under 4 KiB stay."""
    recomputation: bool = field(default=False, metadata={"aliases": ("--xla-recompute",)})
    """Keep only the results of matrix products and convolutions for the backward pass;
    compute everything between them again. A pipeline keeps only these anyway; there,
    recomputation keeps only what enters a stage."""
    pipeline_splits: list[int | str] = field(default_factory=list)
    """Layers that each start a new pipeline stage, or the number of stages, for which
    the layers are chosen by their cost."""
    device_mapping: list[int | list[int]] | None = None
    """The device of each stage, 0 1 1 0 say (default: one each); a list of devices,
    [1,2], for the branches of a concurrent layer that is a stage by itself."""
    pipeline_schedule: PipelineSchedule = "grouped"
    """In which order the stages work: grouped, interleaved (fewer activations held) or
    sequential (one micro-batch after the other)."""
    updates_per_execution: int | None = None
    """Weight updates between two moments at which the host may step in; if not given,
    as many as the run's events allow."""
    fp_exceptions: bool = False
    """Stop at the first loss or gradient that is not a finite number."""

    def __post_init__(self) -> None:
        self._settle_types()
        _ = self.batching, self.types  # each raises on what does not fit
        if self.updates_per_execution is not None and self.updates_per_execution < 1:
            raise ValueError(
                "updates_per_execution must be at least 1, "
                f"got {self.updates_per_execution}."
            )
        if self.gradient_accumulation_reduction not in ("sum", "mean", "running_mean"):
            raise ValueError(
                "gradient_accumulation_reduction must be sum, mean or running_mean, "
                f"got {self.gradient_accumulation_reduction!r}."
            )
        if self.stochastic_rounding and self.precision != "16.16":
            raise ValueError(
                "stochastic_rounding rounds 16-bit weights, which precision "
                f"{self.precision} does not have. Use precision 16.16, or leave it off."
            )
        named = self.gradient_accumulation_dtype
        if isinstance(named, str) and named not in _FLOATS:
            raise ValueError(
                "gradient_accumulation_dtype must be None, one of "
                f"{', '.join(_FLOATS)}, or a function; got {named!r}."
            )
        self._check_loss_scaling()
        self._check_pipeline()

    def _settle_types(self) -> None:
        """Refuse values of a wrong type; make NumPy's and other spellings our own."""
        settled: dict[str, Any] = {
            name: _whole(name, value)
            for name in _WHOLE_NUMBERS
            if (value := getattr(self, name)) is not None
        }
        settled |= {name: _switch(name, getattr(self, name)) for name in _SWITCHES}
        settled["pipeline_splits"] = _splits(self.pipeline_splits)
        settled["pipeline_schedule"] = _schedule(self.pipeline_schedule)
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    def _check_pipeline(self) -> None:
        splits = self.pipeline_splits
        counts = [split for split in splits if isinstance(split, int)]
        if counts and (len(splits) > 1 or counts[0] < 2):
            raise ValueError(
                "pipeline_splits must be names of layers, or one number of stages, at "
                f"least 2; got {' '.join(map(str, splits))}."
            )
        twice = sorted({str(name) for name in splits if splits.count(name) > 1})
        if twice:
            raise ValueError(f"pipeline_splits names {', '.join(twice)} more than once.")
        if self.device_mapping is not None and len(self.device_mapping) != self.num_stages:
            raise ValueError(
                f"device_mapping needs a device for each of the {self.num_stages} stages "
                f"that pipeline_splits makes; got {len(self.device_mapping)}."
            )

    def _check_loss_scaling(self) -> None:
        if self.loss_scaling == "dynamic":
            if self.types.compute != "float16":
                raise ValueError(
                    "loss_scaling dynamic is for float16, whose range is small; got "
                    f"precision {self.precision} with half_type {self.half_type}. "
                    "Leave loss_scaling at 0, or set half_type to float16 with "
                    "precision 16.16 or 16.32."
                )
            if self.fp_exceptions:
                raise ValueError(
                    "fp_exceptions would stop at the first overflow, which dynamic "
                    "loss_scaling makes on purpose. Use a fixed loss_scaling with it."
                )
        elif isinstance(self.loss_scaling, str) or not 0 <= self.loss_scaling < 2**127:
            raise ValueError(
                "loss_scaling must be 0 (off), a positive factor or 'dynamic', "
                f"got {self.loss_scaling!r}."
            )

    @property
    def batching(self) -> Batching:
        """The batch arithmetic this plan stands for."""
        return resolve_batching(
            micro_batch_size=self.micro_batch_size,
            num_replicas=self.num_replicas,
            gradient_accumulation_count=self.gradient_accumulation_count,
            global_batch_size=self.global_batch_size,
        )

    @property
    def num_stages(self) -> int:
        """The positions of the pipeline; 1 where there is none."""
        splits = self.pipeline_splits
        return splits[0] if splits and isinstance(splits[0], int) else len(splits) + 1

    @property
    def types(self) -> Precision:
        """The types of computation and weights."""
        return resolve_precision(self.precision, self.half_type)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _whole(name: str, value: Any) -> int:
    if not _is_whole(value):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    return int(value)


def _switch(name: str, value: Any) -> bool:
    if value not in (True, False):  # NumPy's are equal to these
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def _splits(value: Any) -> list[int | str]:
    splits = [] if value is None else value
    if not isinstance(splits, list | tuple) or not all(
        isinstance(split, str) or _is_whole(split) for split in splits
    ):
        raise ValueError(
            "pipeline_splits must be a list of names of layers, or of one number of "
            f"stages; got {value!r}."
        )
    return [split if isinstance(split, str) else int(split) for split in splits]


def _schedule(value: Any) -> str:
    known = get_args(PipelineSchedule)
    if not isinstance(value, str) or value.lower() not in known:
        raise ValueError(
            f"pipeline_schedule must be one of {', '.join(known)}, got {value!r}."
        )
    return value.lower()
