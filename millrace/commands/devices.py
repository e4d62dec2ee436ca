"""``millrace devices``: the devices of this machine, their speed, and suggested options.

JAX is imported by the functions that need it, so that reading a command stays fast.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from millrace.numbers import format_bytes
from millrace.run.process import use_virtual_devices

if TYPE_CHECKING:
    from millrace.program.roofline import CopyRates, MatmulRate

_DTYPES = ("float32", "bfloat16", "float16")
_MIN_GAIN = 1.3
"""Speedup of matrix products from which 16-bit numbers are worth their lost precision."""
_IMAGE_BYTES = 4 * 224 * 224 * 3
"""Size of an ImageNet sample in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesConfig:
    """Show the devices of this machine, how fast they are, and options that suit them."""

    measure: bool = True
    """Measure matrix products and copies. This takes a few seconds."""
    json: bool = False
    """Print JSON."""
    virtual_devices: int | None = None
    """Split the CPU into this many devices, as for training."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        if self.virtual_devices is not None and self.virtual_devices < 1:
            raise ValueError(
                f"virtual_devices must be at least 1, got {self.virtual_devices}."
            )


class DeviceReport(NamedTuple):
    """The devices of this machine, and measurements of the first one."""

    devices: list[dict[str, Any]]
    machine: dict[str, str]
    matmul: dict[str, "MatmulRate"]
    copy: "CopyRates | None"


def show_devices(config: DevicesConfig) -> None:
    """Print the devices and the suggested options."""
    if config.virtual_devices is not None:
        use_virtual_devices(config.virtual_devices)
    report = inspect_devices(measure=config.measure)
    suggested = suggest_options(report)
    if config.json:
        print(json.dumps(_as_plain(report) | {"suggested": suggested}, indent=2))
        return
    rows = {**_format_devices(report), **_format_rates(report)}
    rows |= {f"suggested {name}": text for name, text in suggested.items()}
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:<{width}}  {text}")


def inspect_devices(*, measure: bool = True) -> DeviceReport:
    """Find the devices, and measure the first one if `measure` is set."""
    import jax

    from millrace.program.roofline import measure_copy, measure_matmul
    from millrace.run.provenance import describe_machine

    devices = [
        {
            "number": number,
            "platform": device.platform,
            "kind": device.device_kind,
            "process": device.process_index,
            "memory_bytes": _get_memory_bytes(device),
        }
        for number, device in enumerate(jax.devices())
    ]
    first = jax.local_devices()[0]
    matmul = {d: measure_matmul(first, dtype=d) for d in _DTYPES} if measure else {}
    return DeviceReport(
        devices, describe_machine(), matmul, measure_copy(first) if measure else None
    )


def suggest_options(report: DeviceReport) -> dict[str, str]:
    """Return options of ``train`` that suit these devices, with reasons."""
    first = report.devices[0]
    suggested = {"precision": _suggest_precision(report.matmul, first["platform"])}
    count = len(report.devices)
    if first["platform"] == "cpu":
        suggested["plan"] = (
            "one replica, which uses all cores (--virtual-devices N only emulates a plan "
            "for N devices)"
        )
    elif count > 1:
        suggested["plan"] = (
            f"--num-replicas {count}, one per device; --pipeline-splits if the model does "
            "not fit on one device"
        )
    else:
        suggested["plan"] = (
            "one replica; --gradient-accumulation-count for larger batches, "
            "--optimizer-state-offloading or --recomputation if memory is short"
        )
    if report.copy is not None and report.copy.to_device:
        rate = report.copy.to_device / _IMAGE_BYTES
        suggested["transfer"] = (
            f"--eight-bit-transfer for more than about {rate:,.0f} images of 224 x 224 per "
            "second, which is the limit for float32"
        )
    return suggested


def _suggest_precision(matmul: Mapping[str, "MatmulRate"], platform: str) -> str:
    if not matmul:
        return "unknown (not measured)"
    gain = matmul["bfloat16"].flops_per_second / matmul["float32"].flops_per_second
    reason = f"matrix products are {gain:.1f} times as fast in bfloat16 as in float32"
    if platform == "cpu":
        return f"32.32 ({reason}, but other operations are slower)"
    if gain < _MIN_GAIN:
        return f"32.32 ({reason})"
    return f"--precision 16.32 --half-type bfloat16 ({reason})"


def _format_devices(report: DeviceReport) -> dict[str, str]:
    by_kind: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for device in report.devices:
        by_kind.setdefault((device["kind"], device["platform"]), []).append(device)
    rows = {}
    for (kind, platform), devices in by_kind.items():
        numbers = _format_range([device["number"] for device in devices])
        memory = devices[0]["memory_bytes"]
        size = f", {format_bytes(memory)} each" if memory and platform != "cpu" else ""
        rows[f"device {numbers}"] = f"{kind} ({platform}){size}"
    memory = report.devices[0]["memory_bytes"]
    if memory and report.devices[0]["platform"] == "cpu":
        rows["memory"] = format_bytes(memory)
    return rows | report.machine


def _format_rates(report: DeviceReport) -> dict[str, str]:
    rows = {
        f"matmul {dtype}": f"{_format_flops(r.flops_per_second)} ({r.size} x {r.size})"
        for dtype, r in report.matmul.items()
    }
    if report.copy is None:
        return rows
    copies = {
        "memory, read and write": report.copy.on_device,
        "copy to the device": report.copy.to_device,
        "copy from the device": report.copy.from_device,
    }
    rows |= {name: f"{rate / 1e9:,.3g} GB/s" for name, rate in copies.items() if rate}
    return rows


def _format_flops(rate: float) -> str:
    scale, unit = (1e12, "TFLOP/s") if rate >= 1e12 else (1e9, "GFLOP/s")
    return f"{rate / scale:,.3g} {unit}"


def _format_range(numbers: Sequence[int]) -> str:
    all_between = list(range(numbers[0], numbers[-1] + 1))
    if len(numbers) > 2 and numbers == all_between:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _get_memory_bytes(device: Any) -> int:
    """Return the memory of a device; for a CPU, that of the machine."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _as_plain(report: DeviceReport) -> dict[str, Any]:
    return {
        "devices": report.devices,
        "machine": report.machine,
        "matmul": {n: dataclasses.asdict(rate) for n, rate in report.matmul.items()},
        "copy": dataclasses.asdict(report.copy) if report.copy else None,
    }
