"""The applications in PyTorch, as a PyTorch user would write them: for ``torch_process``.

Each class trains or runs a model on one batch, which stays on the device. This file is
loaded by path in a Python that need not have millrace, so it imports nothing of it.
"""

# pyright: reportMissingImports=false

import math
from collections.abc import Callable
from typing import Any

_CAPTURE_WARM_UP = 5
"""Calls before a CUDA graph is captured, so that cuDNN has chosen its algorithms."""


class CnnTraining:
    """A torchvision model that trains with SGD."""

    def __init__(self, settings: dict[str, Any], compiled: bool) -> None:
        import torch

        self._settings = settings
        model = build_cnn(settings["model"], settings["classes"])
        model = model.to(settings["device"], memory_format=torch.channels_last).train()
        self._optimizer = _build_sgd(model, 0.01, settings)
        self._model = torch.compile(model, dynamic=False) if compiled else model
        self._images, self._labels = _random_images(settings)

    def call(self) -> None:
        """Make one update."""
        import torch

        with _autocast(self._settings):
            loss = torch.nn.functional.cross_entropy(
                self._model(self._images),
                self._labels,
                label_smoothing=self._settings["label_smoothing"],
            )
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class CnnInference:
    """A torchvision model with folded batch norm; on a GPU, captured in a CUDA graph."""

    def __init__(self, settings: dict[str, Any], compiled: bool) -> None:
        import torch
        from torch.fx.experimental.optimization import fuse

        self._device = settings["device"]
        dtype = getattr(torch, settings["compute"])
        model: Any = fuse(build_cnn(settings["model"], settings["classes"]).eval())
        model = model.to(self._device, dtype, memory_format=torch.channels_last)
        self._model = torch.compile(model, dynamic=False) if compiled else model
        self._images, _ = _random_images(settings)
        self._replay: Callable[[], Any] | None = None

    def call(self) -> None:
        """Predict one batch."""
        import torch

        if self._replay is not None:
            self._replay()
            return
        with torch.no_grad():
            self._model(self._images)

    def capture(self) -> None:
        """Capture the CUDA graph; the device must be idle, so that timings are right."""
        import torch

        def predict() -> Any:
            with torch.no_grad():
                return self._model(self._images)

        if self._device == "cuda" and self._replay is None:
            self._replay = _capture(predict)


def _capture(work: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that replays `work` as a CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_CAPTURE_WARM_UP):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def build_cnn(name: str, classes: int) -> Any:
    """Return a torchvision model by name, or a residual network for CIFAR."""
    if name.startswith("cifar_resnet"):
        return _build_cifar_resnet(int(name.removeprefix("cifar_resnet")), classes)
    from torchvision import models

    if name == "resnext101_32x4d":  # torchvision has its blocks, but not this size
        block = models.resnet.Bottleneck
        return models.ResNet(
            block, [3, 4, 23, 3], num_classes=classes, groups=32, width_per_group=4
        )
    return getattr(models, name)(num_classes=classes)


