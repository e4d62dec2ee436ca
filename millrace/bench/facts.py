"""On what a measurement was made: hardware, versions, commit, command."""

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from millrace.versions import versions


def session_facts(device: Any, commit: str | None) -> dict[str, str]:
    """Return what a reader must know to judge the figures, or to get them again."""
    hardware = f"{os.cpu_count()} cores of {_cpu_model()}"
    if device.platform != "cpu":
        software = " ".join(device.client.platform_version.split())
        hardware = f"{device.device_kind} ({software}), {hardware}"
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device.device_kind,
        "hardware": hardware,
        "load before": f"{os.getloadavg()[0]:.1f} processes",
        "versions": ", ".join(f"{name} {value}" for name, value in versions().items()),
        "commit": commit or _commit(),
        "command": shlex.join(["millrace", *sys.argv[1:]]),
    }
    if jax.config.values.get("jax_compilation_cache_dir"):
        facts["compiled programs"] = "kept in JAX's cache: some took no time to compile"
    return facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    return next(names, platform.processor())


def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--", "..", "../../benchmarks/*.py").strip()
        return git("rev-parse", "HEAD").strip() + (", with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git repository here"
