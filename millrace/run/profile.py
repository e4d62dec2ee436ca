"""Where the time of a training program went, from a trace of ``jax.profiler``."""

import collections
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from millrace.loop.trace import Trace
from millrace.report.sections import Table, save_section

_MAX_OPERATIONS = 15
_GPU_PLANE, _GPU_LINE = "/device:GPU", "Stream"
"""Starts of the names of a GPU in a trace, and of its streams, which have the kernels."""
_LONGEST_NAME = 60
_CONTAINERS = ("while", "call", "conditional", "async-start", "async-done")
"""Operations whose time is that of the operations inside them."""


class Operation(NamedTuple):
    """Operations of one name, added up."""

    name: str
    seconds: float
    share: float
    """Of the time of all operations on all devices."""
    times: int


def read_operations(folder: Path) -> list[Operation]:
    """Return the operations in the newest trace of a folder, the longest first."""
    paths = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not paths:
        return []
    # The first reads of a trace create types of C++ that have no __module__. Where their
    # DeprecationWarning is an error, that aborts the process (nanobind 2.9, Python 3.12).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return _add_up(jax.profiler.ProfileData.from_file(str(paths[-1])))


def _add_up(data: Any) -> list[Operation]:
    """Return the operations of a trace by name, the longest first."""
    seconds: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    for name, duration in _find_all(list(data.planes)):
        seconds[name] += duration
        counts[name] += 1
    total = sum(seconds.values())
    longest = sorted(seconds, key=lambda name: -seconds[name])
    return [Operation(n, seconds[n], seconds[n] / total, counts[n]) for n in longest]


def _find_all(planes: list[Any]) -> Iterable[tuple[str, float]]:
    """Yield name and seconds of the operations on the devices of a trace."""
    gpus = [plane for plane in planes if plane.name.startswith(_GPU_PLANE)]
    for plane in gpus:
        for line in plane.lines:
            if line.name.startswith(_GPU_LINE):
                yield from _find_kernels(line.events)
    # With GPUs, reading the stats of events on the host aborts the process (jax 0.11.2).
    for plane in [] if gpus else planes:
        for line in plane.lines:
            yield from _find_operations(line.events)


def _find_kernels(events: Iterable[Any]) -> Iterable[tuple[str, float]]:
    """Yield name and seconds of the kernels of a GPU."""
    for event in events:
        if event.duration_ns > 0:
            name = re.sub(r"[_.]?\d+$", "", event.name)[:_LONGEST_NAME]
            yield name or "unnamed", event.duration_ns * 1e-9


def _find_operations(events: Iterable[Any]) -> Iterable[tuple[str, float]]:
    """Yield name and seconds of the events that are operations of a compiled program."""
    for event in events:
        stats = dict(event.stats)
        if "hlo_op" not in stats:
            continue
        # dot.12 and dot.3 are both products.
        operation = re.sub(r"[.\d]+$", "", str(stats["hlo_op"])) or "unnamed"
        if operation not in _CONTAINERS and event.duration_ns > 0:
            scope = _find_scope(str(stats.get("tf_op", "")))
            yield operation + (f" ({scope})" if scope else ""), event.duration_ns * 1e-9


def _find_scope(path: str) -> str:
    """Return the last two names of a path such as ``jit(run)/while/body/my_layer/dot``."""
    names = [name for name in path.rstrip(":").split("/") if name]
    generic = ("while", "body", "closed_call", "scan", "cond", "shard_map")
    kept = [n for n in names if n not in generic and not re.match(r"\w+\(.*\)$", n)]
    return "/".join(kept[-2:])


def report_profile(path: Path, trace: Trace) -> tuple[dict[str, Any], str]:
    """Add a section to the report of a run; return facts for the summary and a note.

    Args:
        path: The run directory.
        trace: The trace, written.
    """
    if not trace.updates:
        return {}, "the run was too short to trace; train for a few seconds or more"
    operations = read_operations(trace.folder)
    shown = operations[:_MAX_OPERATIONS]
    note = (
        f"{trace.updates:,} updates in {trace.seconds:.2f} s, traced after warm-up. "
        "Shares are of the time of all operations on all devices. Open the folder "
        f"{trace.folder.name} with XProf, TensorBoard or Perfetto to see them over time."
    )
    columns = ["operation", "share", "µs per update", "times per update"]
    per_update = 1 / trace.updates
    rows = [
        [
            operation.name,
            f"{operation.share:.1%}",
            f"{1e6 * operation.seconds * per_update:,.1f}",
            f"{operation.times * per_update:,.1f}",
        ]
        for operation in shown
    ]
    section = Table(title="Where the time went", note=note, columns=columns, rows=rows)
    save_section(path, "0-profile", section)
    facts = {
        "folder": trace.folder.name,
        "updates": trace.updates,
        "seconds": trace.seconds,
        "operations": [operation._asdict() for operation in shown],
    }
    longest = ", ".join(f"{o.name} {o.share:.0%}" for o in shown[:3])
    return {"profile": facts}, f"{longest or 'no operations found'}; see the report"
