"""What has become slower or faster since an earlier measurement, beyond its noise."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.bench.noise import noise_of
from millrace.bench.reporting import table
from millrace.config import ConfigurationError

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


def read_results(path: Path) -> dict[str, Any]:
    """Read what an earlier call has written, and refuse what is not complete."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not isinstance(results, dict) or not isinstance(results.get("entries"), list):
        raise ConfigurationError(f"{path} is not a results.json of millrace bench.")
    _require(path, "it", results, ("facts", "limits"))
    _require(path, "facts", results["facts"], _FACTS)
    for number, entry in enumerate(results["entries"], start=1):
        _check_entry(path, f"entry {number}", entry)
    return results


def _check_entry(path: Path, place: str, entry: Any) -> None:
    _require(path, place, entry, _ALWAYS)
    place = f"entry {entry['name']}"
    if entry["status"] != "measured":
        _require(path, place, entry, ("reason",))
        return
    _require(path, place, entry, _MEASURED)
    speeds = entry["samples_per_second"]
    _require(path, f"samples_per_second of {place}", speeds, _SPEEDS)
    if not all(isinstance(speeds[name], int | float) for name in _SPEEDS):
        raise ConfigurationError(f"{path}: samples_per_second of {place} has no number.")


def _require(path: Path, place: str, part: Any, names: Sequence[str]) -> None:
    given = part if isinstance(part, dict) else {}
    if missing := [name for name in names if name not in given]:
        raise ConfigurationError(
            f"{path} is not a complete results.json of millrace bench: {place} has no "
            f"{', '.join(missing)}."
        )


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return a table of the entries that both have measured, as Markdown."""
    before = {e["name"]: e for e in old["entries"] if e["status"] == "measured"}
    rows = [
        _row(before[entry["name"]], entry)
        for entry in new["entries"]
        if entry["status"] == "measured" and entry["name"] in before
    ]
    if not rows:
        return "Nothing was measured both times."
    lines = [f"Against {old['facts']['date']}, {old['facts']['commit']}:", "", *table(rows)]
    devices = [results["facts"]["device"] for results in (old, new)]
    if devices[0] != devices[1]:
        lines += ["", f"That was another device: {devices[0]}; this is {devices[1]}."]
    return "\n".join(lines)


def _row(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    both = [entry["samples_per_second"] for entry in (old, new)]
    before, now = (speeds["median"] for speeds in both)
    change, noise = now / before - 1, noise_of(*both)
    same = old["command"] == new["command"]
    return {
        "entry": new["name"],
        "before": f"{before:,.1f}",
        "now": f"{now:,.1f}",
        "change": f"{100 * change:+.1f} %",
        "noise": f"{100 * noise:.1f} %",
        "so it is": verdict(change, noise) if same else "another command",
    }


def verdict(change: float, noise: float) -> str:
    """Say what a change means beside its noise."""
    if abs(change) <= noise:
        return "the same"
    return "FASTER" if change > 0 else "SLOWER"
