"""PyTorch's side of the autoencoder's comparison, in a process of its own.

The same network, loss (joint re-feeding) and optimizer as a PyTorch user would write them,
on one dense batch that lies on the device.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from torch_training import TorchTraining, synchronize

_WIDTHS = {128: (128, 256, 256), 256: (256, 256, 512), 512: (512, 512, 1024)}
_DROPOUT = {128: 0.65, 256: 0.8, 512: 0.8}
_MOMENTUM, _WEIGHT_DECAY, _LEARNING_RATE = 0.9, 1e-4, 1e-4
_WARM_UP = 3


class TorchAutoencoder(TorchTraining):
    """A running PyTorch process that trains autoencoders.

    Args:
        python: Which Python to run.
        settings: num_items, rated (ratings per user), device (cpu or cuda), bfloat16, and
            the variants: names to ``{"size", "batch", "compile": mode or None}``.
    """

    def __init__(self, python: str, settings: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [python, __file__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first = self._answer()
        self.variants = first["variants"]
        self.facts = first["facts"]


# ------------------------------------------------------------------ in PyTorch's process


def trainer(settings: dict[str, Any], variant: dict[str, Any]) -> Callable[[int], float]:
    """Make a model and return what trains it: updates in, seconds out."""
    import torch

    device = settings["device"]
    torch.manual_seed(0)
    model = build(settings["num_items"], variant["size"]).to(device).train()
    optimizer = torch.optim.SGD(
        model.parameters(),
        _LEARNING_RATE,
        momentum=_MOMENTUM,
        weight_decay=_WEIGHT_DECAY,
        fused=device == "cuda",
    )
    rows = batch_of(variant["batch"], settings["num_items"], settings["rated"]).to(device)

    def loss_of(rows: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=settings["bfloat16"]):
            output = model(rows)
            again = model(output)
        output, again = output.float(), again.float()
        known = rows != 0
        error = torch.where(known, output - rows, 0.0)
        return error.square().sum() / known.sum() + (again - output).square().mean()

    if variant["compile"]:
        loss_of = torch.compile(loss_of, mode=variant["compile"])

    def run(updates: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(updates):
            loss_of(rows).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return time.perf_counter() - started

    run(_WARM_UP)
    return run


def build(num_items: int, size: int) -> Any:
    """Return the network: tied weights, biases, SELU throughout, dropout on the code."""
    import torch
    from torch import nn
    from torch.nn import functional

    widths = (num_items, *_WIDTHS[size])

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = [(after, before) for before, after in zip(widths, widths[1:])]  # noqa: B905, RUF007
            self.kernels = nn.ParameterList(
                nn.init.xavier_uniform_(torch.empty(shape)) for shape in shapes
            )
            self.encoder = nn.ParameterList(torch.zeros(shape[0]) for shape in shapes)
            self.decoder = nn.ParameterList(torch.zeros(s[1]) for s in reversed(shapes))

        def forward(self, x: Any) -> Any:
            for kernel, bias in zip(self.kernels, self.encoder, strict=True):
                x = functional.selu(functional.linear(x, kernel, bias))
            x = functional.dropout(x, _DROPOUT[size], self.training)
            backwards = reversed(list(self.kernels))
            for kernel, bias in zip(backwards, self.decoder, strict=True):
                x = functional.selu(functional.linear(x, kernel.t(), bias))
            return x

    return Autoencoder()


def batch_of(batch: int, num_items: int, rated: int) -> Any:
    """Return dense rows in which each user has rated some items."""
    import torch

    rows = torch.zeros(batch, num_items)
    for row in rows:
        row[torch.randperm(num_items)[:rated]] = torch.randint(1, 6, (rated,)).float()
    return rows


def serve(settings: dict[str, Any]) -> None:
    """Answer requests until there are no more."""
    try:
        import torch

        device = torch.cuda.get_device_name() if settings["device"] == "cuda" else "CPU"
        facts = f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, {device}"
    except (ImportError, RuntimeError, AssertionError) as error:
        facts, settings = f"no PyTorch to compare with: {error}", {"variants": {}}
    else:
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