def _build_cifar_resnet(depth: int, classes: int) -> Any:
    """Return the network of He et al. for images of 32 x 32; torchvision has none."""
    import torch
    from torch import nn
    from torch.nn import functional

    def conv(channels: int, features: int, stride: int = 1) -> Any:
        return nn.Conv2d(channels, features, 3, stride, 1, bias=False)

    class Block(nn.Module):
        def __init__(self, channels: int, features: int) -> None:
            super().__init__()
            self.stride = features // channels
            self.conv1 = conv(channels, features, self.stride)
            self.bn1 = nn.BatchNorm2d(features)
            self.conv2, self.bn2 = conv(features, features), nn.BatchNorm2d(features)

        def forward(self, x: Any) -> Any:
            y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
            if self.stride > 1:  # every second pixel, and zeros as the other channels
                x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, x.shape[1]))
            return torch.relu(y + x)

    blocks, channels = [], 16
    for features in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            blocks.append(Block(channels, features))
            channels = features
    return nn.Sequential(
        conv(3, 16),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


def _random_images(settings: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    device, batch, size = settings["device"], settings["batch"], settings["size"]
    dtype = getattr(torch, settings["compute"])
    images = torch.randn(batch, 3, size, size, device=device).to(dtype)
    labels = torch.randint(settings["classes"], (batch,), device=device)
    return images.to(memory_format=torch.channels_last), labels


def _build_sgd(model: Any, learning_rate: float, settings: dict[str, Any]) -> Any:
    import torch

    return torch.optim.SGD(
        model.parameters(),
        learning_rate,
        momentum=settings["momentum"],
        weight_decay=settings["weight_decay"],
        fused=settings["device"] == "cuda",
    )


def _autocast(settings: dict[str, Any]) -> Any:
    import torch

    half = settings["compute"] != "float32"
    dtype = getattr(torch, settings["compute"]) if half else torch.bfloat16
    return torch.autocast(settings["device"], dtype, enabled=half)


class AutoencoderTraining:
    """The recommender on dense rows: tied weights, SELU, dropout of the code."""

    def __init__(self, settings: dict[str, Any], compiled: bool) -> None:
        import torch

        self._settings = settings
        self._model = _build_autoencoder(settings["widths"], settings["dropout"])
        self._model = self._model.to(settings["device"]).train()
        self._optimizer = _build_sgd(self._model, 1e-4, settings)
        self._loss_fn = torch.compile(self._loss, dynamic=False) if compiled else self._loss
        self._rows = _random_rows(settings).to(settings["device"])

    def call(self) -> None:
        """Make one update."""
        self._loss_fn(self._rows).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _loss(self, rows: Any) -> Any:
        """Return the error on known ratings and, with re-feeding, of a second pass."""
        import torch

        with _autocast(self._settings):
            output = self._model(rows)
            refed = self._model(output) if self._settings["refeeding"] == "joint" else None
        known = rows != 0
        error = torch.where(known, output.float() - rows, 0.0).square().sum() / known.sum()
        if refed is None:
            return error
        return error + (refed.float() - output.float()).square().mean()


def _build_autoencoder(widths: list[int], dropout: float) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    shapes = [(widths[n + 1], widths[n]) for n in range(len(widths) - 1)]

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kernels = [nn.init.xavier_uniform_(torch.empty(shape)) for shape in shapes]
            self.kernels = nn.ParameterList(kernels)
            self.encoder = nn.ParameterList(torch.zeros(after) for after, _ in shapes)
            self.decoder = nn.ParameterList(
                torch.zeros(before) for _, before in reversed(shapes)
            )

        def forward(self, x: Any) -> Any:
            for kernel, bias in zip(self.kernels, self.encoder, strict=True):
                x = functional.selu(functional.linear(x, kernel, bias))
            x = functional.dropout(x, dropout, self.training)
            for kernel, bias in zip(list(self.kernels)[::-1], self.decoder, strict=True):
                x = functional.selu(functional.linear(x, kernel.t(), bias))
            return x

    return Autoencoder()


def _random_rows(settings: dict[str, Any]) -> Any:
    """Return rows of users who each rated the average number of items."""
    import torch

    num_items, rated = settings["widths"][0], settings["rated"]
    rows = torch.zeros(settings["batch"], num_items)
    for row in rows:
        row[torch.randperm(num_items)[:rated]] = torch.randint(1, 6, (rated,)).float()
    return rows


class VcdTraining:
    """VCD with local control variates: HMC chains from the encoder, then one update.

    The gradient of the chains is written out, which is faster here than autograd. Only the
    trajectories are compiled: they take nearly all of the time. On a GPU, the whole update
    is captured in a CUDA graph, or it would wait for the host at each of its kernels.
    """

    def __init__(self, settings: dict[str, Any], compiled: bool) -> None:
        import torch

        self._settings, device = settings, settings["device"]
        pixels, z_dim = settings["pixels"], settings["z_dim"]
        hidden = settings["hidden"]
        self._mean_net = _init_mlp(pixels, hidden, z_dim, device)
        self._std_net = _init_mlp(pixels, hidden, z_dim, device)
        self._decoder = _init_mlp(z_dim, hidden, pixels, device)
        nets = (self._mean_net, self._std_net, self._decoder)
        self._params = [p for net in nets for layer in net for p in layer]
        self._rates = [5e-4] * 6 + [2.5e-4] * 6 + [5e-4] * 6
        self._squares = [torch.full_like(p, 0.01) for p in self._params]
        self._images = torch.randint(
            2, (settings["samples"], pixels), device=device
        ).float()
        self._control_variates = torch.zeros(settings["samples"], device=device)
        self._step_size = torch.tensor(0.05, device=device)
        self._least_std = torch.tensor(1e-4, device=device)
        self._replay: Callable[[], Any] | None = None
        self._run_trajectory = (
            torch.compile(self._trajectory) if compiled else self._trajectory
        )

    def call(self) -> None:
        """Make one update."""
        if self._replay is not None:
            self._replay()
        else:
            self._update_once()

    def capture(self) -> None:
        """Capture the CUDA graph; the device must be idle, so that timings are right."""
        if self._settings["device"] == "cuda" and self._replay is None:
            self._replay = _capture(self._update_once)

    def _update_once(self) -> None:
        import torch

        device, batch = self._settings["device"], self._settings["batch"]
        # Drawing with repetitions is the fastest, and a graph can do it.
        index = torch.randint(self._settings["samples"], (batch,), device=device)
        x = self._images[index]
        mean = _apply_mlp(self._mean_net, x)
        std = torch.logaddexp(_apply_mlp(self._std_net, x), self._least_std)
        z = mean + std * torch.randn_like(mean)
        position = z.detach()
        log_density, slope = _log_density(self._decoder, x, position)
        first_slope = slope
        for _ in range(self._settings["hmc_steps"]):
            position, log_density, slope = self._hmc_step(position, log_density, slope, x)
        distance = 0.5 * ((position - mean) / std).square().sum(-1)
        g = (log_density + distance).detach()
        score = -0.5 * ((z.detach() - mean) / std).square().sum(-1) - std.log().sum(-1)
        advantage = g - self._control_variates[index]
        loss = -(first_slope * z).sum(-1) + distance + advantage * score
        likelihood = _log_likelihood(_apply_mlp(self._decoder, position), x)
        gradients = torch.autograd.grad((loss - likelihood).sum(), self._params)
        self._control_variates[index] += 0.1 * advantage
        self._update(gradients)

    def _hmc_step(self, position: Any, log_density: Any, slope: Any, x: Any) -> Any:
        import torch

        momentum = torch.randn_like(position)
        new, new_momentum, new_density, new_slope = self._run_trajectory(
            position, momentum, slope, self._step_size, x
        )
        energy = 0.5 * (momentum.square() - new_momentum.square()).sum(-1)
        log_uniform = torch.rand(len(x), device=x.device).log()
        accepted = log_uniform < new_density - log_density + energy
        # Adapt the step size to an acceptance rate of 0.9.
        self._step_size.mul_(1 + 0.01 * (accepted.float().mean() - 0.9) / 0.9)
        return (
            torch.where(accepted[:, None], new, position).clone(),
            torch.where(accepted, new_density, log_density).clone(),
            torch.where(accepted[:, None], new_slope, slope).clone(),
        )

    def _trajectory(self, z: Any, momentum: Any, slope: Any, step_size: Any, x: Any) -> Any:
        log_density = None
        momentum = momentum + 0.5 * step_size * slope
        count = self._settings["leapfrog_steps"]
        for number in range(count):
            z = z + step_size * momentum
            log_density, slope = _log_density(self._decoder, x, z)
            momentum = momentum + (0.5 if number == count - 1 else 1.0) * step_size * slope
        return z, momentum, log_density, slope

    def _update(self, gradients: Any) -> None:
        import torch

        # torch.optim.RMSprop adds epsilon to the root, too, but starts the squares at 0.
        with torch.no_grad():
            for param, gradient, square, rate in zip(
                self._params, gradients, self._squares, self._rates, strict=True
            ):
                square.mul_(0.9).addcmul_(gradient, gradient, value=0.1)
                param.addcdiv_(gradient, square.sqrt().add_(1.0), value=-rate)


def _init_mlp(num_in: int, hidden: int, num_out: int, device: str) -> list[tuple[Any, Any]]:
    import torch

    layers = []
    for before, after, std in (
        (num_in, hidden, hidden**-0.5),
        (hidden, hidden, hidden**-0.5),
        (hidden, num_out, 1.0),
    ):
        kernel = (std * torch.randn(before, after, device=device)).requires_grad_()
        bias = (std * torch.randn(after, device=device)).requires_grad_()
        layers.append((kernel, bias))
    return layers


def _apply_mlp(layers: Any, x: Any) -> Any:
    import torch

    for kernel, bias in layers[:-1]:
        x = torch.relu(torch.addmm(bias, x, kernel))
    kernel, bias = layers[-1]
    return torch.addmm(bias, x, kernel)


def _log_likelihood(logits: Any, x: Any) -> Any:
    import torch

    return -torch.nn.functional.softplus((1 - 2 * x) * logits).sum(-1)


def _log_density(decoder: Any, x: Any, z: Any) -> Any:
    """Return the joint log density of images and codes, and its gradient in the codes."""
    import torch

    with torch.no_grad():
        (w1, b1), (w2, b2), (w3, b3) = decoder
        h1 = torch.relu(torch.addmm(b1, z, w1))
        h2 = torch.relu(torch.addmm(b2, h1, w2))
        logits = torch.addmm(b3, h2, w3)
        slope = (x - torch.sigmoid(logits)) @ w3.T * (h2 > 0)
        slope = (slope @ w2.T * (h1 > 0)) @ w1.T - z
        log_prior = -0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)
        return _log_likelihood(logits, x) + log_prior, slope
