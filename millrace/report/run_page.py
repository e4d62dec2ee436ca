"""``report.html``: one run on a page."""

import shlex
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from millrace.drawing.html import details, figures, page, section, value_table
from millrace.durable import write_atomically
from millrace.numbers import format_bytes, format_duration, format_number
from millrace.report.best import find_best
from millrace.report.inference import render_inference
from millrace.report.metrics import (
    curve_figures,
    is_important,
    readable_name,
    run_curves,
    run_throughput_figure,
    sort_by_split,
    split_metric,
)
from millrace.report.record import RUNNING, RunRecord, as_number, read_run
from millrace.report.sections import render_sections
from millrace.storage.address import display

_FOLDED = ("train_gradients_finite", "loss_scale")
"""Metrics that matter only if something is wrong."""
_MOST_METRICS = 8
"""The number of metrics shown as tiles; the others are folded away."""

_EXPLANATIONS = {
    "interrupted": "The run was stopped early. The results so far are below.",
    "failed": "The run ended with an error. The results so far are below.",
    RUNNING: "There is no summary: the run is still running, or was killed.",
}
_MEMORY = {
    "program_bytes": "compiled program, per device",
    "device_peak_bytes": "peak device memory",
    "device_limit_bytes": "device memory available",
    "host_peak_bytes": "peak host memory of the process",
}


def write_report(run: Path) -> Path:
    """Write the report of a run directory and return its path."""
    path = run / "report.html"
    write_atomically(path, run_page(read_run(run)))
    return path


def run_page(record: RunRecord) -> str:
    """Return the report of a run."""
    parts = [
        _render_head(record),
        section("Inference", render_inference(record)),
        section("Curves", curve_figures(run_curves(record))),
        render_sections(record.path),
        section("Time", _render_time(record)),
        section("Memory", _render_memory(record)),
        section("Non-default options", _render_options(record)),
        section("Environment", value_table(_environment(record.summary))),
        section("Reproduce", _render_command(record)),
    ]
    return page(f"{record.command} · {record.name}", "".join(parts))


def _render_head(record: RunRecord) -> str:
    status = record.status
    badge, color = record.badge
    parts = [
        f"<h1>{escape(record.command or 'run')} · {escape(record.name)}</h1>",
        f'<p><span class="status {color}">{escape(badge)}</span></p>',
    ]
    parts.append(_render_verdict(record))
    if explanation := _EXPLANATIONS.get(status, ""):
        parts.append(f"<p>{explanation}</p>")
    if error := record.summary.get("error"):
        parts.append(f'<p class="error"><code>{escape(str(error))}</code></p>')
    if status in ("interrupted", RUNNING) and (record.path / "checkpoints").is_dir():
        run = escape(shlex.quote(display(record.path)))
        parts.append(
            f"<p><code>--resume {run}</code> continues from the last checkpoint.</p>"
        )
    facts = value_table(record.summary.get("facts") or {})
    return "".join(parts) + _render_tiles(record) + facts


def _render_verdict(record: RunRecord) -> str:
    """Say whether training made the model worse."""
    if (update := record.diverged_at) is not None:
        return (
            f"<p>From update {update:,} on, the logged loss was not finite: training "
            "diverged. A smaller learning rate may help.</p>"
        )
    summary = record.summary
    if found := summary.get("diverged"):
        where, what = f"at update {as_number(found.get('update')):,g}", "diverged"
    elif found := summary.get("rising_loss"):
        where = f"in the last {as_number(found.get('updates')):g} updates"
        what = "made the model worse"
    else:
        return ""
    first, then = (
        format_number(as_number(found.get(name))) for name in ("first_loss", "loss")
    )
    return (
        f"<p>The loss was {then} {where}, {first} at the start: training {what}. A smaller "
        "learning rate may help.</p>"
    )


class _Tile(NamedTuple):
    name: str
    value: str
    note: str = ""
    css_class: str = "tile"

    def render(self) -> str:
        note = f"<small>{escape(self.note)}</small>" if self.note else ""
        return (
            f'<div class="{self.css_class}"><b>{escape(self.value)}</b>'
            f"<span>{escape(self.name)}</span>{note}</div>"
        )


def _render_tiles(record: RunRecord) -> str:
    metrics = record.metrics
    ranked = sorted(sort_by_split(metrics), key=_is_detail)
    shown = [name for name in ranked[:_MOST_METRICS] if name not in _FOLDED]
    folded = [name for name in ranked if name not in shown]
    tiles = {n: _Tile(readable_name(n), format_number(metrics[n])) for n in shown}
    tiles = _put_best_first(record, tiles)
    rendered = "".join(tile.render() for tile in [*tiles, *_summary_tiles(record.summary)])
    if not rendered:
        return ""
    rest = value_table({readable_name(name): metrics[name] for name in folded})
    return f'<div class="tiles">{rendered}</div>{details("more metrics", rest)}'


