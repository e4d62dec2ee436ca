"""How many calls latency takes, the noise of values, and what they were measured on.

The process of PyTorch loads this file by path, without the rest of the package. So it
imports only the standard library, and other modules inside functions.
"""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CALLS_NEEDED = {"p50": 1, "p99": 100, "p99.9": 1000}
"""With fewer calls, a percentile is little more than the slowest call."""
_MIN_LATENCY_CALLS = 20
_MAX_EXTENSION = 6
"""Factor by which timing latency may exceed its time to reach another percentile."""
_MIN_NOISE = 0.01
"""Smaller changes always count as noise: repeats in one session agree better than
sessions do."""


# Latency


def count_latency_calls(call_seconds: float, seconds: float) -> int:
    """Return the calls that fit into `seconds`, or more if they give another percentile."""
    affordable = [
        calls
        for calls in _CALLS_NEEDED.values()
        if calls * call_seconds <= _MAX_EXTENSION * seconds
    ]
    return max(_MIN_LATENCY_CALLS, int(seconds / call_seconds), *affordable)


def drop_unsupported(figures: dict[str, float], calls: int) -> dict[str, float]:
    """Drop the percentiles that need more calls than were timed."""
    return {n: value for n, value in figures.items() if _CALLS_NEEDED.get(n, 1) <= calls}


# Noise


def relative_spread(speeds: Mapping[str, Any]) -> float:
    """Return the distance of the lowest and highest value, relative to the median."""
    return (speeds["highest"] - speeds["lowest"]) / speeds["median"]


def relative_noise(*speeds: Mapping[str, Any]) -> float:
    """Return the sum of the spreads of the measurements that a ratio compares."""
    return max(_MIN_NOISE, sum(map(relative_spread, speeds)))


def peer_speeds(peer: Mapping[str, Any] | None) -> dict[str, float] | None:
    """Return the median, lowest and highest value of a peer; None without values."""
    values = (peer or {}).get("samples_per_second")
    if not peer or not values:
        return None
    return {"median": peer["median"], "lowest": min(values), "highest": max(values)}


def fastest_peer(peers: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the peer with the highest median, or None if none was measured."""
    measured = [peer for peer in peers.values() if peer.get("median")]
    return max(measured, key=lambda peer: peer["median"], default=None)


def ratio_noise(entry: Mapping[str, Any]) -> float | None:
    """Return the noise of an entry and its fastest peer; None if it is unknown."""
    theirs = peer_speeds(fastest_peer(entry.get("peers") or {}))
    return None if theirs is None else relative_noise(entry["samples_per_second"], theirs)


def is_uncertain(entry: Mapping[str, Any]) -> bool:
    """Whether the ratio to PyTorch is closer to 1 than its noise."""
    ratio, noise = entry.get("ratio"), ratio_noise(entry)
    return bool(ratio) and noise is not None and abs(ratio - 1) <= noise


# Facts


def collect_facts(device: Any, commit: str | None) -> dict[str, str]:
    """Return the hardware, versions, commit and command of a measurement."""
    import jax

    from millrace.versions import versions

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
        "commit": commit or _find_commit(),
        "command": shlex.join(["millrace", *sys.argv[1:]]),
    }
    if jax.config.values.get("jax_compilation_cache_dir"):
        facts["compiled programs"] = "some came from the JAX cache and took no time"
    return facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    return next(names, platform.processor())


def _find_commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--", "..", "../../benchmarks/*.py").strip()
        return git("rev-parse", "HEAD").strip() + (", with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: not a git repository"
