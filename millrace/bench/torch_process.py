"""The PyTorch side of a comparison: a process that prepares and measures on request.

Its own process keeps the memory and threads of the frameworks apart, and PyTorch may be
installed in another Python, so this file imports nothing of millrace but its neighbors,
by path. Requests and answers are lines of JSON. Several processes may prepare at the same
time; only one measures.
"""

# pyright: reportMissingImports=false

import contextlib
import functools
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

_WARM_UP_CALLS = 5
_MIN_CALLS = 5
"""Calls per value, at least: fewer are too noisy."""
_MAX_WARM_UPS = 20
_AGREEMENT = 0.03
"""Relative difference of two warm-up values below which PyTorch counts as warm."""


def prepare(settings: dict[str, Any], compiled: bool) -> Any:
    """Build and compile a model; cuDNN does not time its algorithms yet."""
    import torch
    from torch_models import AutoencoderTraining, CnnInference, CnnTraining, VcdTraining

    torch.backends.cudnn.benchmark = False  # other processes use the device now
    torch.manual_seed(0)
    kinds = {
        "training": CnnTraining,
        "inference": CnnInference,
        "autoencoder": AutoencoderTraining,
        "vcd": VcdTraining,
    }
    work = kinds[settings["kind"]](settings, compiled)
    for _ in range(2):
        work.call()
    _synchronize(settings["device"])
    _free_memory(settings["device"])
    return work


def measure(work: Any, settings: dict[str, Any], repeat: int, seconds: float) -> Any:
    """Return samples per second and, for inference, latencies."""
    import torch
    from measuring import count_latency_calls, drop_unsupported

    device, is_inference = settings["device"], settings["kind"] == "inference"
    torch.backends.cudnn.benchmark = True
    for _ in range(_WARM_UP_CALLS):
        work.call()
    if hasattr(work, "capture"):
        work.capture()
    values = measure_calls(functools.partial(_time, work.call, device), repeat, seconds)
    figures: dict[str, Any] = {
        "samples_per_second": [settings["batch"] / value for value in values]
    }
    if is_inference:
        calls = count_latency_calls(statistics.median(values), seconds)
        latency = _latency_figures([_time(work.call, device, 1) for _ in range(calls)])
        figures["latency_ms"] = drop_unsupported(latency, calls)
        figures["latency_calls"] = calls
    if device == "cuda":
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    _free_memory(device)
    return figures


def measure_calls(
    timed: Callable[[int], float], repeat: int, seconds: float
) -> list[float]:
    """Return the seconds per call, measured `repeat` times after a warm-up."""
    once = warm_up(timed, seconds)
    calls = max(_MIN_CALLS, int(seconds / repeat / once))
    return [timed(calls) / calls for _ in range(repeat)]


def warm_up(timed: Callable[[int], float], seconds: float) -> float:
    """Call until two values in a row agree or the time is up; return seconds per call.

    Args:
        timed: Makes a number of calls and returns the seconds they took.
        seconds: Time limit of the warm-up.
    """
    elapsed = timed(_MIN_CALLS)
    value = elapsed / _MIN_CALLS
    for _ in range(_MAX_WARM_UPS):
        calls = max(_MIN_CALLS, int(seconds / _MAX_WARM_UPS / value))
        before, taken = value, timed(calls)
        elapsed, value = elapsed + taken, taken / calls
        if abs(value / before - 1) <= _AGREEMENT or elapsed >= seconds:
            break
    return value


def _time(call: Callable[[], None], device: str, count: int) -> float:
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    _synchronize(device)
    return time.perf_counter() - started


def _latency_figures(seconds: list[float]) -> dict[str, float]:
    import torch

    values = 1e3 * torch.tensor(seconds, dtype=torch.float64)
    quantiles = torch.tensor([0.5, 0.99, 0.999], dtype=torch.float64)
    percentiles = torch.quantile(values, quantiles).tolist()
    return {"mean": values.mean().item()} | dict(
        zip(("p50", "p99", "p99.9"), percentiles, strict=True)
    )


def _synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _free_memory(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()


def collect_facts(device: str) -> dict[str, str]:
    """Return versions and the device; raise an error if PyTorch cannot use it."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    torch.set_float32_matmul_precision("high")
    versions: dict[str, str] = {"torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torchvision"] = importlib.metadata.version("torchvision")
    return {**versions, "device": name, "threads": str(torch.get_num_threads())}


def serve() -> None:
    """Answer requests until standard input ends."""
    works: dict[tuple[str, bool], Any] = {}
    settings: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line), works, settings)
        except Exception as error:  # the next request may succeed
            answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        # A library may have printed half a line.
        print("\n" + json.dumps(answer), flush=True)


def _answer(request: dict[str, Any], works: Any, settings: Any) -> dict[str, Any]:
    if request["do"] == "facts":
        return collect_facts(request["device"])
    name, compiled = request["name"], request["compiled"]
    if request["do"] == "prepare":
        settings[name] = request["settings"]
        started = time.perf_counter()
        works[name, compiled] = prepare(settings[name], compiled)
        return {"prepare_seconds": time.perf_counter() - started}
    work = works.pop((name, compiled))  # free its memory afterwards
    return measure(work, settings[name], request["repeat"], request["seconds"])


if __name__ == "__main__":
    serve()
