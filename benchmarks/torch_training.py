"""PyTorch's side of the comparisons, in a process of its own.

That keeps the two frameworks' libraries, memory and threads apart, and PyTorch may be
installed elsewhere (``--torch-python``). The process trains on one batch that lies on its
device; it is asked for some updates of a variant and answers with the seconds they took.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_LEARNING_RATE, _MOMENTUM = 0.01, 0.9
_WARM_UP = 3


def add_torch_python(options: argparse.ArgumentParser) -> None:
    """Add the option that says which Python has PyTorch."""
    options.add_argument(
        "--torch-python",
        default=sys.executable,
        help="a Python that has PyTorch (default: the one that runs this)",
    )


class TorchTraining:
    """A running PyTorch process.

    Args:
        python: Which Python to run.
        settings: model, batch, size, classes, device (cpu or cuda), bfloat16, and the
            variants: names to ``{"compile": mode or None, "channels_last": bool}``.
        script: What the process runs, if not this file: something that calls ``serve``.

    Without PyTorch, `variants` is empty and `facts` says why.
    """

    def __init__(
        self, python: str, settings: dict[str, Any], script: str = __file__
    ) -> None:
        self._process = subprocess.Popen(
            [python, script, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first = self._answer()
        self.variants: list[str] = first["variants"]
        self.facts: str = first["facts"]

    def seconds(self, variant: str, updates: int) -> float:
        """Make updates and return the seconds they took, all of them together."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([variant, updates]) + "\n")
        self._process.stdin.flush()
        return self._answer()["seconds"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries may print, too
                return json.loads(line)
        raise RuntimeError(f"PyTorch's process ended with {self._process.wait()}.")

    def __enter__(self) -> "TorchTraining":
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # what the process ends at
        self._process.wait(30)


# ------------------------------------------------------------------ in PyTorch's process


def trainer(settings: dict[str, Any], variant: dict[str, Any]) -> Callable[[int], float]:
    """Make a model and return what trains it: updates in, seconds out."""
    import torch

    device, batch, size = settings["device"], settings["batch"], settings["size"]
    kind = torch.bfloat16 if settings["bfloat16"] else torch.float32
    layout = torch.channels_last if variant["channels_last"] else torch.contiguous_format
    torch.manual_seed(0)
    model: Any = build(settings["model"], settings["classes"])
    model = model.to(device, memory_format=layout).train()
    optimizer = torch.optim.SGD(
        model.parameters(), _LEARNING_RATE, momentum=_MOMENTUM, fused=device == "cuda"
    )
    if variant["compile"]:
        model = torch.compile(model, mode=variant["compile"])
    images = torch.randn(batch, 3, size, size, device=device, dtype=kind)
    images = images.to(memory_format=layout)
    labels = torch.randint(settings["classes"], (batch,), device=device)

    def run(updates: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(updates):
            with torch.autocast(device, torch.bfloat16, enabled=settings["bfloat16"]):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return time.perf_counter() - started

    run(_WARM_UP)
    return run


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def build(name: str, classes: int) -> Any:
    """Return a model: ``cifar_resnet20``, or one of torchvision's."""
    if name == "cifar_resnet20":
        return _cifar_resnet(3, classes)
    import torchvision

    return getattr(torchvision.models, name)(num_classes=classes)


def _cifar_resnet(num_blocks: int, classes: int) -> Any:
    """He et al.'s network for CIFAR, as in millrace: shortcuts without parameters."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self, before: int, width: int) -> None:
            super().__init__()
            self.stride = width // before if before != width else 1
            self.added = width - before
            self.conv1 = nn.Conv2d(before, width, 3, self.stride, 1, bias=False)
            self.norm1 = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.norm2 = nn.BatchNorm2d(width)

        def forward(self, x: Any) -> Any:
            y = nn.functional.relu(self.norm1(self.conv1(x)), inplace=True)
            y = self.norm2(self.conv2(y))
            if self.added:
                thinned = x[:, :, :: self.stride, :: self.stride]
                x = nn.functional.pad(thinned, (0, 0, 0, 0, 0, self.added))
            return nn.functional.relu(y + x, inplace=True)

    layers: list[Any] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)]
    layers.append(nn.ReLU(inplace=True))
    before = 16
    for width in (16, 32, 64):
        for _ in range(num_blocks):
            layers.append(Block(before, width))
            before = width
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*layers, *pool)


def serve(
    settings: dict[str, Any],
    trainer: Callable[[dict[str, Any], dict[str, Any]], Callable[[int], float]] = trainer,
) -> None:
    """Answer requests until there are no more.

    Args:
        settings: Those of ``TorchTraining``.
        trainer: ``(settings, variant) -> train``, which takes updates and returns seconds.
    """
    try:
        import torch

        device = torch.cuda.get_device_name() if settings["device"] == "cuda" else "CPU"
        facts = f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, {device}"
    except (ImportError, RuntimeError, AssertionError) as error:
        facts, settings = f"no PyTorch to compare with: {error}", {"variants": {}}
    else:
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    trainers = {}
    for name, variant in settings["variants"].items():
        try:
            trainers[name] = trainer(settings, variant)
        except Exception as error:  # the others can still be compared with
            facts += f"; {name} failed: {type(error).__name__}: {str(error)[:200]}"
    print(json.dumps({"variants": list(trainers), "facts": facts}), flush=True)
    for line in sys.stdin:
        name, updates = json.loads(line)
        print(json.dumps({"seconds": trainers[name](updates)}), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
