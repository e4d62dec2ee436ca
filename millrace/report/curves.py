"""A run's metrics as figures: one for each quantity, and the speed over time."""

import html
from collections.abc import Mapping, Sequence

from millrace.drawing.chart import Band, line_chart
from millrace.drawing.numbers import text_of
from millrace.report.record import RunRecord
from millrace.report.series import (
    Series,
    charts_of,
    importance,
    is_telling,
    metric_series,
    throughput,
    words,
)

_MARKED = ("compiling", "validating", "saving a checkpoint")
_MOST_BANDS = 200
_FEW = 6
"""Charts up to which all are shown at once."""


def curve_figures(charts: Mapping[str, Sequence[Series]]) -> str:
    """Return a figure for each quantity, those less telling folded away."""
    shown, folded = [], []
    for quantity, series in charts.items():
        few = len(charts) <= _FEW or is_telling(quantity)
        (shown if few else folded).append(metric_figure(quantity, series))
    if not shown:
        shown, folded = folded, shown
    more = f'<div class="figures">{"".join(folded)}</div>'
    return (f'<div class="figures">{"".join(shown)}</div>' if shown else "") + (
        f"<details><summary>{len(folded)} more</summary>{more}</details>" if folded else ""
    )


def curve_charts(
    charts: Mapping[str, Sequence[Series]], colors: Mapping[str, int]
) -> list[str]:
    """Return a figure for each metric of several runs, which keep their colors."""
    figures = []
    for metric in sorted(charts, key=importance):
        series = charts[metric]
        numbers = [colors[each.name] for each in series]
        chart = line_chart(words(metric), series, colors=numbers)
        figures.append(figure(words(metric), "", chart))
    return figures


def metric_charts(record: RunRecord) -> dict[str, list[Series]]:
    """Return what is drawn of a run's metrics, by quantity, the most telling first."""
    trained = any(name.startswith("train_") for event in record.events for name in event)
    if not trained and len({event["epoch"] for event in record.events}) < 2:
        return {}  # measured once, which the figures tell
    charts = charts_of(metric_series(record.events))
    charts.pop("samples_per_second", None)  # over time, in a figure of its own
    return charts


def metric_figure(quantity: str, series: Sequence[Series]) -> str:
    """Draw one quantity, with its last values in the caption."""
    name = words(quantity)
    last = ", ".join(
        f"{s.name} {text_of(s.points[-1][1])}" if len(series) > 1 or s.name != name else ""
        for s in series
    )
    last = last or text_of(series[0].points[-1][1])
    lost = sum(len(s.points) - len(s.finite) for s in series)
    note = f"; {lost} not finite" if lost else ""
    return figure(name, last + note, line_chart(name, series))


def throughput_figure(record: RunRecord) -> str:
    """Draw samples per second over time, with compiling and other pauses marked."""
    series = throughput(record)
    if not series.finite:
        return ""
    bands = [
        Band(max(0.0, start), end, name)
        for name, start, end in record.phases
        if name in _MARKED and end > start
    ]
    steady = float(record.summary.get("samples_per_second") or 0)
    chart = line_chart(
        "samples per second",
        [series],
        x_name="seconds",
        bands=sorted(bands, key=lambda b: b.start - b.end)[:_MOST_BANDS],
        level=("steady state", steady) if steady else None,
        from_zero=True,
    )
    return figure("samples per second", "everything counted", chart)


def figure(caption: str, note: str, chart: str) -> str:
    """Return a chart with its caption above."""
    small = f" <small>{html.escape(note)}</small>" if note else ""
    return f"<figure><figcaption>{html.escape(caption)}{small}</figcaption>{chart}</figure>"
