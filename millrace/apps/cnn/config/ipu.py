"""Options of the references that only an IPU can follow.

They are accepted, so that the references' commands and configurations work, and a line
says that they change nothing. Imports nothing heavy.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal


def _without_effect(reason: str, *aliases: str) -> Any:
    return field(
        default=None,
        metadata={"without_effect": reason, "may_change": True, "aliases": aliases},
    )


@dataclass(frozen=True, kw_only=True)
class IpuOptions:
    """Accepted, but without effect off an IPU."""

    on_demand: bool | None = _without_effect("devices are attached when first used")
    """Attach to devices only when they are needed."""
    half_partials: bool | None = _without_effect(
        "XLA adds up products and convolutions in 32 bits, and offers nothing else",
        "--enable-half-partials",
    )
    """Accumulate products and convolutions in 16 bits."""
    internal_exchange_optimization_target: (
        Literal["cycles", "memory", "balanced"] | None
    ) = _without_effect(
        "it steers the exchange between an IPU's tiles",
        "--internal-exchange-optimisation-target",
    )
    """What the exchange between tiles is optimized for."""
    available_memory_proportion: list[float] | None = _without_effect(
        "it divides an IPU's memory between weights and products; XLA does so by itself"
    )
    """Share of an IPU's memory for products and convolutions, in percent or up to 1; one
    number, or two for each pipeline stage."""
    max_reduce_many_buffer_size: int | None = _without_effect(
        "XLA decides by itself which reductions to join"
    )
    """Bytes of reductions that are joined into one."""
    gather_conv_output: bool | None = _without_effect(
        "XLA joins small exchanges between replicas by itself"
    )
    """Join small exchanges between replicas."""
    conv_dithering: bool | None = _without_effect(
        "it spreads work over an IPU's tiles", "--enable-conv-dithering"
    )
    """Start convolutions on different tiles."""
    min_remote_tensor_size: int | None = _without_effect(
        "optimizer_state_offloading leaves arrays under 4 KiB on the device"
    )
    """Bytes from which an array may rest in host memory."""
    scheduling_algorithm: str | None = _without_effect("XLA has its own scheduler")
    """Order of operations in the compiled program."""
    nanoo: bool | None = _without_effect(
        "numbers overflow to infinity here; --fp-exceptions stops at the first"
    )
    """Overflow to NaN instead of the largest number."""
    accelerator_side_reduction: bool | None = _without_effect(
        "metrics are always averaged over the replicas on the devices"
    )
    """Average metrics over replicas on the devices."""
    fused_preprocessing: bool | None = _without_effect(
        "with accelerator_side_preprocess, XLA fuses the preparation of images by itself"
    )
    """Prepare images in one operation on the device."""
    standard_imagenet: bool | None = _without_effect(
        "pictures are always drawn in a new random order from all of the files"
    )
    """Read ImageNet's files in one stream instead of several."""
    no_dataset_cache: bool | None = _without_effect(
        "pictures are read from the files in every epoch as it is"
    )
    """Do not keep decoded pictures in memory."""

    def check_ipu_options(self, num_stages: int) -> None:
        """Raise on what the references refuse."""
        shares = self.available_memory_proportion or []
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


def lines_about(options: IpuOptions) -> list[str]:
    """Say of each of these options that was given why it changes nothing."""
    return [
        f"--{field.name.replace('_', '-')} changes nothing here: {reason}."
        for field in dataclasses.fields(options)
        if (reason := field.metadata.get("without_effect"))
        and getattr(options, field.name) not in (None, [])
    ]
