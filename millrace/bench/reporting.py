"""Results as JSON, CSV and Markdown."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.bench.latency import supported
from millrace.bench.noise import is_uncertain, peer_speeds, ratio_noise, spread_of
from millrace.config import writing
from millrace.durable import finite_json, write_atomically
from millrace.numbers import format_number

_COLUMNS: tuple[str, ...] = (
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

_UNCERTAIN = "~: the ratio is no further from 1 than the values of the two are apart."


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write all three forms; called again whenever there is more."""
    text = json.dumps(finite_json(results), indent=1) + "\n"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "results.json", text)
        write_atomically(folder / "results.csv", as_csv(results["entries"]))
        write_atomically(folder / "results.md", as_markdown(results))


def as_csv(entries: Sequence[Mapping[str, Any]]) -> str:
    """One line for each entry, in SI units."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(_COLUMNS), lineterminator="\n")
    writer.writeheader()
    for entry in entries:
        writer.writerow(_flat(entry))
    return text.getvalue()


def _flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    speeds = entry.get("samples_per_second") or {}
    latency = entry.get("latency_ms") or {}
    peers = entry.get("peers") or {}
    named = {f"latency_{name}_ms": value for name, value in latency.items()}
    for name, peer in peers.items():
        for figure, value in (peer_speeds(peer) or {}).items():
            named[f"torch_{name}_{figure}".removesuffix("_median")] = value
    flat = {name: entry.get(name) for name in _COLUMNS} | named
    if entry.get("ratio"):
        flat |= {"ratio_noise": ratio_noise(entry), "ratio_uncertain": is_uncertain(entry)}
    flat |= {"samples_per_second": speeds.get("median")}
    flat |= {name: speeds.get(name) for name in ("lowest", "highest")}
    return {name: flat.get(name) for name in _COLUMNS}


def as_markdown(results: Mapping[str, Any]) -> str:
    """A table to read, and what could not be measured."""
    facts = results["facts"]
    lines = ["# Benchmarks", "", *(f"- {k}: {v}" for k, v in facts.items())]
    limits = results.get("limits") or {}
    lines += [f"- limit, {name}: {value:.4g} per s" for name, value in limits.items()]
    measured = [e for e in results["entries"] if e["status"] == "measured"]
    if measured:
        lines += ["", *table([row_of(entry) for entry in measured]), *notes(measured)]
    for status in ("skipped", "failed"):
        some = [e for e in results["entries"] if e["status"] == status]
        lines += [
            "",
            *(f"- {e['name']} {status}: {e['reason'].rstrip('.')}." for e in some),
        ]
    lines += ["", "Commands:", ""]
    lines += map(command_line, measured)
    return "\n".join(lines).rstrip() + "\n"


def command_line(entry: Mapping[str, Any]) -> str:
    """An item of a list: what was measured, and what is special about it."""
    about = f" ({entry['about']})" if entry.get("about") else ""
    return f"- {entry['name']}: `millrace {entry['command']}`{about}"


def row_of(entry: Mapping[str, Any]) -> dict[str, str]:
    """Write an entry's figures out."""
    speeds = entry["samples_per_second"]
    latency = supported(entry["latency_ms"], entry.get("latency_calls", 0))
    peers = entry.get("peers") or {}
    eager, compiled = peers.get("eager"), peers.get("compiled")
    return {
        "entry": entry["name"],
        "samples/s": format_number(speeds["median"]),
        "spread": _spread(speeds),
        "ms": f"{entry['ms_per_unit']:.3f}",
        "latency p50": _milliseconds(entry["latency_ms"].get("p50")),
        "p99": _milliseconds(latency.get("p99")),
        "p99.9": _milliseconds(latency.get("p99.9")),
        "compiled in s": f"{entry['compile_seconds']:.1f}",
        "peak GiB": f"{entry['peak_bytes'] / 2**30:.2f}",
        "TFLOP/s": _part(entry["flops_per_second"], 1e12, entry["of_matmul_limit"]),
        "GB/s": _part(entry["bytes_per_second"], 1e9, entry["of_copy_limit"]),
        "torch eager": _speed(eager),
        "eager spread": _spread(peer_speeds(eager)),
        "torch compiled": _speed(compiled),
        "compiled spread": _spread(peer_speeds(compiled)),
        "ratio": ratio_of(entry),
        "latency ratio": f"{entry['latency_ratio']:.2f}"
        if entry.get("latency_ratio") else "",
    }  # fmt: skip


def ratio_of(entry: Mapping[str, Any]) -> str:
    """Write a ratio out, with a ~ where noise could have made it."""
    if not entry.get("ratio"):
        return ""
    return f"{'~' if is_uncertain(entry) else ''}{entry['ratio']:.2f}"


def notes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say below a table what its ratios cannot, and why some are not there."""
    lines = ["", _UNCERTAIN] if any(map(is_uncertain, entries)) else []
    reasons = [reason for entry in entries for reason in _reasons(entry)]
    return [*lines, "", *reasons] if reasons else lines


def _reasons(entry: Mapping[str, Any]) -> list[str]:
    """Say what PyTorch has not done for an entry, and why."""
    if reason := entry.get("no_ratio"):
        return [f"- {entry['name']} is not compared with PyTorch: {reason}."]
    peers = entry.get("peers") or {}
    failed = {name: peer["error"] for name, peer in peers.items() if "error" in peer}
    return [f"- {entry['name']}, PyTorch {name}: {why}." for name, why in failed.items()]


def _spread(speeds: Mapping[str, Any] | None) -> str:
    return "" if speeds is None else f"{100 * spread_of(speeds):.1f} %"


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _part(value: float | None, scale: float, part: float | None) -> str:
    if value is None:
        return ""
    said = f"{value / scale:,.1f}" if value / scale >= 10 else f"{value / scale:.3g}"
    return said if part is None else f"{said} ({100 * part:.0f} %)"


def _speed(peer: Mapping[str, Any] | None) -> str:
    if not peer:
        return ""
    return format_number(peer["median"]) if "median" in peer else "failed"


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A Markdown table; columns that are empty throughout are left out."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [{n: n for n in names}, {n: "-" * widths[n] for n in names}, *rows]
    return [
        f"| {' | '.join(line[name].ljust(widths[name]) for name in names)} |"
        for line in lines
    ]
