"""The plan: how training is replicated, accumulated, rounded, offloaded and pipelined."""

import dataclasses
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from millrace.card import Card, format_html, format_text
from millrace.config import ConfigurationError


class Batching(NamedTuple):
    """Resolved batch sizes: micro-batch x accumulation x replicas = global batch."""

    micro_batch_size: int
    num_replicas: int
    gradient_accumulation_count: int

    @property
    def global_batch_size(self) -> int:
        """Samples per weight update."""
        return self.samples_per_step * self.gradient_accumulation_count

    @property
    def samples_per_step(self) -> int:
        """Samples that all replicas process in one forward and backward pass."""
        return self.micro_batch_size * self.num_replicas

    def updates_per_epoch(self, dataset_size: int) -> int:
        """Return the whole weight updates per epoch; leftover samples are dropped."""
        if dataset_size < self.global_batch_size:
            raise ConfigurationError(
                f"The dataset has {dataset_size} samples, fewer than one weight update "
                f"needs ({self.global_batch_size} = micro batch {self.micro_batch_size}"
                f" x replicas {self.num_replicas} x accumulation "
                f"{self.gradient_accumulation_count}). Lower one of them."
            )
        return dataset_size // self.global_batch_size


def resolve_batching(
    *,
    micro_batch_size: int,
    num_replicas: int = 1,
    gradient_accumulation_count: int | None = None,
    global_batch_size: int | None = None,
) -> Batching:
    """Compute the accumulation count from the global batch, or the reverse.

    A global batch that is not divisible is an error that names the nearest ones that are:
    nobody should train with another batch size unknowingly.
    """
    given = {
        "micro_batch_size": micro_batch_size,
        "num_replicas": num_replicas,
        "gradient_accumulation_count": gradient_accumulation_count,
        "global_batch_size": global_batch_size,
    }
    for name, value in given.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}.")
    if gradient_accumulation_count is not None and global_batch_size is not None:
        raise ConfigurationError(
            "Set gradient_accumulation_count or global_batch_size, not both; got "
            f"{gradient_accumulation_count} and {global_batch_size}."
        )
    step = micro_batch_size * num_replicas
    if global_batch_size is not None:
        if global_batch_size % step:
            below = global_batch_size // step * step
            nearest = f"{below} or {below + step}" if below else f"{step}"
            raise ConfigurationError(
                f"global_batch_size ({global_batch_size}) is not a multiple of "
                f"micro_batch_size x num_replicas ({micro_batch_size} x {num_replicas}"
                f" = {step}). The nearest multiples: {nearest}."
            )
        gradient_accumulation_count = global_batch_size // step
    return Batching(micro_batch_size, num_replicas, gradient_accumulation_count or 1)


PrecisionName = Literal["16.16", "16.32", "32.32"]
HalfType = Literal["bfloat16", "float16"]


class Precision(NamedTuple):
    """The dtypes of computation (activations, gradients) and of stored weights."""

    compute: str
    weights: str


def resolve_precision(
    name: PrecisionName | str, half_type: HalfType | str = "bfloat16"
) -> Precision:
    """Return the dtypes of ``16.16``, ``16.32`` or ``32.32`` (compute.weights).

    >>> resolve_precision("16.32", "float16")
    Precision(compute='float16', weights='float32')
    """
    if name not in get_args(PrecisionName):
        raise ValueError(
            f"precision must be one of {', '.join(get_args(PrecisionName))} "
            f"(compute.weights), got {name!r}."
        )
    if half_type not in get_args(HalfType):
        raise ValueError(
            f"half_type must be one of {', '.join(get_args(HalfType))}, got {half_type!r}."
        )
    dtypes = {"16": str(half_type), "32": "float32"}
    compute, weights = name.split(".")
    return Precision(dtypes[compute], dtypes[weights])


Reduction = Literal["sum", "mean", "running_mean"]
PipelineSchedule = Literal["grouped", "interleaved", "sequential", "zero-bubble"]

AccumulatorType = str | type | None | Callable[[Any], Any] | Callable[[str, Any], Any]
"""A dtype, None for the dtype of each variable, or ``f(variable)`` or ``f(path, variable)``
that returns one."""

_FLOATS = ("float16", "bfloat16", "float32")

_WHOLE_NUMBERS = (
    "micro_batch_size",
    "num_replicas",
    "gradient_accumulation_count",
    "global_batch_size",
    "updates_per_execution",
    "min_remote_tensor_size",
)

