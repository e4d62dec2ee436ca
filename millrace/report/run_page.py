"""``report.html``: a run on one page that needs nothing else, no network and no script."""

import html
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.drawing.numbers import byte_size, duration, text_of
from millrace.drawing.style import CHART, COLORS, FIGURES, PAGE
from millrace.durable import write_atomically
from millrace.report.curves import curve_figures, metric_charts, throughput_figure
from millrace.report.image_grids import picture_sections
from millrace.report.record import RUNNING, RunRecord, read_run
from millrace.report.sections import read_parts, section
from millrace.report.series import is_telling, split_kind, words

_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline';
 form-action 'none'; base-uri 'none'">
<title>{title}</title>
<style>{style}</style></head><body>
{body}
</body></html>
"""

_MOST_METRICS = 8
"""That are shown large; the others are folded away."""

_EXPLAINED = {
    "completed": "",
    "interrupted": "It was stopped before its end. What is below is as far as it came.",
    "failed": "It ended with an error. What is below is as far as it came.",
    RUNNING: "It has written no summary: it is still going, or was killed.",
}


def write_report(run: Path) -> Path:
    """Write the report of the run in a directory, whatever its end was."""
    path = run / "report.html"
    write_atomically(path, run_page(read_run(run)))
    return path


def run_page(record: RunRecord) -> str:
    """Return a run's report."""
    sections = {
        "Curves": curve_figures(metric_charts(record)),
        "": _application(record),
        "Time": _time(record),
        "Memory": table(_memory(record.summary.get("memory") or {})),
        "Options that differ from their defaults": _options(record),
        "Environment": table(_environment(record.summary)),
        "How to repeat it": _repeat(record),
    }
    body = _head(record) + "".join(
        f"<h2>{name}</h2>{content}" if name else content
        for name, content in sections.items()
        if content
    )
    return frame(f"{record.command} · {record.name}", body)


def frame(title: str, body: str) -> str:
    """Put a page together."""
    style = COLORS + CHART + FIGURES + PAGE
    return _FRAME.format(title=html.escape(title), style=style, body=body)


def table(values: Mapping[str, Any]) -> str:
    """Return names and values in two columns; nothing for no values."""
    rows = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(text_of(value))}</td></tr>"
        for name, value in values.items()
    )
    return f"<table>{rows}</table>" if rows else ""


def _head(record: RunRecord) -> str:
    status = record.status
    said, color = record.badge
    parts = [
        f"<h1>{html.escape(record.command or 'run')} · {html.escape(record.name)}</h1>",
        f'<p><span class="status {color}">{html.escape(said)}</span></p>',
    ]
    if (update := record.diverged_at) is not None:
        parts.append(
            f"<p>From update {update:,} on, the logged loss was not finite: training has "
            "diverged. A smaller learning rate may help.</p>"
        )
    if why := _EXPLAINED.get(status, ""):
        parts.append(f"<p>{why}</p>")
    if error := record.summary.get("error"):
        parts.append(f'<p class="error"><code>{html.escape(str(error))}</code></p>')
    if status in ("interrupted", RUNNING) and (record.path / "checkpoints").is_dir():
        parts.append(
            "<p>The same command with <code>--resume</code> continues it from its last "
            "checkpoint.</p>"
        )
    what = table(record.summary.get("facts") or {})
    return "".join(parts) + _tiles(record) + what


def _tiles(record: RunRecord) -> str:
    summary = record.summary
    ranked = _by_weight(record.metrics)
    figures = {words(name): text_of(value) for name, value in ranked[:_MOST_METRICS]}
    rest = table({words(name): value for name, value in ranked[_MOST_METRICS:]})
    if summary.get("updates"):
        figures["updates"] = f"{summary['updates']:,}"
    if summary.get("samples"):
        figures["samples"] = f"{summary['samples']:,}"
    if summary.get("samples_per_second"):
        figures["samples per second"] = text_of(float(summary["samples_per_second"]))
    if (seconds := summary.get("time_to_train_seconds")) is not None:
        figures["time to train"] = duration(seconds)
    if summary.get("wall_seconds"):
        figures["whole run"] = duration(summary["wall_seconds"])
    if summary.get("compile_seconds"):
        figures["compiling"] = duration(summary["compile_seconds"])
    tiles = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b>'
        f"<span>{html.escape(name)}</span></div>"
        for name, value in figures.items()
    )
    if not tiles:
        return ""
    more = f"<details><summary>more figures</summary>{rest}</details>" if rest else ""
    return f'<div class="tiles">{tiles}</div>{more}'


