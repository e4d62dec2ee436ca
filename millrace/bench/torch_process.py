"""PyTorch's side: the same work, in a process of its own that has nothing of ours.

That keeps the frameworks' memory and threads apart, and PyTorch may be installed in
another Python. The process is asked, a line of JSON at a time, to prepare an entry, and
later to measure it; entries of several processes are prepared at the same time, but only
one is measured at any time.
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

_LEARNING_RATE = 0.01
_WARM_UP = 5
_MIN_CALLS = 5
"""Fewer are no value."""
_TRIES, _AGREEMENT = 20, 0.03


class Training:
    """A model that is trained on one batch, which lies on the device."""

    def __init__(self, settings: dict[str, Any], compiled: bool) -> None:
        import torch

        self._settings, self._device = settings, settings["device"]
        model: Any = build(settings["model"], settings["classes"])
        model = model.to(self._device, memory_format=torch.channels_last).train()
        self._optimizer = torch.optim.SGD(
            model.parameters(),
            _LEARNING_RATE,
            momentum=settings["momentum"],
            weight_decay=settings["weight_decay"],
            fused=self._device == "cuda",
        )
        self._model = torch.compile(model, dynamic=False) if compiled else model
        self._images, self._labels = batch_of(settings)

    def call(self) -> None:
        """Make one update."""
        import torch

        half = self._settings["compute"] != "float32"
        kind = getattr(torch, self._settings["compute"]) if half else torch.bfloat16
        with torch.autocast(self._device, kind, enabled=half):
            loss = torch.nn.functional.cross_entropy(
                self._model(self._images),
                self._labels,
                label_smoothing=self._settings["label_smoothing"],
            )
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def ready(self) -> None:
        """Do what must be done with the device for oneself."""


class Inference:
    """A model without gradients, batch norm folded; on a GPU captured in a CUDA graph."""

    def __init__(self, settings: dict[str, Any], compiled: bool) -> None:
        import torch
        from torch.fx.experimental.optimization import fuse

        self._device = settings["device"]
        kind = getattr(torch, settings["compute"])
        model: Any = fuse(build(settings["model"], settings["classes"]).eval())
        model = model.to(self._device, kind, memory_format=torch.channels_last)
        self._model = torch.compile(model, dynamic=False) if compiled else model
        self._images, _ = batch_of(settings)
        self._replay: Callable[[], Any] | None = None

    def call(self) -> None:
        """Answer one batch."""
        import torch

        if self._replay is not None:
            self._replay()
            return
        with torch.no_grad():
            self._model(self._images)

    def ready(self) -> None:
        """Capture the work, now that the fastest algorithms can be found."""
        import torch

        if self._device != "cuda" or self._replay is not None:
            return
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(_WARM_UP):
                self._model(self._images)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            self._output = self._model(self._images)
        self._replay = graph.replay


def batch_of(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return pictures in the order of memory that convolutions want, and labels."""
    import torch

    device, batch, size = settings["device"], settings["batch"], settings["size"]
    kind = getattr(torch, settings["compute"])
    images = torch.randn(batch, 3, size, size, device=device).to(kind)
    labels = torch.randint(settings["classes"], (batch,), device=device)
    return images.to(memory_format=torch.channels_last), labels


def build(name: str, classes: int) -> Any:
    """Return one of torchvision's models, or what it can make."""
    from torchvision import models

    if name == "resnext101_32x4d":
        block = models.resnet.Bottleneck
        return models.ResNet(
            block, [3, 4, 23, 3], num_classes=classes, groups=32, width_per_group=4
        )
    return getattr(models, name)(num_classes=classes)