_SWITCHES = (
    "stochastic_rounding",
    "optimizer_state_offloading",
    "recomputation",
    "fp_exceptions",
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """How weight updates are computed.

    The model and the loss know nothing about it.
    """

    common_options: ClassVar = (
        *("micro_batch_size", "num_replicas", "gradient_accumulation_count", "precision"),
    )
    """Options that ``--help`` shows; ``--help-all`` shows the others."""

    micro_batch_size: int = field(default=1, metadata={"aliases": ("--batch-size",)})
    """Samples that one replica processes in one forward and backward pass."""
    num_replicas: int = field(default=1, metadata={"aliases": ("--replicas",)})
    """Copies of the model, one per device; their gradients are averaged."""
    gradient_accumulation_count: int | None = field(
        default=None, metadata={"aliases": ("--gradient-accumulation",)}
    )
    """Micro-batches that each replica accumulates per weight update."""
    global_batch_size: int | None = None
    """Samples per weight update; sets the accumulation count."""
    gradient_accumulation_dtype: AccumulatorType = "float32"
    """Dtype of the gradient accumulator (float64 gradients stay float64), None for the
    dtype of each variable, or a function of the variable, or of its path and the variable.
    Summing 128 bfloat16 gradients has an error of 1 % in bfloat16 and of 1e-8 in
    float32."""
    gradient_accumulation_reduction: Reduction = "mean"
    """How micro-batch gradients are combined: sum, mean, or running_mean (the mean, with
    an accumulator that never exceeds the size of one gradient)."""
    precision: PrecisionName = "32.32"
    """Bits of computation and of stored weights: 16.16, 16.32 or 32.32. float32 arrays of
    a batch are cast to the compute dtype; integers are not."""
    half_type: HalfType = "bfloat16"
    """The 16-bit dtype that precision refers to."""
    stochastic_rounding: bool = False
    """Round up or down at random, without bias: in 16.16 the stored weights and optimizer
    state, in 16.32 the 16-bit copies of the weights that an update computes with."""
    loss_scaling: float | Literal["dynamic"] = 0.0
    """Factor on the loss during differentiation (0: off), or "dynamic" for float16."""
    optimizer_state_offloading: bool = field(
        default=False, metadata={"negations": ("--disable-variable-offloading",)}
    )
    """Keep the optimizer state in host memory and stream it through the device at each
    update. Saves device memory but takes time; a CPU has no other memory to use."""
    min_remote_tensor_size: int | None = None
    """Bytes of the smallest array that optimizer_state_offloading keeps in host memory;
    smaller ones and scalars stay on the device (default: 4096). A pipeline moves the state
    of a stage as one array."""
    recomputation: bool = field(default=False, metadata={"aliases": ("--xla-recompute",)})
    """Keep only results of matrix products and convolutions for the backward pass, and
    recompute the rest. A pipeline always does this; there, recomputation keeps only the
    inputs of stages."""
    pipeline_splits: list[int | str] = field(default_factory=list)
    """Layers that start a new pipeline stage, or the number of stages, to split the model
    by estimated cost."""
    device_mapping: list[int | list[int]] | None = None
    """Device of each stage, for example 0 1 1 0 (default: one each). A list, for example
    [1,2], spreads the branches of a concurrent layer that is a stage of its own."""
    pipeline_schedule: PipelineSchedule = "grouped"
    """Order in which the stages run: grouped, interleaved (fewer live activations),
    zero-bubble (the fastest: weight gradients fill idle time) or sequential (one
    micro-batch at a time)."""
    updates_per_execution: int | None = None
    """Weight updates between two points where the host may act (default: as many as the
    events of the run allow)."""
    fp_exceptions: bool = False
    """Stop at the first loss or gradient that is not finite."""

    @classmethod
    def for_devices(cls, num_devices: int, **options: Any) -> "Plan":
        """Return a plan with as many replicas as a number of devices allows.

        >>> Plan.for_devices(8, pipeline_splits=[2]).num_replicas
        4

        Args:
            num_devices: A multiple of the devices that one replica needs.
            **options: The other fields of the plan.
        """
        if "num_replicas" in options:
            raise ValueError(
                "Plan.for_devices computes num_replicas: pass it to Plan instead."
            )
        num_devices = _to_int("num_devices", num_devices)
        per_replica = cls(**options).devices_per_replica
        if num_devices < 1 or num_devices % per_replica:
            raise ValueError(
                f"num_devices must be a positive multiple of {per_replica}, the devices "
                f"of one replica; got {num_devices}."
            )
        return cls(num_replicas=num_devices // per_replica, **options)

    def card(self) -> Card:
        """Return what a terminal or a notebook shows: what differs from the defaults."""
        rows = {
            field.name: repr(value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
            and not (value == [] and field.default_factory is list)
        }
        return Card(type(self).__name__, rows)

    def __repr__(self) -> str:
        return format_text(self.card())

    def _repr_html_(self) -> str:
        return format_html(self.card())

    def __post_init__(self) -> None:
        self._normalize()
        _ = self.batching, self.types  # each raises if something does not fit
        if self.updates_per_execution is not None and self.updates_per_execution < 1:
            raise ValueError(
                "updates_per_execution must be at least 1, "
                f"got {self.updates_per_execution}."
            )
        if (self.min_remote_tensor_size or 0) < 0:
            raise ValueError(
                "min_remote_tensor_size must be 0 bytes or more, got "
                f"{self.min_remote_tensor_size}."
            )
        if self.gradient_accumulation_reduction not in get_args(Reduction):
            raise ValueError(
                "gradient_accumulation_reduction must be sum, mean or running_mean, "
                f"got {self.gradient_accumulation_reduction!r}."
            )
        if self.stochastic_rounding and self.precision == "32.32":
            raise ValueError(
                "stochastic_rounding rounds to 16 bits, which precision 32.32 does not "
                "have. Use precision 16.16 or 16.32, or turn it off."
            )
        dtype = self.gradient_accumulation_dtype
        if isinstance(dtype, str) and dtype not in _FLOATS:
            raise ValueError(
                "gradient_accumulation_dtype must be None, one of "
                f"{', '.join(_FLOATS)}, or a function; got {dtype!r}."
            )
        self._check_loss_scaling()
        self._check_pipeline()

    def _normalize(self) -> None:
        """Check types; convert NumPy numbers, tuples and "Grouped" to plain values.

        This is the only place that sets fields, before anyone has seen the plan. Plans
        are compared and written to YAML, so equal plans must have equal values.
        """
        plain: dict[str, Any] = {
            name: _to_int(name, value)
            for name in _WHOLE_NUMBERS
            if (value := getattr(self, name)) is not None
        }
        plain |= {name: _to_bool(name, getattr(self, name)) for name in _SWITCHES}
        plain["pipeline_splits"] = _to_splits(self.pipeline_splits)
        plain["pipeline_schedule"] = _to_schedule(self.pipeline_schedule)
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    def _check_pipeline(self) -> None:
        splits = self.pipeline_splits
        counts = [split for split in splits if isinstance(split, int)]
        if counts and (len(splits) > 1 or counts[0] < 2):
            raise ValueError(
                "pipeline_splits must be names of layers, or one number of stages, at "
                f"least 2; got {' '.join(map(str, splits))}."
            )
        duplicates = sorted({str(name) for name in splits if splits.count(name) > 1})
        if duplicates:
            raise ValueError(
                f"pipeline_splits names {', '.join(duplicates)} more than once."
            )
        if self.device_mapping is not None and len(self.device_mapping) != self.num_stages:
            raise ValueError(
                f"device_mapping needs a device for each of the {self.num_stages} stages "
                f"of pipeline_splits; got {len(self.device_mapping)}."
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
                    "fp_exceptions would stop at the first overflow, but dynamic "
                    "loss_scaling overflows on purpose. Use a fixed loss_scaling."
                )
        elif isinstance(self.loss_scaling, str) or not 0 <= self.loss_scaling < 2**127:
            raise ValueError(
                "loss_scaling must be 0 (off), a positive factor or 'dynamic', "
                f"got {self.loss_scaling!r}."
            )

    @property
    def batching(self) -> Batching:
        """The batch sizes of this plan."""
        return resolve_batching(
            micro_batch_size=self.micro_batch_size,
            num_replicas=self.num_replicas,
            gradient_accumulation_count=self.gradient_accumulation_count,
            global_batch_size=self.global_batch_size,
        )

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages; 1 without a pipeline."""
        splits = self.pipeline_splits
        return splits[0] if splits and isinstance(splits[0], int) else len(splits) + 1

    @property
    def rounds_copies(self) -> bool:
        """Whether the 16-bit copies of float32 weights are rounded at random."""
        return self.stochastic_rounding and self.types.weights == "float32"

    @property
    def devices_per_replica(self) -> int:
        """The devices of one replica, as far as the plan tells.

        A concurrent layer that is spread over devices may need more.
        """
        if self.device_mapping is None:
            return self.num_stages
        flat = [d for e in self.device_mapping for d in (e if isinstance(e, list) else [e])]
        return max(flat) + 1

    @property
    def types(self) -> Precision:
        """The dtypes of computation and weights."""
        return resolve_precision(self.precision, self.half_type)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _to_int(name: str, value: Any) -> int:
    if not _is_int(value):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    return int(value)


def _to_bool(name: str, value: Any) -> bool:
    if value not in (True, False):  # true for NumPy's booleans too
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def _to_splits(value: Any) -> list[int | str]:
    splits = [] if value is None else value
    if not isinstance(splits, list | tuple) or not all(
        isinstance(split, str) or _is_int(split) for split in splits
    ):
        raise ValueError(
            "pipeline_splits must be a list of layer names, or of one number of stages; "
            f"got {value!r}."
        )
    return [split if isinstance(split, str) else int(split) for split in splits]


def _to_schedule(value: Any) -> str:
    known = get_args(PipelineSchedule)
    if not isinstance(value, str) or value.lower() not in known:
        raise ValueError(
            f"pipeline_schedule must be one of {', '.join(known)}, got {value!r}."
        )
    return value.lower()
