"""Metrics as curves: which belong in one chart, and which matter most."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from millrace.drawing.charts import Band, Series
from millrace.drawing.html import details, figure, figures
from millrace.drawing.interactive import interactive_chart
from millrace.numbers import format_number
from millrace.report.record import POSITIONS, RunRecord, as_number

AXES = {"epoch": "epoch", "update": "update", "seconds": "time"}
"""The x axes of curves, and the entry of a log event that each shows."""
_SPLITS = ("test", "validation", "train")
_IMPORTANT = (
    *("loss", "accuracy", "ndcg", "recall", "rmse", "mae", "elbo", "vcd", "acceptance"),
    *("step_size", "learning_rate", "samples_per_second"),
)
_MARKED_PHASES = ("compiling", "validating", "saving a checkpoint")
_LEAST_WAIT = 0.01
"""Share of the time below which waiting for data is not worth a chart."""
_MOST_BANDS = 200
_MOST_VALUES = 4
"""Up to this number of curves, the caption of their chart has the last value of each."""
_FEW_CHARTS = 6
"""Up to this number of charts, all are shown at once."""


def metric_series(
    events: Iterable[dict[str, Any]], *, over: str = "epoch"
) -> dict[str, Series]:
    """Return each metric over epochs, updates or seconds; a reader may choose another."""
    series: dict[str, Series] = {}
    for event in events:
        for name, value in event.items():
            if name not in POSITIONS:
                if name not in series:
                    series[name] = Series(name, [], {axis: [] for axis in AXES})
                curve = series[name]
                number = as_number(value)
                if name == "input_wait" and number < _LEAST_WAIT:
                    number = 0.0  # noise, which would make the axis logarithmic
                curve.points.append((float(event[over]), number))
                for axis, position in AXES.items():
                    curve.positions[axis].append(float(event[position]))
    return series


def split_metric(metric: str) -> tuple[str, str]:
    """Split ``validation_loss`` into ``validation`` and ``loss``."""
    split, _, quantity = metric.partition("_")
    return (split, quantity) if split in _SPLITS and quantity else ("", metric)


def is_important(quantity: str) -> bool:
    """Whether a reader wants to see this quantity first."""
    return without_length(quantity) in _IMPORTANT


def without_length(quantity: str) -> str:
    """Return a metric of rankings without the length of the list.

    >>> without_length("ndcg_at_10")
    'ndcg'
    """
    return re.sub(r"_at_\d+$", "", quantity)


def readable_name(metric: str) -> str:
    """Return the name of a metric as a reader knows it."""
    name = metric.replace("_", " ")
    for acronym in ("rmse", "elbo", "mae", "ndcg", "mrr"):
        name = name.replace(acronym, acronym.upper())
    return re.sub(r"(?<=\w) at (\d+)$", r"@\1", name)


def sort_by_quantity(metrics: Iterable[str]) -> list[str]:
    """Sort metrics for curves: by quantity, and training before validation."""

    def order(metric: str) -> tuple[int, Any, int]:
        split, quantity = split_metric(metric)
        base = without_length(quantity)
        place = _IMPORTANT.index(base) if base in _IMPORTANT else len(_IMPORTANT)
        # Numbers in names count as numbers: 9 comes before 16.
        parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", quantity)
        key = [(float(part), "") if n % 2 else (0.0, part) for n, part in enumerate(parts)]
        return place, key, -_SPLITS.index(split) if split else -len(_SPLITS)

    return sorted(metrics, key=order)


def sort_by_split(metrics: Iterable[str]) -> list[str]:
    """Sort metrics for tables: test before validation before training."""
    places = {split: place for place, split in enumerate((*_SPLITS, ""))}
    return sorted(metrics, key=lambda metric: places[split_metric(metric)[0]])


def run_curves(record: RunRecord) -> dict[str, list[Series]]:
    """Return the curves of a run by quantity: training and validation in one chart."""
    trained = any(name.startswith("train_") for event in record.events for name in event)
    if not trained and len({event["epoch"] for event in record.events}) < 2:
        return {}  # measured once: the tiles show it
    series = metric_series(record.events)
    series.pop("samples_per_second", None)  # has a chart of its own, over time
    waits = series.get("input_wait")
    if waits is not None and max(y for _, y in waits.points) < _LEAST_WAIT:
        del series["input_wait"]
    charts: dict[str, list[Series]] = {}
    trials = find_trials(series)
    # The trials of a sweep come first: they are what it is about.
    for metric in sorted(sort_by_quantity(series), key=lambda name: name not in trials):
        split, quantity = split_metric(metric)
        name = split or readable_name(quantity)
        if metric in trials:
            quantity, name = trials[metric]
            is_exponent = record.command == "autoencoder sweep" and name[0].isdigit()
            name = f"2^-{name}" if is_exponent else name
        if series[metric].finite:
            charts.setdefault(quantity, []).append(series[metric]._replace(name=name))
    curves = {n: c for n, c in charts.items() if any(len(s.points) > 1 for s in c)}
    return curves or charts  # one point is no curve, unless there is nothing else


def find_trials(metrics: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the quantity and label of metrics that differ in a last number only.

    A sweep logs ``validation_rmse_16`` and ``validation_rmse_17``, one for each trial, or
    ``validation_rmse_lr_0.01`` and so on, or ``validation_rmse_trial_1``: they are curves
    of one chart.
    """
    found = {}
    for metric in metrics:
        if match := re.fullmatch(
            r"(.+?)_(lr_|trial_)?(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", metric
        ):
            quantity, kind, label = match.groups()
            found[metric] = (quantity, (kind or "").replace("_", " ") + label)
    counts = Counter(quantity for quantity, _ in found.values())
    return {m: trial for m, trial in found.items() if counts[trial[0]] > 1}


