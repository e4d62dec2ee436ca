"""The figures of ``cnn validate``: of all processes together, and how they are said."""

from collections.abc import Sequence
from typing import Any

import numpy as np

_PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}
_CALLS_NEEDED = {"p99": 100, "p99.9": 1000}
"""Of fewer calls, such a percentile would be little but the slowest."""


def latency_figures(seconds: list[float]) -> dict[str, float]:
    """Return the mean and the usual percentiles in milliseconds, nothing of nothing."""
    if not seconds:
        return {}
    milliseconds = 1e3 * np.array(seconds)
    figures = {"mean": float(milliseconds.mean())}
    for name, percent in _PERCENTILES.items():
        figures[name] = float(np.percentile(milliseconds, percent))
    return figures


def supported_figures(figures: dict[str, float], calls: int) -> dict[str, float]:
    """Leave out the percentiles that so few calls say nothing about.

    >>> supported_figures({"mean": 2.0, "p99": 3.0, "p99.9": 3.5}, 100)
    {'mean': 2.0, 'p99': 3.0}
    """
    return {
        name: value
        for name, value in figures.items()
        if calls >= _CALLS_NEEDED.get(name, 0)
    }


def slowest(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each latency of the process for which it is longest.

    >>> slowest([{"mean": 2.0, "p50": 1.0}, {"mean": 1.5, "p50": 1.5}])
    {'mean': 2.0, 'p50': 1.5}
    """
    return {name: max(one[name] for one in figures) for name in figures[0]}


def speeds_of(rates: Sequence[Sequence[float]]) -> dict[str, list[Any]]:
    """Add up what the processes measured in each repeat; say each one's where several did.

    >>> speeds_of([[1.0, 2.0], [3.0, 4.0]])["samples_per_second_of_each"]
    [[1.0, 3.0], [2.0, 4.0]]
    """
    found: dict[str, list[Any]] = {"samples_per_second": [sum(rate) for rate in rates]}
    if len(rates[0]) > 1:
        found["samples_per_second_of_each"] = [
            list(each) for each in zip(*rates, strict=True)
        ]
    return found


def said_of(result: dict[str, Any]) -> str:
    """Say the speed of a batch size, and its latency."""
    said = f"{np.median(result['samples_per_second']):,.1f} samples/s"
    whose = ""
    if each := result.get("samples_per_second_of_each"):
        parts = ", ".join(f"{np.median(speeds):,.1f}" for speeds in each)
        said += f" in {len(each)} processes ({parts})"
        whose = " of the slowest process"
    if latency := result["latency_ms"]:
        figures = ", ".join(f"{name} {value:.3f}" for name, value in latency.items())
        said += f"; latency{whose} in ms, {result['latency_calls']} calls: {figures}"
    return said
