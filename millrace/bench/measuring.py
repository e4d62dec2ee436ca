"""How an entry is measured: a first value that does not count, then some that do."""

import statistics
import time
from typing import Any

from millrace.apps.cnn.inference.latency import latency_figures
from millrace.bench.latency import supported
from millrace.bench.workload import Workload


def measure(work: Workload, repeat: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a compiled workload; it is started and stopped here."""
    try:
        work.start()
        values = _values(work, repeat, seconds)
        latency = work.latency(seconds / 2)
    finally:
        work.stop()
    per_call = work.samples_per_unit * work.units_per_call
    speeds = [per_call / value for value in values]
    median = statistics.median(speeds)
    unit_seconds = work.samples_per_unit / median
    return {
        "samples_per_second": {
            "median": median,
            "lowest": min(speeds),
            "highest": max(speeds),
            "values": speeds,
        },
        "unit": work.unit,
        "samples_per_unit": work.samples_per_unit,
        "units_per_call": work.units_per_call,
        "ms_per_unit": 1e3 * unit_seconds,
        "latency_ms": supported(latency_figures(latency), len(latency)),
        "latency_calls": len(latency),
        "compile_seconds": work.compile_seconds,
        "peak_bytes": work.memory_bytes,
        "num_devices": work.num_devices,
        "compute": work.compute,
        "flops_per_second": _per(work.known_cost.operations, unit_seconds),
        "bytes_per_second": _per(work.known_cost.num_bytes, unit_seconds),
    }


def _values(work: Workload, repeat: int, seconds: float) -> list[float]:
    """Return the seconds of a call, `repeat` times, each over as many calls as fit."""
    first = _timed(work, 1)  # dropped, like that of the start
    calls = max(1, int(seconds / repeat / first))
    return [_timed(work, calls) / calls for _ in range(repeat)]


def _timed(work: Workload, calls: int) -> float:
    started = time.perf_counter()
    work.run(calls)
    return time.perf_counter() - started


def _per(amount: float | None, seconds: float) -> float | None:
    return amount / seconds if amount else None
