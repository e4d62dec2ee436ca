"""The recommender in PyTorch, as one would write it there: for ``torch_process``.

Dense rows of one batch that lie on the device; tied weights, SELU throughout, dropout of
the code; the error on known ratings, and with re-feeding that of a second pass.
"""

# pyright: reportMissingImports=false

from typing import Any

_LEARNING_RATE = 1e-4


class AutoencoderTraining:
    """A recommender that is trained on one batch."""

    def __init__(self, settings: dict[str, Any], compiled: bool) -> None:
        import torch

        device = settings["device"]
        model = build(settings["widths"], settings["dropout"]).to(device).train()
        self._optimizer = torch.optim.SGD(
            model.parameters(),
            _LEARNING_RATE,
            momentum=settings["momentum"],
            weight_decay=settings["weight_decay"],
            fused=device == "cuda",
        )
        loss = loss_of(model, settings)
        self._loss = torch.compile(loss, dynamic=False) if compiled else loss
        self._rows = rows_of(settings).to(device)

    def call(self) -> None:
        """Make one update."""
        self._loss(self._rows).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def ready(self) -> None:
        """Nothing is left to be done."""


def loss_of(model: Any, settings: dict[str, Any]) -> Any:
    """Return the loss of dense rows."""
    import torch

    half = settings["compute"] != "float32"
    kind = getattr(torch, settings["compute"]) if half else torch.bfloat16

    def loss(rows: Any) -> Any:
        with torch.autocast(settings["device"], kind, enabled=half):
            output = model(rows)
            again = model(output) if settings["refeeding"] == "joint" else None
        known = rows != 0
        error = torch.where(known, output.float() - rows, 0.0).square().sum() / known.sum()
        if again is None:
            return error
        return error + (again.float() - output.float()).square().mean()

    return loss


def build(widths: list[int], dropout: float) -> Any:
    """Return the network."""
    import torch
    from torch import nn
    from torch.nn import functional

    shapes = [(widths[n + 1], widths[n]) for n in range(len(widths) - 1)]

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            drawn = [nn.init.xavier_uniform_(torch.empty(shape)) for shape in shapes]
            self.kernels = nn.ParameterList(drawn)
            self.encoder = nn.ParameterList(torch.zeros(after) for after, _ in shapes)
            self.decoder = nn.ParameterList(
                torch.zeros(before) for _, before in reversed(shapes)
            )

        def forward(self, x: Any) -> Any:
            for kernel, bias in zip(self.kernels, self.encoder, strict=True):
                x = functional.selu(functional.linear(x, kernel, bias))
            x = functional.dropout(x, dropout, self.training)
            backwards = list(self.kernels)[::-1]
            for kernel, bias in zip(backwards, self.decoder, strict=True):
                x = functional.selu(functional.linear(x, kernel.t(), bias))
            return x

    return Autoencoder()


def rows_of(settings: dict[str, Any]) -> Any:
    """Return rows in which each user has rated as many items as on average."""
    import torch

    num_items, rated = settings["widths"][0], settings["rated"]
    rows = torch.zeros(settings["batch"], num_items)
    for row in rows:
        row[torch.randperm(num_items)[:rated]] = torch.randint(1, 6, (rated,)).float()
    return rows
