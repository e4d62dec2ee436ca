"""Several runs on one page: what they reached, how, and wherein they differ."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.config import ConfigurationError
from millrace.drawing.chart import line_chart
from millrace.drawing.numbers import text_of
from millrace.drawing.style import NUM_COLORS
from millrace.report.curves import curve_charts, figure
from millrace.report.record import RunRecord
from millrace.report.run_page import frame
from millrace.report.series import Series, metric_series, split_kind, throughput, words

_LOWER_IS_BETTER = ("loss", "rmse", "mae", "seconds")
_HIGHER_IS_BETTER = ("accuracy", "elbo", "likelihood", "recall", "ndcg", "per_second")
_OF_NO_CONCERN = {"command", "run_dir", "resume"}

Row = Sequence[str]


def comparison_page(records: Sequence[RunRecord]) -> str:
    """Return one page about several runs."""
    if len(records) < 2:
        raise ConfigurationError("A comparison needs two runs or more.")
    names = run_names(records)
    sections = {
        "Figures": _figures(records, names),
        "Curves": _curves(records, names),
        "Options that differ": _differing(
            names,
            [{**r.config, "command": r.command} for r in records],
            skip=_OF_NO_CONCERN,
        ),
        "Environment that differs": _differing(names, [_environment(r) for r in records]),
    }
    title = f"{len(records)} runs"
    head = f"<h1>{title}: {html.escape(', '.join(names))}</h1>{_legend(records, names)}"
    body = "".join(
        f"<h2>{name}</h2>{content}" for name, content in sections.items() if content
    )
    return frame(title, head + body)


def run_names(records: Sequence[RunRecord]) -> list[str]:
    """Return the shortest names that tell the runs apart."""
    paths = [record.path.resolve() for record in records]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{record.name} ({number})" for number, record in enumerate(records, 1)]


def _legend(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    rows = "".join(
        f'<tr><th class="k{n % NUM_COLORS}">● {html.escape(name)}</th>'
        f'<td class="state {record.badge[1]}">{html.escape(record.badge[0])}</td>'
        f"<td><code>{html.escape(str(record.summary.get('command', '')))}</code></td></tr>"
        for n, (record, name) in enumerate(zip(records, names, strict=True))
    )
    return f'<div class="scroll"><table>{rows}</table></div>'


def _figures(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    every = [_numbers(record) for record in records]
    known = list(dict.fromkeys(name for numbers in every for name in numbers))
    rows = []
    for name in known:
        values = [numbers.get(name, math.nan) for numbers in every]
        best = _best(name)
        finite = [value for value in values if math.isfinite(value)]
        wanted = best(finite) if best and len(set(finite)) > 1 else None
        cells = [
            f'<td class="{"best" if value == wanted else ""}">'
            f"{'' if math.isnan(value) else html.escape(text_of(value))}</td>"
            for value in values
        ]
        rows.append(f"<tr><th>{html.escape(words(name))}</th>{''.join(cells)}</tr>")
    return _table(names, rows)


def _numbers(record: RunRecord) -> dict[str, float]:
    ranks = {"test": 0, "validation": 1, "train": 2, "": 3}
    metrics = sorted(record.metrics.items(), key=lambda m: ranks[split_kind(m[0])[0]])
    about = ("updates", "samples", "samples_per_second", "time_to_train_seconds")
    about += ("compile_seconds", "wall_seconds")
    found = {n: record.summary[n] for n in about if record.summary.get(n)}
    return dict(metrics) | found


def _best(name: str) -> Callable[[Sequence[float]], float] | None:
    if any(word in name for word in _HIGHER_IS_BETTER):
        return max
    return min if any(word in name for word in _LOWER_IS_BETTER) else None


def _curves(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    by_metric: dict[str, list[Series]] = {}
    for record, name in zip(records, names, strict=True):
        for metric, series in metric_series(record.events).items():
            if metric != "samples_per_second" and series.finite:
                by_metric.setdefault(metric, []).append(series._replace(name=name))
    colors = {name: number for number, name in enumerate(names)}
    figures = [*curve_charts(by_metric, colors), _speeds(records, names, colors)]
    return f'<div class="figures">{"".join(figures)}</div>' if any(figures) else ""


def _speeds(
    records: Sequence[RunRecord], names: Sequence[str], colors: Mapping[str, int]
) -> str:
    speeds = [
        throughput(record)._replace(name=name)
        for record, name in zip(records, names, strict=True)
    ]
    drawn = [series for series in speeds if series.finite]
    if not drawn:
        return ""
    chart = line_chart(
        "samples per second",
        drawn,
        x_name="seconds",
        from_zero=True,
        colors=[colors[series.name] for series in drawn],
    )
    return figure("samples per second", "everything counted", chart)


def _differing(
    names: Sequence[str],
    values: Sequence[Mapping[str, Any]],
    skip: frozenset[str] | set[str] = frozenset(),
) -> str:
    known = list(dict.fromkeys(name for each in values for name in each))
    rows = []
    for name in known:
        texts = [text_of(each[name]) if name in each else "" for each in values]
        if len(set(texts)) > 1 and name not in skip:
            cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
            rows.append(f"<tr><th>{html.escape(name.replace('_', '-'))}</th>{cells}</tr>")
    return _table(names, rows) if rows else "<p>None.</p>"


def _environment(record: RunRecord) -> dict[str, Any]:
    device = record.summary.get("device") or {}
    about = {f"device {name}": value for name, value in device.items()}
    machine = record.summary.get("machine") or {}
    return about | machine | (record.summary.get("versions") or {})


def _table(names: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(
        f'<th class="k{n % NUM_COLORS}">● {html.escape(name)}</th>'
        for n, name in enumerate(names)
    )
    return (
        f'<div class="scroll side"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