def curve_figures(charts: Mapping[str, Sequence[Series]]) -> str:
    """Return a figure per quantity; if there are many, unimportant ones are folded."""
    shown, folded = [], []
    for quantity, series in charts.items():
        is_shown = len(charts) <= _FEW_CHARTS or is_important(split_metric(quantity)[1])
        (shown if is_shown else folded).append(curve_figure(quantity, series))
    if not shown:
        shown, folded = folded, shown
    return figures(shown) + details(f"{len(folded)} more", figures(folded))


def curve_figure(quantity: str, series: Sequence[Series]) -> str:
    """Draw one quantity, with its last values in the caption."""
    name = readable_name(quantity)
    single = len(series) == 1 and series[0].name == name
    last = [
        f"{'' if single else s.name + ' '}{format_number(s.points[-1][1])}" for s in series
    ]
    num_lost = sum(len(s.points) - len(s.finite) for s in series)
    if len(series) > _MOST_VALUES:
        values = [s.finite[-1][1] for s in series]
        low, high = format_number(min(values)), format_number(max(values))
        last = [f"{len(series)} curves, last {low} to {high}"]
    note = ", ".join(last) + (f"; {num_lost} not finite" if num_lost else "")
    return figure(interactive_chart(name, series), name, note)


def throughput_series(record: RunRecord) -> Series:
    """Return samples per second between log events, over seconds.

    All time counts: the first interval includes the compilation.
    """
    updates = record.summary.get("updates") or 0
    batch = record.summary.get("samples", 0) / updates if updates else 0.0
    logged = [e for e in record.events if "samples_per_second" in e]
    marks = [(0.0, 0), *((float(e["time"]), e["update"]) for e in logged)]
    points = [
        (time, batch * (done - before) / (end - start))
        for (start, before), (end, done) in itertools.pairwise(marks)
        if end > start and done > before
        for time in (start, end)
    ]
    return Series("samples per second", points if batch else [])


def throughput_figure(
    series: Sequence[Series],
    *,
    bands: Sequence[Band] = (),
    level: tuple[str, float] | None = None,
    colors: Sequence[int] | None = None,
    linked: bool = False,
) -> str:
    """Draw samples per second over time, or nothing if there is no point."""
    if not any(s.finite for s in series):
        return ""
    name = "samples per second"
    chart = interactive_chart(
        name,
        series,
        x_name="seconds",
        bands=bands,
        level=level,
        from_zero=True,
        colors=colors,
        linked=linked,
    )
    return figure(chart, name, "including pauses")


def run_throughput_figure(record: RunRecord) -> str:
    """Draw samples per second of a run, with compilation and other pauses marked."""
    bands = [
        Band(max(0.0, start), end, name)
        for name, start, end in record.phases
        if name in _MARKED_PHASES and end > start
    ]
    steady = float(record.summary.get("samples_per_second") or 0)
    return throughput_figure(
        [throughput_series(record)],
        bands=sorted(bands, key=lambda b: b.start - b.end)[:_MOST_BANDS],  # the longest
        level=("steady state", steady) if steady else None,
    )
