"""``millrace devices``: what is here, how fast it is, and which plan suits it."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from millrace.commands.devices_options import DevicesConfig
from millrace.numbers import format_bytes
from millrace.program.roofline import CopyRates, MatmulRate, measure_copy, measure_matmul
from millrace.run.process import use_virtual_devices
from millrace.run.provenance import machine

_TYPES = ("float32", "bfloat16", "float16")
_WORTH_NARROWING = 1.3
"""From this gain in products on, 16 bits are worth their lost digits."""
_IMAGE_BYTES = 4 * 224 * 224 * 3


class Found(NamedTuple):
    """What is here, and what was measured of the first device."""

    devices: list[dict[str, Any]]
    machine: dict[str, str]
    matmul: dict[str, MatmulRate]
    copy: CopyRates | None


def show_devices(config: DevicesConfig) -> None:
    """Print what is here and what it suggests."""
    if config.virtual_devices is not None:
        use_virtual_devices(config.virtual_devices)
    found = look(measure=config.measure)
    advice = suggest(found)
    if config.json:
        print(json.dumps(_plain(found) | {"suggested": advice}, indent=2))
        return
    rows = {**_devices(found), **_rates(found)}
    rows |= {f"suggested {name}": text for name, text in advice.items()}
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:<{width}}  {text}")


def look(*, measure: bool = True) -> Found:
    """Find the devices, and measure the first one if asked to."""
    devices = [
        {
            "number": number,
            "platform": device.platform,
            "kind": device.device_kind,
            "process": device.process_index,
            "memory_bytes": _memory(device),
        }
        for number, device in enumerate(jax.devices())
    ]
    first = jax.local_devices()[0]
    matmul = {d: measure_matmul(first, dtype=d) for d in _TYPES} if measure else {}
    return Found(devices, machine(), matmul, measure_copy(first) if measure else None)


def suggest(found: Found) -> dict[str, str]:
    """Return options of ``train`` that suit what was found, and why."""
    first = found.devices[0]
    advice = {"precision": _precision(found.matmul, first["platform"])}
    count = len(found.devices)
    if first["platform"] == "cpu":
        advice["plan"] = (
            "one replica: its cores work together as it is (--virtual-devices N only "
            "tries out a plan for N devices)"
        )
    elif count > 1:
        advice["plan"] = (
            f"--num-replicas {count}, one on each device; --pipeline-splits where the "
            "model does not fit on one"
        )
    else:
        advice["plan"] = (
            "one replica; --gradient-accumulation-count for larger batches, "
            "--optimizer-state-offloading or --recomputation where memory is short"
        )
    if found.copy is not None and found.copy.to_device:
        each = found.copy.to_device / _IMAGE_BYTES
        advice["transfer"] = (
            f"--eight-bit-transfer from about {each:,.0f} images of 224 x 224 per second "
            "on: so many float32 ones can be copied to the device"
        )
    return advice


def _precision(matmul: Mapping[str, MatmulRate], platform: str) -> str:
    if not matmul:
        return "unknown: nothing was measured"
    full = matmul["float32"].flops_per_second
    gain = matmul["bfloat16"].flops_per_second / full
    told = f"products in bfloat16 are {gain:.1f} times as fast as in float32"
    if gain < _WORTH_NARROWING or platform == "cpu":
        return f"32.32 ({told}{'; other operations are slower' * (platform == 'cpu')})"
    return f"--precision 16.32 --half-type bfloat16 ({told})"


def _devices(found: Found) -> dict[str, str]:
    by_kind: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for device in found.devices:
        by_kind.setdefault((device["kind"], device["platform"]), []).append(device)
    rows = {}
    for (kind, platform), some in by_kind.items():
        numbers = _range([device["number"] for device in some])
        memory = some[0]["memory_bytes"]
        room = f", {format_bytes(memory)} each" if memory and platform != "cpu" else ""
        rows[f"device {numbers}"] = f"{kind} ({platform}){room}"
    memory = found.devices[0]["memory_bytes"]
    if memory and found.devices[0]["platform"] == "cpu":
        rows["memory"] = format_bytes(memory)
    return rows | found.machine


def _rates(found: Found) -> dict[str, str]:
    rows = {
        f"matmul {name}": f"{_flops(rate.flops_per_second)} ({rate.size} x {rate.size})"
        for name, rate in found.matmul.items()
    }
    if found.copy is None:
        return rows
    copies = {
        "memory, read and written": found.copy.on_device,
        "copy to the device": found.copy.to_device,
        "copy from the device": found.copy.from_device,
    }
    rows |= {name: f"{rate / 1e9:,.3g} GB/s" for name, rate in copies.items() if rate}
    return rows


def _flops(rate: float) -> str:
    scale, unit = (1e12, "TFLOP/s") if rate >= 1e12 else (1e9, "GFLOP/s")
    return f"{rate / scale:,.3g} {unit}"


def _range(numbers: Sequence[int]) -> str:
    whole = list(range(numbers[0], numbers[-1] + 1))
    if len(numbers) > 2 and numbers == whole:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _memory(device: Any) -> int:
    """Return what a device has; a CPU's is the machine's."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _plain(found: Found) -> dict[str, Any]:
    return {
        "devices": found.devices,
        "machine": found.machine,
        "matmul": {n: dataclasses.asdict(rate) for n, rate in found.matmul.items()},
        "copy": dataclasses.asdict(found.copy) if found.copy else None,
    }
