"""The layers between the outer two, tied and with SELU, their gradient written out.

Two passes through them share their weights, and each pass uses every weight twice. As JAX
derives it, that is eight products for the gradient of two matrices, and a sum for every
bias of every pass. Here they wait until both passes are done: two products, of everything.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from millrace.apps.autoencoder.model import selu_slope, selu_value

# float16 alone ends where sums over all items may get to: see ``model.saturated``.
LARGEST = float(jnp.finfo(jnp.float16).max)

_PRODUCTS = (("fc_2", 1), ("fc_3", 1), ("fc_3", 0), ("fc_2", 0))
"""The layers in order: whose weights, and which dim of them its results are along."""
_BIASES = (
    ("encoder", "fc_1"),
    ("encoder", "fc_2"),
    ("encoder", "fc_3"),
    ("decoder", "fc_1"),
    ("decoder", "fc_2"),
)
"""Of what each activation gets, the first layer's included."""
_CODE = 2
"""The activation that gives the code."""


class Weights(NamedTuple):
    """The weights of these layers."""

    kernels: dict[str, jax.Array]
    """By the encoder's layer."""
    biases: tuple[jax.Array, ...]


def weights_of(params: Any) -> Weights:
    """Take these layers' from all weights."""
    kernels = {name: params["encoder"][name]["kernel"] for name, _ in _PRODUCTS}
    return Weights(kernels, tuple(params[part][name]["bias"] for part, name in _BIASES))


class Pass(NamedTuple):
    """What a pass gives."""

    values: tuple[jax.Array, ...]
    """Of the activations, the first layer's included; the last one's leave the layers."""
    slopes: tuple[jax.Array, ...]
    """Their derivatives."""

    @classmethod
    def of(cls, results: Sequence[jax.Array]) -> "Pass":
        """Take what ``forward`` gives."""
        return cls(tuple(results[::2]), tuple(results[1::2]))


def forward(
    sums: jax.Array, scale: jax.Array | None, weights: Weights
) -> Iterator[jax.Array]:
    """Go through ``model.inner_layers``; give every activation's values and slopes.

    Args:
        sums: The first layer's, (users, width), before their bias.
        scale: What dropout multiplies the codes with; None leaves them alone.
        weights: In the type to compute in, as arrays or as references to them.
    """
    kind, kernel = weights.biases[0].dtype, _reader(weights)
    for number, bias in enumerate(weights.biases):
        own_scale = scale if number == _CODE else None
        exact, slope = _activated(wide(sums) + wide(bias[...]), own_scale, kind)
        yield (value := exact.astype(kind))
        yield slope
        if number < len(_PRODUCTS):
            name, along = _PRODUCTS[number]
            sums = dot(value, kernel(name), 1, 1 - along)


def backward(
    gradient: jax.Array, slopes: tuple[jax.Array, ...], weights: Weights
) -> Iterator[jax.Array]:
    """Give the gradients of what each activation got, the last one's first.

    Args:
        gradient: Of what left the layers.
        slopes: Of a pass.
        weights: As in ``forward``.
    """
    kind, kernel = weights.biases[0].dtype, _reader(weights)
    for number, slope in reversed(list(enumerate(slopes))):
        error = (wide(gradient) * slope).astype(kind)
        yield error
        if number:
            name, along = _PRODUCTS[number - 1]
            gradient = dot(error, kernel(name), 1, along)


def _reader(weights: Weights) -> Callable[[str], jax.Array]:
    """Return what reads a layer's weights: once where they are used twice in a row."""
    return functools.lru_cache(maxsize=1)(lambda name: weights.kernels[name][...])


def gradients(
    passes: Sequence[Pass], errors: Sequence[Sequence[jax.Array]], factor: jax.Array
) -> Any:
    """Return the gradient of all weights but the outer two layers', which have biases.

    Args:
        passes: All that have been made.
        errors: What ``backward`` gave for each of them, the first activation's first.
        factor: On all gradients.
    """
    kind = passes[0].values[0].dtype
    found: dict[str, dict[str, Any]] = {"encoder": {}, "decoder": {}}
    for number, (part, name) in enumerate(_BIASES):
        total = sum(wide(each[number]).sum(0) for each in errors)
        found[part][name] = {"bias": (total * factor).astype(kind)}
    for layer in ("fc_2", "fc_3"):
        rows, columns = [], []
        for passed, each in zip(passes, errors, strict=True):
            for number, (name, along) in enumerate(_PRODUCTS):
                if name == layer:
                    pair = passed.values[number], each[number + 1]
                    rows.append(pair[1 - along])
                    columns.append(pair[along])
        product = dot(jnp.concatenate(rows), jnp.concatenate(columns), 0, 0)
        found["encoder"][layer]["kernel"] = (product * factor).astype(kind)
    return found


def _activated(
    x: jax.Array, scale: jax.Array | None, kind: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the scaled SELU, and its derivative."""
    value = selu_value(x)
    slope = selu_slope(value)
    if scale is not None:
        value, slope = value * scale, slope * scale
    if kind == jnp.float16:
        slope = jnp.where(value < LARGEST, slope, 0)
        value = jnp.minimum(value, LARGEST)
    return value, slope


def dot(x: jax.Array, y: jax.Array, of_x: int, of_y: int) -> jax.Array:
    """Multiply matrices over one dim of each, adding up in float32."""
    dims = (((of_x,), (of_y,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=wide_type(x))


def wide(x: jax.Array) -> jax.Array:
    """Return `x` in float32, or in float64 where it is."""
    return x.astype(wide_type(x))


def wide_type(x: jax.Array) -> Any:
    """Return the type to add up in."""
    return jnp.promote_types(x.dtype, jnp.float32)
