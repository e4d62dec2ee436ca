"""The figures of ``cnn validate``, combined over processes and formatted."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}
_CALLS_NEEDED = {"p99": 100, "p99.9": 1000}
"""With fewer calls, the percentile is little more than the slowest call."""


def latency_figures(seconds: list[float]) -> dict[str, float]:
    """Return the mean and percentiles in milliseconds; nothing without calls."""
    if not seconds:
        return {}
    milliseconds = 1e3 * np.array(seconds)
    figures = {"mean": float(milliseconds.mean())}
    for name, percent in _PERCENTILES.items():
        figures[name] = float(np.percentile(milliseconds, percent))
    return figures


def drop_unsupported(figures: dict[str, float], calls: int) -> dict[str, float]:
    """Drop the percentiles that need more calls than were timed.

    >>> drop_unsupported({"mean": 2.0, "p99": 3.0, "p99.9": 3.5}, 100)
    {'mean': 2.0, 'p99': 3.0}
    """
    return {
        name: value
        for name, value in figures.items()
        if calls >= _CALLS_NEEDED.get(name, 0)
    }


def slowest(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the maximum of each figure over the processes.

    >>> slowest([{"mean": 2.0, "p50": 1.0}, {"mean": 1.5, "p50": 1.5}])
    {'mean': 2.0, 'p50': 1.5}
    """
    return {name: max(one[name] for one in figures) for name in figures[0]}


def combine_rates(rates: Sequence[Sequence[float]]) -> dict[str, list[Any]]:
    """Sum the rates of each repeat over processes; also return those of each process.

    >>> combine_rates([[1.0, 2.0], [3.0, 4.0]])["samples_per_second_of_each"]
    [[1.0, 3.0], [2.0, 4.0]]
    """
    combined: dict[str, list[Any]] = {"samples_per_second": [sum(rate) for rate in rates]}
    if len(rates[0]) > 1:
        combined["samples_per_second_of_each"] = [
            list(each) for each in zip(*rates, strict=True)
        ]
    return combined


def format_result(result: dict[str, Any]) -> str:
    """Return the throughput and latency of a batch size as text."""
    text = f"{np.median(result['samples_per_second']):,.1f} samples/s"
    whose = ""
    if each := result.get("samples_per_second_of_each"):
        parts = ", ".join(f"{np.median(speeds):,.1f}" for speeds in each)
        text += f" in {len(each)} processes ({parts})"
        whose = " of the slowest process"
    if how := result.get("measured"):
        text += f", {how}"
    if latency := result["latency_ms"]:
        figures = ", ".join(f"{name} {value:.3f}" for name, value in latency.items())
        text += f"; latency{whose} in ms, {result['latency_calls']} calls: {figures}"
    return text
