"""Results as JSON, CSV and Markdown, and their comparison with an earlier session."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.bench.measuring import (
    drop_unsupported,
    is_uncertain,
    peer_speeds,
    ratio_noise,
    relative_noise,
    relative_spread,
)
from millrace.config import ConfigurationError, writing
from millrace.durable import finite_json, write_atomically
from millrace.numbers import format_number

_CSV_COLUMNS: tuple[str, ...] = (
    "name",
    "status",
    "samples_per_second",
    "lowest",
    "highest",
    "unit",
    "ms_per_unit",
    "latency_calls",
    "latency_mean_ms",
    "latency_p50_ms",
    "latency_p99_ms",
    "latency_p99.9_ms",
    "compile_seconds",
    "peak_bytes",
    "flops_per_second",
    "of_matmul_limit",
    "bytes_per_second",
    "of_copy_limit",
    "torch_eager",
    "torch_eager_lowest",
    "torch_eager_highest",
    "torch_compiled",
    "torch_compiled_lowest",
    "torch_compiled_highest",
    "ratio",
    "ratio_noise",
    "ratio_uncertain",
    "no_ratio",
    "torch_latency_p50_ms",
    "latency_ratio",
    "reason",
    "command",
)

_UNCERTAIN = "~: the distance of the ratio from 1 is within the noise of the two values."

# Fields that a results.json must have.
_FACTS = ("date", "device", "commit", "command")
_ALWAYS = ("name", "command", "status")
_MEASURED = (
    "samples_per_second",
    "ms_per_unit",
    "latency_ms",
    "compile_seconds",
    "peak_bytes",
    "flops_per_second",
    "of_matmul_limit",
    "bytes_per_second",
    "of_copy_limit",
)
_SPEEDS = ("median", "lowest", "highest")


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write all three files; called again after every measurement."""
    text = json.dumps(finite_json(results), indent=1) + "\n"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "results.json", text)
        write_atomically(folder / "results.csv", format_csv(results["entries"]))
        write_atomically(folder / "results.md", format_markdown(results))


