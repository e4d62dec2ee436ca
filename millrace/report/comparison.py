"""Several runs on one page: their results, their curves and their differences."""

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from millrace.config import ConfigurationError
from millrace.drawing.charts import Series
from millrace.drawing.html import Cell, figure, figures, page, section, table
from millrace.drawing.interactive import interactive_chart
from millrace.drawing.style import NUM_SERIES_COLORS
from millrace.numbers import format_value
from millrace.report.best import choose_better, find_best
from millrace.report.metrics import (
    metric_series,
    readable_name,
    sort_by_quantity,
    sort_by_split,
    throughput_figure,
    throughput_series,
)
from millrace.report.record import RunRecord

_IGNORED_OPTIONS = ("command", "run_dir", "resume")
_SUMMARY_NUMBERS = (
    *("updates", "samples", "samples_per_second"),
    *("time_to_train_seconds", "compile_seconds", "wall_seconds"),
)


def comparison_page(records: Sequence[RunRecord]) -> str:
    """Return one page about several runs."""
    if len(records) < 2:
        raise ConfigurationError("A comparison needs at least two runs.")
    names = run_names(records)
    title = f"{len(records)} runs: {', '.join(names)}"
    options = [record.config | {"command": record.command} for record in records]
    parts = [
        f"<h1>{escape(title)}</h1>",
        _render_legend(records, names),
        section("Results", _render_results(records, names)),
        section("Curves", _render_curves(records, names)),
        section(
            "Option differences", _render_differences(names, options, _IGNORED_OPTIONS)
        ),
        section(
            "Environment differences",
            _render_differences(names, [_environment(record) for record in records]),
        ),
    ]
    return page(f"{len(records)} runs", "".join(parts))


def run_names(records: Sequence[RunRecord]) -> list[str]:
    """Return the shortest distinct names of the runs."""
    paths = [record.path.resolve() for record in records]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{record.name} ({number})" for number, record in enumerate(records, 1)]


def _headings(names: Sequence[str]) -> list[Cell]:
    return [(f"● {name}", f"k{n % NUM_SERIES_COLORS}") for n, name in enumerate(names)]


def _render_legend(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows: list[list[Cell]] = []
    for record, heading in zip(records, _headings(names), strict=True):
        status, color = record.badge
        command = str(record.summary.get("command", ""))
        rows.append([heading, (status, f"state {color}"), (command, "code")])
    return table(rows)


def _render_results(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    results = [_collect_numbers(record) for record in records]
    rows = _best_rows(records)
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result.get(name, math.nan) for result in results]
        texts = ["" if math.isnan(value) else format_value(value) for value in values]
        rows.append([readable_name(name), *_mark_best(name, values, texts)])
    return table(rows, head=["", *_headings(names)], css_class="runs")


def _collect_numbers(record: RunRecord) -> dict[str, float]:
    metrics, summary = record.metrics, record.summary
    numbers = {name: summary[name] for name in _SUMMARY_NUMBERS if summary.get(name)}
    return {name: metrics[name] for name in sort_by_split(metrics)} | numbers


def _best_rows(records: Sequence[RunRecord]) -> list[list[Cell]]:
    """Return the best result of each run with its epoch, a row per deciding metric."""
    found = [find_best(record) for record in records]
    rows: list[list[Cell]] = []
    for metric in dict.fromkeys(best.metric for best in found if best is not None):
        own = [best if best and best.metric == metric else None for best in found]
        values = [best.value if best else math.nan for best in own]
        texts = [best.format() if best else "" for best in own]
        rows.append([f"best {readable_name(metric)}", *_mark_best(metric, values, texts)])
    if any(best and best.place for best in found):
        rows.append(["its checkpoint", *(best.place if best else "" for best in found)])
    return rows


def _mark_best(name: str, values: Sequence[float], texts: Sequence[str]) -> list[Cell]:
    finite = [value for value in values if math.isfinite(value)]
    choose = choose_better(name)
    best = choose(finite) if choose and len(set(finite)) > 1 else None
    return [
        (text, "best" * (value == best)) for value, text in zip(values, texts, strict=True)
    ]


def _render_curves(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    by_metric: dict[str, list[Series]] = {}
    speeds: list[Series] = []
    for record, name in zip(records, names, strict=True):
        for metric, series in metric_series(record.events).items():
            if metric != "samples_per_second" and series.finite:
                by_metric.setdefault(metric, []).append(series._replace(name=name))
        speed = throughput_series(record)._replace(name=name)
        speeds += [speed] if speed.finite else []

    def colors(curves: Sequence[Series]) -> list[int]:
        # A run keeps its color in a chart that not all runs are in.
        return [names.index(curve.name) for curve in curves]

    charts = []
    for metric in sort_by_quantity(by_metric):
        curves, title = by_metric[metric], readable_name(metric)
        chart = interactive_chart(title, curves, colors=colors(curves), linked=True)
        charts.append(figure(chart, title))
    speed_chart = throughput_figure(speeds, colors=colors(speeds), linked=True)
    return figures([*charts, speed_chart])


def _render_differences(
    names: Sequence[str],
    values: Sequence[Mapping[str, Any]],
    ignored: Collection[str] = (),
) -> str:
    rows = []
    for name in dict.fromkeys(name for each in values for name in each):
        texts = [format_value(each[name]) if name in each else "" for each in values]
        if len(set(texts)) > 1 and name not in ignored:
            rows.append([name.replace("_", "-"), *texts])
    return table(rows, head=["", *_headings(names)], css_class="runs") or "<p>None.</p>"


def _environment(record: RunRecord) -> dict[str, Any]:
    device = record.summary.get("device") or {}
    facts = {f"device {name}": value for name, value in device.items()}
    machine = record.summary.get("machine") or {}
    return facts | machine | (record.summary.get("versions") or {})