def _by_weight(metrics: dict[str, float]) -> list[tuple[str, float]]:
    """Sort metrics: tests before validation before training, the telling ones first."""
    order = {"test": 0, "validation": 1, "train": 2, "": 3}

    def weight(item: tuple[str, float]) -> tuple[bool, int]:
        kind, quantity = split_kind(item[0])
        return kind in ("train", "") and not is_telling(quantity), order[kind]

    return sorted(metrics.items(), key=weight)


def _application(record: RunRecord) -> str:
    parts = read_parts(record.path).values()
    return "".join(map(section, parts)) + picture_sections(record.path)


def _time(record: RunRecord) -> str:
    spent = record.summary.get("seconds") or {}
    chart = throughput_figure(record)
    what = table({name: duration(seconds) for name, seconds in spent.items()})
    if not chart and not what:
        return ""
    return f'<div class="figures">{chart}<div>{what}</div></div>'


def _memory(memory: Mapping[str, Any]) -> dict[str, str]:
    named = {
        "program_bytes": "compiled program needs, per device",
        "device_peak_bytes": "most in use on a device",
        "device_limit_bytes": "device has",
        "host_peak_bytes": "most in use by the process on the host",
    }
    return {named[n]: byte_size(memory[n]) for n in named if memory.get(n)}


def _options(record: RunRecord) -> str:
    changed = record.summary.get("changed_options")
    if changed is None:
        return ""
    shown = table({f"--{name.replace('_', '-')}": v for name, v in changed.items()})
    return shown or "<p>None: everything is as it is by default.</p>"


def _environment(summary: Mapping[str, Any]) -> dict[str, str]:
    device = summary.get("device") or {}
    facts: dict[str, str] = {}
    if device:
        count, kind, platform = (device.get(n) for n in ("count", "kind", "platform"))
        facts["devices"] = f"{count} x {kind} ({platform})"
    return facts | (summary.get("machine") or {}) | (summary.get("versions") or {})


def _repeat(record: RunRecord) -> str:
    command = record.summary.get("command")
    if not command:
        return ""
    others = {
        name: version
        for name, version in (record.summary.get("versions") or {}).items()
        if name not in ("python", "millrace")
    }
    pinned = " ".join(f"{name}=={version}" for name, version in others.items())
    lines = [f"pip install . {pinned}"] if pinned else []
    lines.append(_without(command, "--run-dir", "--resume"))
    told = f"<p>{_origin(record.summary)}. In a checkout of millrace as it was then:</p>"
    note = (
        '<p class="note">The seed is among the options, so on the same kind of device and '
        "with the same versions the weights come out the same.</p>"
    )
    shown = html.escape("\n".join(lines))
    return f"{told}<pre>{shown}</pre>{note}"


def _origin(summary: Mapping[str, Any]) -> str:
    """Say where it was run, and with which millrace, as far as that is known."""
    said = "It was run"
    if where := summary.get("directory"):
        said += f" in <code>{html.escape(where)}</code>"
    if version := (summary.get("versions") or {}).get("millrace"):
        said += f" with millrace {html.escape(str(version))}"
    if commit := summary.get("commit"):
        said += f", commit <code>{html.escape(commit)}</code>"
    return said


def _without(command: str, *options: str) -> str:
    """Leave out options with their values, which belong to the run that has been."""
    try:
        given = shlex.split(command)
    except ValueError:
        return command
    kept: list[str] = []
    skipping = False
    for word in given:
        if word.startswith("-"):
            skipping = word.split("=")[0].replace("_", "-") in options
        if not skipping:
            kept.append(word)
    return shlex.join(kept)
