"""What a compiled program is made of, and where its time goes."""

import collections
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_OPERATION = re.compile(r" = \S+ ([a-z][a-z\-]*)\(")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


def describe(compiled: Any) -> dict[str, Any]:
    """Return XLA's own figures for a program, and how many operations of each kind."""
    costs = compiled.cost_analysis() or {}
    memory = compiled.memory_analysis()
    kinds: collections.Counter[str] = collections.Counter()
    for line in _top_level(compiled.as_text()):
        if found := _OPERATION.search(line):
            target = _TARGET.search(line)
            kinds[f"custom-call {target[1]}" if target else found[1]] += 1
    return {
        "flops": costs.get("flops"),
        "bytes_accessed": costs.get("bytes accessed"),
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
        "argument_bytes": getattr(memory, "argument_size_in_bytes", None),
        "operations": dict(kinds.most_common(30)),
    }


def _top_level(text: str) -> list[str]:
    """Leave out what is inside fusions: those run as one."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.endswith("{"):
            inside = any(word in line for word in ("fused", "fusion", "wrapped"))
        elif not inside:
            lines.append(line)
    return lines


def slowest(run: Callable[[], Any], folder: Path, count: int = 40) -> list[dict[str, Any]]:
    """Trace `run` into `folder` and return the device's operations that took longest."""
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(run())
    newest = max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(newest, "rt") as file:
        events = json.load(file)["traceEvents"]
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:" in event["args"]["name"]
    }
    totals: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        arguments = event.get("args", {})
        # On a CPU, operations run on the host's threads.
        ours = event.get("pid") in devices if devices else "hlo_op" in arguments
        if event.get("ph") == "X" and ours and "hlo_op" in arguments:
            totals[f"{arguments['hlo_op']}: {event['name']}"].append(event["dur"] / 1e3)
    ordered = sorted(totals.items(), key=lambda item: -sum(item[1]))
    return [
        {"operation": name[:160], "milliseconds": round(sum(times), 3), "times": len(times)}
        for name, times in ordered[:count]
    ]