def _put_best_first(record: RunRecord, tiles: dict[str, _Tile]) -> list[_Tile]:
    """Show the best held-out result first, and the last one after it if it is another."""
    best = find_best(record)
    if best is None or split_metric(best.metric)[0] in ("train", ""):
        return list(tiles.values())
    name = readable_name(best.metric)
    when = ", ".join(part for part in (best.format_epoch("at "), best.place) if part)
    # A sweep has the error of its best trial as a metric.
    tiles = {n: tile for n, tile in tiles.items() if not n.startswith("best_")}
    last = tiles.pop(best.metric, None)
    if last is not None and last.value == format_number(best.value):
        first = last._replace(note=f"best, {when}" if when else "best")
        return [first._replace(css_class="tile first"), *tiles.values()]
    first = _Tile(f"best {name}", format_number(best.value), when, "tile first")
    after = [last._replace(note="last")] if last is not None else []
    return [first, *after, *tiles.values()]


def _summary_tiles(summary: Mapping[str, Any]) -> list[_Tile]:
    tiles = [
        _Tile(name, f"{summary[name]:,}")
        for name in ("updates", "samples")
        if summary.get(name)
    ]
    if summary.get("samples_per_second"):
        speed = format_number(float(summary["samples_per_second"]))
        tiles.append(_Tile("samples per second", speed))
    if (seconds := summary.get("time_to_train_seconds")) is not None:
        tiles.append(_Tile("time to train", format_duration(seconds)))
    for name, title in (("wall_seconds", "total time"), ("compile_seconds", "compilation")):
        if summary.get(name):
            tiles.append(_Tile(title, format_duration(summary[name])))
    return tiles


def _is_detail(metric: str) -> bool:
    split, quantity = split_metric(metric)
    return split in ("train", "") and not is_important(quantity)


def _render_time(record: RunRecord) -> str:
    seconds = record.summary.get("seconds") or {}
    spent = value_table({name: format_duration(time) for name, time in seconds.items()})
    return figures([run_throughput_figure(record), spent])


def _render_memory(record: RunRecord) -> str:
    memory = record.summary.get("memory") or {}
    known = {name: title for name, title in _MEMORY.items() if memory.get(name)}
    return value_table({title: format_bytes(memory[n]) for n, title in known.items()})


def _render_options(record: RunRecord) -> str:
    changed = record.summary.get("changed_options")
    if changed is None:
        return ""
    options = {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return value_table(options) or "<p>None.</p>"


def _environment(summary: Mapping[str, Any]) -> dict[str, Any]:
    device = summary.get("device") or {}
    facts: dict[str, Any] = {}
    if device:
        count, kind, platform = (device.get(n) for n in ("count", "kind", "platform"))
        facts["devices"] = f"{count} x {kind} ({platform})"
    return facts | (summary.get("machine") or {}) | (summary.get("versions") or {})


def _render_command(record: RunRecord) -> str:
    command = record.summary.get("command")
    if not command:
        return ""
    versions = record.summary.get("versions") or {}
    pinned = " ".join(
        f"{name}=={version}"
        for name, version in versions.items()
        if name not in ("python", "millrace")
    )
    lines = [f"pip install . {pinned}"] if pinned else []
    lines.append(_remove_options(command, "--run-dir", "--resume"))
    shown = escape("\n".join(lines))
    return (
        f"<p>{_describe_origin(record.summary)}. In a checkout of that version:</p>"
        f"<pre>{shown}</pre>"
        '<p class="note">The same kind of device and the same versions give the same '
        "weights: the seed is one of the options.</p>"
    )


def _describe_origin(summary: Mapping[str, Any]) -> str:
    origin = "Run"
    if directory := summary.get("directory"):
        origin += f" in <code>{escape(directory)}</code>"
    if version := (summary.get("versions") or {}).get("millrace"):
        origin += f" with millrace {escape(str(version))}"
    if commit := summary.get("commit"):
        origin += f", commit <code>{escape(commit)}</code>"
    return origin


def _remove_options(command: str, *options: str) -> str:
    """Return a command line without some options and their values."""
    try:
        arguments = shlex.split(command)
    except ValueError:
        return command
    kept: list[str] = []
    skipping = False
    for argument in arguments:
        if argument.startswith("-"):
            skipping = argument.split("=")[0].replace("_", "-") in options
        if not skipping:
            kept.append(argument)
    return shlex.join(kept)
