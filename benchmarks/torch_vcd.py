"""PyTorch's side of ``vcd_speed.py``: the same iteration, written as one would there."""

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from torch_training import serve, synchronize

_DECAY, _FIRST_SQUARE = 0.9, 0.01
_WARM_UP = 2
_CONTROL_VARIATE_DECAY = 0.9


def trainer(settings: dict[str, Any], variant: dict[str, Any]) -> Callable[[int], float]:
    """Make a model and return what trains it: updates in, seconds out.

    Args:
        settings: batch, pixels, hidden, z_dim, steps, leapfrogs, samples, device.
        variant: gradient (autograd or written) and compile (a mode, or None).
    """
    import torch

    torch.manual_seed(0)
    iteration = _iteration(settings, variant)

    def run(updates: int) -> float:
        synchronize(settings["device"])
        started = time.perf_counter()
        for _ in range(updates):
            iteration()
        synchronize(settings["device"])
        return time.perf_counter() - started

    run(_WARM_UP)
    return run


def _iteration(settings: dict[str, Any], variant: dict[str, Any]) -> Callable[[], None]:
    import torch

    device, batch = settings["device"], settings["batch"]
    pixels, hidden, z_dim = settings["pixels"], settings["hidden"], settings["z_dim"]
    mean_net, std_net = (_mlp(pixels, hidden, z_dim, device) for _ in range(2))
    decoder = _mlp(z_dim, hidden, pixels, device)
    nets = (mean_net, std_net, decoder)
    parameters = [p for net in nets for layer in net for p in layer]
    rates = [5e-4] * 6 + [2.5e-4] * 6 + [5e-4] * 6
    squares = [torch.full_like(p, _FIRST_SQUARE) for p in parameters]
    pictures = torch.randint(2, (settings["samples"], pixels), device=device).float()
    local = torch.zeros(settings["samples"], device=device)
    step_size = torch.tensor(0.05, device=device)
    gradient = _written if variant["gradient"] == "written" else _autograd

    def trajectory(z: Any, r: Any, slope: Any, step_size: Any, x: Any) -> Any:
        log_density = None
        r = r + 0.5 * step_size * slope
        for number in range(settings["leapfrogs"]):
            z = z + step_size * r
            log_density, slope = gradient(decoder, x, z)
            last = number == settings["leapfrogs"] - 1
            r = r + (0.5 if last else 1.0) * step_size * slope
        return z, r, log_density, slope

    if variant["compile"]:
        trajectory = torch.compile(trajectory, mode=variant["compile"])

    def iteration() -> None:
        index = torch.randperm(settings["samples"], device=device)[:batch]
        x = pictures[index]
        mean = _apply(mean_net, x)
        std = torch.logaddexp(_apply(std_net, x), torch.tensor(1e-4, device=device))
        noise = torch.randn_like(mean)
        z = mean + std * noise
        position = z.detach()
        log_density, slope = gradient(decoder, x, position)
        first_slope = slope
        for _ in range(settings["steps"]):
            r = torch.randn_like(position)
            new, new_r, new_density, new_slope = trajectory(
                position, r, slope, step_size, x
            )
            energy = 0.5 * (r.square() - new_r.square()).sum(-1)
            log_u = torch.rand(batch, device=device).log()
            accepted = log_u < new_density - log_density + energy
            position = torch.where(accepted[:, None], new, position).clone()
            slope = torch.where(accepted[:, None], new_slope, slope).clone()
            log_density = torch.where(accepted, new_density, log_density).clone()
            share = accepted.float().mean()
            step_size.mul_(1 + 0.01 * (share - 0.9) / 0.9)
        distance = 0.5 * ((position - mean) / std).square().sum(-1)
        g = (log_density + distance).detach()
        score = -0.5 * ((z.detach() - mean) / std).square().sum(-1) - std.log().sum(-1)
        loss = -(first_slope * z).sum(-1) + distance + (g - local[index]) * score
        likelihood = _log_likelihood(_apply(decoder, position), x)
        slopes = torch.autograd.grad((loss - likelihood).sum(), parameters)
        local[index] += (1 - _CONTROL_VARIATE_DECAY) * (g - local[index])
        with torch.no_grad():
            for p, s, square, rate in zip(parameters, slopes, squares, rates, strict=True):
                square.mul_(_DECAY).addcmul_(s, s, value=1 - _DECAY)
                p.addcdiv_(s, square.sqrt().add_(1.0), value=-rate)

    return iteration


def _mlp(num_in: int, hidden: int, num_out: int, device: str) -> list[tuple[Any, Any]]:
    import torch

    layers = []
    sizes = (num_in, hidden, hidden, num_out)
    for place in range(3):
        std = 1.0 if place == 2 else sizes[place + 1] ** -0.5
        made = [
            (std * torch.randn(shape, device=device)).requires_grad_()
            for shape in ((sizes[place], sizes[place + 1]), (sizes[place + 1],))
        ]
        layers.append(tuple(made))
    return layers


def _apply(layers: Any, x: Any) -> Any:
    import torch

    for kernel, bias in layers[:-1]:
        x = torch.relu(torch.addmm(bias, x, kernel))
    kernel, bias = layers[-1]
    return torch.addmm(bias, x, kernel)


def _log_likelihood(logits: Any, x: Any) -> Any:
    import torch

    return -torch.nn.functional.softplus((1 - 2 * x) * logits).sum(-1)


def _log_prior(z: Any) -> Any:
    return -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)


def _autograd(decoder: Any, x: Any, z: Any) -> Any:
    """Log density and gradient as one writes them in PyTorch."""
    import torch

    with torch.enable_grad():
        z = z.detach().requires_grad_()
        log_density = _log_likelihood(_apply(decoder, z), x) + _log_prior(z)
        (slope,) = torch.autograd.grad(log_density.sum(), z)
    return log_density.detach(), slope


def _written(decoder: Any, x: Any, z: Any) -> Any:
    """The same with the gradient written out, as millrace has it."""
    import torch

    with torch.no_grad():
        (w1, b1), (w2, b2), (w3, b3) = decoder
        h1 = torch.relu(torch.addmm(b1, z, w1))
        h2 = torch.relu(torch.addmm(b2, h1, w2))
        logits = torch.addmm(b3, h2, w3)
        slope = (x - torch.sigmoid(logits)) @ w3.T * (h2 > 0)
        slope = (slope @ w2.T * (h1 > 0)) @ w1.T - z
        return _log_likelihood(logits, x) + _log_prior(z), slope


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), trainer)
