"""What the CNN application can be told about the device. Imports nothing heavy."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

_MAY_CHANGE = {"may_change": True}


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """How the device works."""

    auto_loss_scaling: bool = False
    """The same as --loss-scaling dynamic."""
    max_cross_replica_buffer_size: int | None = None
    """Bytes of gradients that may be joined into one exchange between replicas; 0: none
    are (GPU only; default: XLA's choice)."""
    available_memory_proportion: list[float] = field(
        default_factory=list, metadata=_MAY_CHANGE
    )
    """Percent of the device's memory that the run may take, or up to 1 a share of it (0.15
    is 15), GPU only (default: JAX's choice, 75). Two numbers for each pipeline stage are
    accepted too; their mean counts."""
    prefetch_depth: int = field(
        default=2, metadata={"may_change": True, "may_differ": True}
    )
    """Chunks of batches staged on the device ahead of the one in use."""

    def check_device_options(self, num_stages: int) -> None:
        """Raise on what cannot be."""
        if self.prefetch_depth < 1:
            raise ValueError(
                f"prefetch_depth must be at least 1, got {self.prefetch_depth}."
            )
        size = self.max_cross_replica_buffer_size
        if size is not None and size < 0:
            raise ValueError(
                f"max_cross_replica_buffer_size must be 0 or more, got {size}."
            )
        shares = self.available_memory_proportion
        if len(shares) > 1 and (num_stages == 1 or len(shares) != 2 * num_stages):
            also = f", or {2 * num_stages} (two for each stage)" if num_stages > 1 else ""
            raise ValueError(
                f"available_memory_proportion takes one percentage{also}; got "
                f"{len(shares)}."
            )
        for share in shares:
            if not 0 < share <= 100:
                raise ValueError(
                    "available_memory_proportion is in percent, more than 0 and at most "
                    f"100; got {share:g}."
                )


def reserve_memory(options: DeviceOptions) -> None:
    """Tell JAX how much of a GPU's memory to take; before a device is first used."""
    if shares := options.available_memory_proportion:
        parts = [share if share <= 1 else share / 100 for share in shares]
        share = sum(parts) / len(parts)
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.4f}"


def compiler_options(options: DeviceOptions) -> Mapping[str, Mapping[str, bool | int]]:
    """Return what XLA has to be told, by platform."""
    gpu: dict[str, bool | int] = {}
    if (size := options.max_cross_replica_buffer_size) is not None:
        gpu["xla_gpu_all_reduce_combine_threshold_bytes"] = size
    return {"gpu": gpu}


def lines_about(options: DeviceOptions, platform: str) -> list[str]:
    """Say which of the options given change nothing on this platform."""
    if platform == "gpu":
        return []
    reasons = {}
    if options.max_cross_replica_buffer_size is not None:
        reasons["max-cross-replica-buffer-size"] = "it is for GPUs"
    if options.available_memory_proportion:
        reasons["available-memory-proportion"] = "memory is taken as it is needed"
    return [
        f"--{name} changes nothing on {platform}: {reason}."
        for name, reason in reasons.items()
    ]
