"""Metadata of a run: times, memory, changed options, commit and machine."""

import itertools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from millrace.config import as_plain, flat_options, plain_defaults
from millrace.durable import make_folder, write_atomically
from millrace.program.compiling import peak_bytes
from millrace.report.record import FOLDER, PHASES, read_phases
from millrace.run.console import Phase

_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
"""Environment variables that change what is computed, or where."""

_MIN_PHASE_SECONDS = 1e-3


def run_metadata(
    options: Any, phases: Sequence[Phase], programs: list[jax.stages.Compiled]
) -> dict[str, Any]:
    """Return the entries of ``summary.json`` that all commands have.

    Args:
        options: The configuration of the run.
        phases: Its activities, from the console.
        programs: All programs that were compiled.
    """
    spent: dict[str, float] = {}
    for name, start, end in phases:
        spent[name] = spent.get(name, 0.0) + end - start
    return {
        "seconds": {name: round(seconds, 3) for name, seconds in spent.items()},
        "memory": measure_memory(programs),
        "changed_options": get_changed_options(options),
        "commit": find_commit(),
        "machine": describe_machine(),
        "directory": str(Path.cwd()),
    }


def add_previous_times(summary: dict[str, Any], before: dict[str, Any]) -> None:
    """Add the times of the run before it was resumed."""
    for name in ("wall_seconds", "compile_seconds"):
        summary[name] += _select_numbers(before).get(name, 0.0)
    spent = _select_numbers(before.get("seconds"))
    for name, seconds in summary["seconds"].items():
        spent[name] = round(spent.get(name, 0.0) + seconds, 3)
    summary["seconds"] = spent


def _select_numbers(values: Any) -> dict[str, float]:
    """Return the entries that are numbers; somebody may have edited the file."""
    items = values.items() if isinstance(values, dict) else ()
    return {name: value for name, value in items if isinstance(value, int | float)}


def write_phases(run: Path, phases: Sequence[Phase], *, resumed: bool) -> None:
    """Write the activities of a run, after those from before it was resumed."""
    path = run / FOLDER / PHASES
    make_folder(path.parent)
    new = [
        [name, round(start, 3), round(end, 3)]
        for name, start, end in phases
        if end - start >= _MIN_PHASE_SECONDS
    ]
    # Phases after the checkpoint that the run resumed from happen again.
    start = min((start for _, start, _ in new), default=math.inf)
    old = read_phases(run) if resumed else []
    kept = [phase for phase in old if phase[1] < start]
    write_atomically(path, json.dumps(kept + new) + "\n")


def get_changed_options(options: Any) -> dict[str, Any]:
    """Return the options that differ from their defaults.

    Options about one start of the run, such as where it is written, are left out.
    """
    defaults, known = _get_defaults(type(options)), flat_options(type(options))
    return {
        name: value
        for name, value in as_plain(options).items()
        if not known[name].metadata.get("transient")
        and (name not in defaults or defaults[name] != value)
    }


def complete_command(command_line: str, changed_options: dict[str, Any]) -> str:
    """Return the command line that repeats a resumed run from its beginning.

    Args:
        command_line: As it was typed to resume the run; it may lack most options.
        changed_options: The options of the run that differ from their defaults.
    """
    words = itertools.takewhile(
        lambda word: not word.startswith("-"), shlex.split(command_line)
    )
    return shlex.join([*words, *format_options(changed_options)])


def format_options(options: dict[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    words = []
    for name, value in options.items():
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list | tuple):
            words += map(str, value)
        else:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def _get_defaults(config_type: Any) -> dict[str, Any]:
    # An instance also has the defaults that are derived from others.
    try:
        return as_plain(config_type())
    except (TypeError, ValueError):  # some options are required
        return plain_defaults(config_type)


def measure_memory(programs: list[jax.stages.Compiled]) -> dict[str, int]:
    """Return the peak memory use, as far as the platform reports it."""
    sizes = {"program_bytes": peak_bytes(programs), "host_peak_bytes": _host_peak_bytes()}
    # A run that was stopped while it looked for devices must not look again.
    devices = jax.local_devices() if programs else []
    stats_per_device = [device.memory_stats() or {} for device in devices]
    for name, jax_name in (
        ("device_peak_bytes", "peak_bytes_in_use"),
        ("device_limit_bytes", "bytes_limit"),
    ):
        sizes[name] = max((stats.get(jax_name, 0) for stats in stats_per_device), default=0)
    return {name: size for name, size in sizes.items() if size}


def _host_peak_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux


def describe_machine() -> dict[str, str]:
    """Return the operating system, the processor and relevant environment variables."""
    machine = {
        "system": platform.platform(terse=True),
        "processor": f"{os.cpu_count()} cores of {_processor()}",
    }
    return machine | {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}


def find_commit() -> str | None:
    """Return the commit of this package, if it is a git checkout."""
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
