"""What a run can tell of itself besides its results: time, memory, options, machine."""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from millrace.config import as_plain, plain_defaults
from millrace.durable import make_folder, write_atomically
from millrace.program.memory import peak_bytes
from millrace.report.record import FOLDER, PHASES, read_phases
from millrace.run.console import Phase

_TELLING = ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
"""Variables that change what is computed, or where."""

_WORTH_KEEPING = 1e-3  # seconds

_OF_NO_CONCERN = {"run_dir", "resume"}
"""Options that say where a run is kept, not what it does."""


def run_metadata(
    options: Any, phases: Sequence[Phase], programs: list[jax.stages.Compiled]
) -> dict[str, Any]:
    """Return the entries of ``summary.json`` that every command has besides its own.

    Args:
        options: The run's configuration.
        phases: From the console: what was done when.
        programs: All that was compiled.
    """
    spent: dict[str, float] = {}
    for name, start, end in phases:
        spent[name] = spent.get(name, 0.0) + end - start
    return {
        "seconds": {name: round(seconds, 3) for name, seconds in spent.items()},
        "memory": memory_used(programs),
        "changed_options": changed_options(options),
        "commit": commit(),
        "machine": machine(),
        "directory": str(Path.cwd()),
    }


def add_earlier(summary: dict[str, Any], before: dict[str, Any]) -> None:
    """Add the time that the parts of a run took which a resume goes on from."""
    for name in ("wall_seconds", "compile_seconds"):
        summary[name] += _numbers(before).get(name, 0.0)
    spent = _numbers(before.get("seconds"))
    for name, seconds in summary["seconds"].items():
        spent[name] = round(spent.get(name, 0.0) + seconds, 3)
    summary["seconds"] = spent


def _numbers(found: Any) -> dict[str, float]:
    """Return the numbers among what somebody may have changed by hand."""
    items = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in items if isinstance(value, int | float)}


def write_phases(run: Path, phases: Sequence[Phase], *, resumed: bool) -> None:
    """Keep what was done when, with what the run had done before it was resumed."""
    path = run / FOLDER / PHASES
    make_folder(path.parent)
    new = [
        [name, round(start, 3), round(end, 3)]
        for name, start, end in phases
        if end - start >= _WORTH_KEEPING
    ]
    began = min((start for _, start, _ in new), default=math.inf)
    old = read_phases(run) if resumed else []
    kept = [phase for phase in old if phase[1] < began]
    write_atomically(path, json.dumps(kept + new) + "\n")


def changed_options(options: Any) -> dict[str, Any]:
    """Return the options that are not what they are by default."""
    values = as_plain(options)
    usual = _defaults(type(options))
    return {
        name: value
        for name, value in values.items()
        if name not in _OF_NO_CONCERN and (name not in usual or usual[name] != value)
    }


def _defaults(config_type: Any) -> dict[str, Any]:
    """As written down in the class, or worked out where nothing else is given."""
    try:
        return as_plain(config_type())
    except (TypeError, ValueError):  # some must be given
        return plain_defaults(config_type)


def memory_used(programs: list[jax.stages.Compiled]) -> dict[str, int]:
    """Return the most that was in use, as far as the platform tells."""
    found = {"program_bytes": peak_bytes(programs), "host_peak_bytes": _host_peak()}
    every = [device.memory_stats() or {} for device in jax.local_devices()]
    for ours, theirs in (
        ("device_peak_bytes", "peak_bytes_in_use"),
        ("device_limit_bytes", "bytes_limit"),
    ):
        found[ours] = max((stats.get(theirs, 0) for stats in every), default=0)
    return {name: value for name, value in found.items() if value}


def _host_peak() -> int:
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def machine() -> dict[str, str]:
    """Return what the program ran on."""
    facts = {
        "system": platform.platform(terse=True),
        "processor": f"{os.cpu_count()} cores of {_processor()}",
    }
    return facts | {name: os.environ[name] for name in _TELLING if os.environ.get(name)}


def commit() -> str | None:
    """Return the commit this package is a checkout of, if it is one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().replace("-dirty", ", with changes")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    return next(names, platform.processor() or platform.machine())
