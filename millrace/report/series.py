"""From log events to what a chart shows: points, by metric, and which belong together."""

import itertools
from collections.abc import Iterable
from typing import Any

from millrace.drawing.chart import Series
from millrace.report.record import PLACES, RunRecord, as_number

_KINDS = ("train", "validation", "test")
_FIRST = (
    *("loss", "accuracy", "rmse", "mae", "elbo", "vcd", "acceptance", "step_size"),
    *("learning_rate", "samples_per_second"),
)
"""What is looked at before anything else, in this order."""


def metric_series(
    events: Iterable[dict[str, Any]], *, over: str = "epoch"
) -> dict[str, Series]:
    """Return each metric's values over epochs, updates or seconds."""
    found: dict[str, Series] = {}
    for event in events:
        for name, value in event.items():
            if name not in PLACES:
                points = found.setdefault(name, Series(name, [])).points
                points.append((float(event[over]), as_number(value)))
    return found


def split_kind(metric: str) -> tuple[str, str]:
    """Part ``validation_loss`` into ``validation`` and ``loss``."""
    kind, _, rest = metric.partition("_")
    return (kind, rest) if kind in _KINDS and rest else ("", metric)


def charts_of(series: dict[str, Series]) -> dict[str, list[Series]]:
    """Put what measures the same into one chart: training and validation loss."""
    charts: dict[str, list[Series]] = {}
    for name in sorted(series, key=importance):
        kind, quantity = split_kind(name)
        if series[name].finite:
            shown = series[name]._replace(name=kind or words(quantity))
            charts.setdefault(quantity, []).append(shown)
    return charts


def importance(metric: str) -> tuple[int, str, int]:
    """Return what metrics are sorted by."""
    kind, quantity = split_kind(metric)
    place = _FIRST.index(quantity) if quantity in _FIRST else len(_FIRST)
    return place, quantity, _KINDS.index(kind) if kind else -1


def is_telling(quantity: str) -> bool:
    """Tell whether a reader wants to see this first."""
    return quantity in _FIRST


def words(name: str) -> str:
    """Write a metric's name for a reader."""
    return (
        name.replace("_", " ")
        .replace("rmse", "RMSE")
        .replace("elbo", "ELBO")
        .replace("mae", "MAE")
    )


def throughput(record: RunRecord) -> Series:
    """Return samples per second from one log event to the next, over seconds.

    Whatever the time went into counts: the first interval has the compilation in it.
    """
    updates = record.summary.get("updates") or 0
    batch = record.summary.get("samples", 0) / updates if updates else 0.0
    logged = [e for e in record.events if "samples_per_second" in e]
    marks = [(0.0, 0), *((float(e["time"]), e["update"]) for e in logged)]
    points = [
        (moment, batch * (done - before) / (end - start))
        for (start, before), (end, done) in itertools.pairwise(marks)
        if end > start and done > before
        for moment in (start, end)
    ]
    return Series("samples per second", points if batch else [])
