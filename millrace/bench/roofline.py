"""The walls: how fast this device multiplies matrices and moves bytes, measured."""

from typing import Any

from millrace.program.roofline import measure_copy, measure_matmul

_COPIED_BYTES = 1 << 30
"""On an accelerator, so many that starting each copy is nothing beside it."""


def measure_limits(device: Any) -> dict[str, float]:
    """Return operations and bytes per second that the simplest programs reach."""
    on_cpu = device.platform == "cpu"
    kinds = ("float32",) if on_cpu else ("bfloat16", "float32")
    limits = {
        f"flops_{kind}": measure_matmul(device, dtype=kind).flops_per_second
        for kind in kinds
    }
    copied = measure_copy(device, num_bytes=None if on_cpu else _COPIED_BYTES)
    return limits | {"bytes": copied.on_device}


def parts_of_limits(found: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    """Return which part of the limits an entry reached; None where it is not known."""
    matmul, copy = _matmul_limit(limits, found["compute"]), limits.get("bytes")
    flops, num_bytes = found["flops_per_second"], found["bytes_per_second"]
    return {
        "of_matmul_limit": flops / matmul if flops and matmul else None,
        "of_copy_limit": num_bytes / copy if num_bytes and copy else None,
    }


def _matmul_limit(limits: dict[str, float], compute: str) -> float | None:
    """Return the limit for a type of computation; 16-bit types are alike."""
    kinds = ["float32"] if compute == "float32" else ["bfloat16", "float32"]
    return next((limits[f"flops_{k}"] for k in kinds if f"flops_{k}" in limits), None)