def prepare(settings: dict[str, Any], compiled: bool) -> Any:
    """Make the work and compile it, without looking for the fastest algorithms yet."""
    import torch
    from torch_autoencoder import AutoencoderTraining  # beside this file

    torch.backends.cudnn.benchmark = False  # others use the device now
    torch.manual_seed(0)
    kinds = {
        "training": Training,
        "inference": Inference,
        "autoencoder": AutoencoderTraining,
    }
    work = kinds[settings["kind"]](settings, compiled)
    for _ in range(2):
        work.call()
    synchronize(settings["device"])
    _free(settings["device"])
    return work


def measure(work: Any, settings: dict[str, Any], repeat: int, seconds: float) -> Any:
    """Return samples per second, and of inference the latencies."""
    import torch
    from latency import latency_calls, supported  # beside this file

    device = settings["device"]
    torch.backends.cudnn.benchmark = True
    for _ in range(_WARM_UP):
        work.call()
    work.ready()
    values = values_of(functools.partial(_time, work.call, device), repeat, seconds)
    found: dict[str, Any] = {
        "samples_per_second": [settings["batch"] / value for value in values]
    }
    if settings["kind"] == "inference":
        number = latency_calls(statistics.median(values), seconds)
        timed = [_time(work.call, device, 1) for _ in range(number)]
        found |= {"latency_ms": supported(_figures(timed), number), "latency_calls": number}
    if device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    _free(device)
    return found


def values_of(timed: Callable[[int], float], repeat: int, seconds: float) -> list[float]:
    """Return the seconds of a call, `repeat` times, after a warm-up."""
    once = warm_up(timed, seconds)
    calls = max(_MIN_CALLS, int(seconds / repeat / once))
    return [timed(calls) / calls for _ in range(repeat)]


def warm_up(timed: Callable[[int], float], seconds: float) -> float:
    """Call until two values in a row agree, or it has taken long enough.

    Args:
        timed: Makes so many calls and returns the seconds that they took.
        seconds: What is long enough.

    Returns:
        The seconds of a call.
    """
    taken = timed(_MIN_CALLS)
    value = taken / _MIN_CALLS
    for _ in range(_TRIES):
        calls = max(_MIN_CALLS, int(seconds / _TRIES / value))
        before, now = value, timed(calls)
        taken, value = taken + now, now / calls
        if abs(value / before - 1) <= _AGREEMENT or taken >= seconds:
            break
    return value


def _time(call: Callable[[], None], device: str, count: int) -> float:
    synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return time.perf_counter() - started


def _figures(seconds: list[float]) -> dict[str, float]:
    import torch

    values = 1e3 * torch.tensor(seconds, dtype=torch.float64)
    quantiles = torch.tensor([0.5, 0.99, 0.999], dtype=torch.float64)
    at = torch.quantile(values, quantiles).tolist()
    return {"mean": values.mean().item()} | dict(
        zip(("p50", "p99", "p99.9"), at, strict=True)
    )


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _free(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()


def facts(device: str) -> dict[str, str]:
    """Say what PyTorch this is; an error if there is none, or none for the device."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    torch.set_float32_matmul_precision("high")
    versions: dict[str, str] = {"torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torchvision"] = importlib.metadata.version("torchvision")
    return {**versions, "device": name, "threads": str(torch.get_num_threads())}


def serve() -> None:
    """Answer requests until there are no more."""
    works: dict[tuple[str, bool], Any] = {}
    kept: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = _answer(request, works, kept)
        except Exception as error:  # the next request may succeed
            answer = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        print("\n" + json.dumps(answer), flush=True)


def _answer(request: dict[str, Any], works: Any, kept: Any) -> dict[str, Any]:
    if request["do"] == "facts":
        return facts(request["device"])
    name, compiled = request["name"], request["compiled"]
    if request["do"] == "prepare":
        kept[name] = request["settings"]
        started = time.perf_counter()
        works[name, compiled] = prepare(kept[name], compiled)
        return {"prepare_seconds": time.perf_counter() - started}
    work = works.pop((name, compiled))  # its memory is needed afterwards
    return measure(work, kept[name], request["repeat"], request["seconds"])


if __name__ == "__main__":
    serve()
