"""An entry of results.json with all required fields."""

from typing import Any


def measured(lowest: float, median: float, highest: float, **others: Any) -> dict[str, Any]:
    """Return a measured entry with these speeds; `others` replace or add fields."""
    return {
        "name": "x",
        "command": "vcd train",
        "status": "measured",
        "reason": None,
        "samples_per_second": {"lowest": lowest, "median": median, "highest": highest},
        "ms_per_unit": 1.0,
        "latency_ms": {},
        "compile_seconds": 1.0,
        "peak_bytes": 2**30,
        "flops_per_second": None,
        "of_matmul_limit": None,
        "bytes_per_second": None,
        "of_copy_limit": None,
        **others,
    }
