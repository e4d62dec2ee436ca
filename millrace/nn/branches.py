"""Residual branches as layers: the skip connection travels with the activations.

Between the layer that opens a branch and the one that closes it, layers pass on
``{"main": …, "skip": …}``. A model with skip connections therefore stays a plain list of
layers and can be split before any of them.
"""

from typing import Any

from millrace.nn.layers import Call, Layer, Tree, stateless


def open_residual(layer: Layer) -> Layer:
    """Run `layer` on the main branch and keep its input as the skip connection."""

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        y, model_state = layer.apply(params, model_state, x, call)
        return {"main": y, "skip": x}, model_state

    return layer._replace(apply=apply)


def on_branch(branch: str, layer: Layer) -> Layer:
    """Run `layer` on one branch, "main" or "skip"; pass the other through."""

    def init(x: Any) -> tuple[Tree, Tree]:
        return layer.init(x[branch])

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        y, model_state = layer.apply(params, model_state, x[branch], call)
        return {**x, branch: y}, model_state

    return Layer(layer.name, init, apply, groups=layer.groups)


def close_residual(name: str) -> Layer:
    """Add the skip connection to the main branch."""
    return stateless(name, lambda x: x["main"] + x["skip"])