def format_csv(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per entry, in SI units."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(_CSV_COLUMNS), lineterminator="\n")
    writer.writeheader()
    for entry in entries:
        writer.writerow(_flatten(entry))
    return text.getvalue()


def _flatten(entry: Mapping[str, Any]) -> dict[str, Any]:
    speeds = entry.get("samples_per_second") or {}
    flat = {name: entry.get(name) for name in _CSV_COLUMNS}
    flat |= {"samples_per_second": speeds.get("median")}
    flat |= {name: speeds.get(name) for name in ("lowest", "highest")}
    for name, value in (entry.get("latency_ms") or {}).items():
        flat[f"latency_{name}_ms"] = value
    for name, peer in (entry.get("peers") or {}).items():
        for figure, value in (peer_speeds(peer) or {}).items():
            flat[f"torch_{name}_{figure}".removesuffix("_median")] = value
    if entry.get("ratio"):
        flat |= {"ratio_noise": ratio_noise(entry), "ratio_uncertain": is_uncertain(entry)}
    return {name: flat.get(name) for name in _CSV_COLUMNS}


def format_markdown(results: Mapping[str, Any]) -> str:
    """Return the facts, a table of the measured entries, and reasons for the others."""
    facts = results["facts"]
    lines = ["# Benchmarks", "", *(f"- {k}: {v}" for k, v in facts.items())]
    limits = results.get("limits") or {}
    lines += [f"- limit, {name}: {value:.4g} per s" for name, value in limits.items()]
    measured = [e for e in results["entries"] if e["status"] == "measured"]
    if measured:
        rows = [format_row(entry) for entry in measured]
        lines += ["", *format_table(rows), *format_notes(measured)]
    for status in ("skipped", "failed"):
        others = [e for e in results["entries"] if e["status"] == status]
        lines.append("")
        lines += [f"- {e['name']} {status}: {e['reason'].rstrip('.')}." for e in others]
    lines += ["", "Commands:", "", *map(format_command, measured)]
    return "\n".join(lines).rstrip() + "\n"


def format_command(entry: Mapping[str, Any]) -> str:
    """Return a list item with the command of an entry and what it is for."""
    about = f" ({entry['about']})" if entry.get("about") else ""
    return f"- {entry['name']}: `millrace {entry['command']}`{about}"


def format_row(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a measured entry by column."""
    speeds, latency = entry["samples_per_second"], entry["latency_ms"]
    supported = drop_unsupported(latency, entry.get("latency_calls", 0))
    peers = entry.get("peers") or {}
    eager, compiled = peers.get("eager"), peers.get("compiled")
    return {
        "entry": entry["name"],
        "samples/s": format_number(speeds["median"]),
        "spread": _format_spread(speeds),
        "ms": f"{entry['ms_per_unit']:.3f}",
        "latency p50": _format(latency.get("p50"), ".3f"),
        "p99": _format(supported.get("p99"), ".3f"),
        "p99.9": _format(supported.get("p99.9"), ".3f"),
        "compile s": f"{entry['compile_seconds']:.1f}",
        "peak GiB": f"{entry['peak_bytes'] / 2**30:.2f}",
        "TFLOP/s": _format_rate(entry["flops_per_second"], 1e12, entry["of_matmul_limit"]),
        "GB/s": _format_rate(entry["bytes_per_second"], 1e9, entry["of_copy_limit"]),
        "torch eager": _format_peer(eager),
        "eager spread": _format_spread(peer_speeds(eager)),
        "torch compiled": _format_peer(compiled),
        "compiled spread": _format_spread(peer_speeds(compiled)),
        "ratio": format_ratio(entry),
        "latency ratio": _format(entry.get("latency_ratio") or None, ".2f"),
    }


def format_ratio(entry: Mapping[str, Any]) -> str:
    """Return the ratio to PyTorch, with a ~ if it is within the noise."""
    if not entry.get("ratio"):
        return ""
    return f"{'~' if is_uncertain(entry) else ''}{entry['ratio']:.2f}"


def format_notes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the notes below a table: uncertain ratios, and why some are missing."""
    lines = ["", _UNCERTAIN] if any(map(is_uncertain, entries)) else []
    reasons = [reason for entry in entries for reason in _missing_ratios(entry)]
    return [*lines, "", *reasons] if reasons else lines


def _missing_ratios(entry: Mapping[str, Any]) -> list[str]:
    if reason := entry.get("no_ratio"):
        return [f"- {entry['name']} is not compared with PyTorch: {reason}."]
    peers = entry.get("peers") or {}
    failed = {name: peer["error"] for name, peer in peers.items() if "error" in peer}
    return [f"- {entry['name']}, PyTorch {name}: {why}." for name, why in failed.items()]


def _format(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _format_spread(speeds: Mapping[str, Any] | None) -> str:
    return "" if speeds is None else f"{100 * relative_spread(speeds):.1f} %"


def _format_rate(value: float | None, unit: float, share: float | None) -> str:
    if value is None:
        return ""
    text = f"{value / unit:,.1f}" if value / unit >= 10 else f"{value / unit:.3g}"
    return text if share is None else f"{text} ({100 * share:.0f} %)"


def _format_peer(peer: Mapping[str, Any] | None) -> str:
    if not peer:
        return ""
    return format_number(peer["median"]) if "median" in peer else "failed"


def format_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a Markdown table without its empty columns."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [{n: n for n in names}, {n: "-" * widths[n] for n in names}, *rows]
    return [
        f"| {' | '.join(line[name].ljust(widths[name]) for name in names)} |"
        for line in lines
    ]


# Comparison with an earlier session


def read_results(path: Path) -> dict[str, Any]:
    """Read a results.json; raise an error if it is incomplete."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"Cannot read {path}: {error}") from error
    if not isinstance(results, dict) or not isinstance(results.get("entries"), list):
        raise ConfigurationError(f"{path} is not a results.json of millrace bench.")
    _require(path, "it", results, ("facts", "limits"))
    _require(path, "facts", results["facts"], _FACTS)
    for number, entry in enumerate(results["entries"], start=1):
        _require(path, f"entry {number}", entry, _ALWAYS)
        _check_entry(path, f"entry {entry['name']}", entry)
    return results


def _check_entry(path: Path, place: str, entry: Mapping[str, Any]) -> None:
    if entry["status"] != "measured":
        _require(path, place, entry, ("reason",))
        return
    _require(path, place, entry, _MEASURED)
    speeds = entry["samples_per_second"]
    _require(path, f"samples_per_second of {place}", speeds, _SPEEDS)
    if not all(isinstance(speeds[name], int | float) for name in _SPEEDS):
        raise ConfigurationError(f"{path}: samples_per_second of {place} is not a number.")


def _require(path: Path, place: str, part: Any, names: Sequence[str]) -> None:
    given = part if isinstance(part, dict) else {}
    if missing := [name for name in names if name not in given]:
        raise ConfigurationError(
            f"{path} is not a complete results.json of millrace bench: {place} has no "
            f"{', '.join(missing)}."
        )


def compare_results(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return a Markdown table of the entries that were measured in both sessions."""
    before = {e["name"]: e for e in old["entries"] if e["status"] == "measured"}
    rows = [
        _compare_entry(before[entry["name"]], entry)
        for entry in new["entries"]
        if entry["status"] == "measured" and entry["name"] in before
    ]
    if not rows:
        return "No entry was measured in both sessions."
    facts = old["facts"]
    lines = [f"Compared with {facts['date']}, {facts['commit']}:", "", *format_table(rows)]
    devices = [results["facts"]["device"] for results in (old, new)]
    if devices[0] != devices[1]:
        lines += ["", f"The devices differ: {devices[0]} before, {devices[1]} now."]
    return "\n".join(lines)


def _compare_entry(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    both = [entry["samples_per_second"] for entry in (old, new)]
    before, now = (speeds["median"] for speeds in both)
    change, noise = now / before - 1, relative_noise(*both)
    same_command = old["command"] == new["command"]
    return {
        "entry": new["name"],
        "before": f"{before:,.1f}",
        "now": f"{now:,.1f}",
        "change": f"{100 * change:+.1f} %",
        "noise": f"{100 * noise:.1f} %",
        "verdict": judge_change(change, noise) if same_command else "different command",
    }


def judge_change(change: float, noise: float) -> str:
    """Return whether a change is beyond the noise, and in which direction."""
    if abs(change) <= noise:
        return "same"
    return "FASTER" if change > 0 else "SLOWER"
