"""Residual branches as layers: the skip connection travels beside the activations.

Between the layer that opens a branch and the one that closes it, what flows from layer
to layer is ``{"main": …, "skip": …}``. So a model with skip connections is still a plain
list of layers, and can be split before any of them.
"""

from typing import Any

from millrace.nn.layers import Call, Layer, Tree, stateless


def opening(layer: Layer) -> Layer:
    """Run `layer` on the main branch and keep its input as the skip connection."""

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        y, model_state = layer.apply(params, model_state, x, call)
        return {"main": y, "skip": x}, model_state

    return layer._replace(apply=apply)


def on(branch: str, layer: Layer) -> Layer:
    """Run `layer` on one branch, "main" or "skip", and pass the other by."""

    def init(x: Any) -> tuple[Tree, Tree]:
        return layer.init(x[branch])

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        y, model_state = layer.apply(params, model_state, x[branch], call)
        return {**x, branch: y}, model_state

    return Layer(layer.name, init, apply, groups=layer.groups)


def closing(name: str) -> Layer:
    """Add the skip connection to the main branch."""
    return stateless(name, lambda x: x["main"] + x["skip"])
