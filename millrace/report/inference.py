"""The throughput and latency that ``cnn validate`` measured, as a table."""

from typing import Any

from millrace.drawing.html import table
from millrace.numbers import format_bytes, format_number
from millrace.report.record import RunRecord, is_number


def render_inference(record: RunRecord) -> str:
    """Return a table with a row per batch size, or nothing if there are no results."""
    results = record.summary.get("results")
    rows = [
        row
        for result in (results if isinstance(results, list) else [])
        if isinstance(result, dict) and is_number(result.get("batch_size"))
        for row in [_collect_figures(result)]
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name, "") for name in names] for row in rows]
    return table(cells, head=names, css_class="runs numbers") if rows else ""


def _collect_figures(result: dict[str, Any]) -> dict[str, str]:
    figures = {"batch size": f"{result['batch_size']:,}"}
    rates = result.get("samples_per_second")
    rates = [rate for rate in (rates if isinstance(rates, list) else []) if is_number(rate)]
    if rates:
        figures["samples per second"] = format_number(float(max(rates)))
    latency = result.get("latency_ms")
    for name, value in latency.items() if isinstance(latency, dict) else ():
        if is_number(value):
            figures[f"latency {name}"] = f"{value:.3f} ms"
    if is_number(calls := result.get("latency_calls")) and "latency mean" in figures:
        figures["calls"] = f"{calls:,}"
    for name in ("accuracy", "loss"):
        if is_number(result.get(name)):
            figures[name] = format_number(float(result[name]))
    if is_number(result.get("memory_bytes")):
        figures["memory"] = format_bytes(result["memory_bytes"])
    return figures
