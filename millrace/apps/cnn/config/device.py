"""What the CNN application can be told about the device. Imports nothing heavy."""

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
    prefetch_depth: int = field(
        default=2, metadata={"may_change": True, "may_differ": True}
    )
    """Chunks of batches staged on the device ahead of the one in use."""

    def check_device_options(self) -> None:
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
    return [
        f"--{name} changes nothing on {platform}: {reason}."
        for name, reason in reasons.items()
    ]
