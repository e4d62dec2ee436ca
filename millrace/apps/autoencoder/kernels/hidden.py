"""The hidden layers of a tied SELU model, with hand-written gradients.

Two passes share the weights, and each pass uses every weight twice (tied). Differentiated
by JAX, that is eight products for the gradients of two kernels, and one sum per bias and
pass. Here the weight gradients wait until both passes are done: the activations and errors
of all uses are concatenated, and each kernel takes one product.

The layers run inside Pallas kernels (``tiles.call_over_users``), so ``forward`` and
``backward`` are generators: the kernel stores each result before the next layer loads its
weights. Together, all of them would not fit on the chip.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from millrace.apps.autoencoder.model import (
    selu_derivative,
    selu_value,
    wide_dtype,
    widen,
)

# Only float16 has a range that sums over all items can exceed: see ``model.saturate``.
LARGEST = float(jnp.finfo(jnp.float16).max)

_PRODUCTS = (("fc_2", 1), ("fc_3", 1), ("fc_3", 0), ("fc_2", 0))
"""The layers in order: the encoder layer that has the kernel, and the dim of that kernel
that the outputs are along (the decoder uses it transposed)."""
_BIASES = (
    ("encoder", "fc_1"),
    ("encoder", "fc_2"),
    ("encoder", "fc_3"),
    ("decoder", "fc_1"),
    ("decoder", "fc_2"),
)
"""The bias in front of each activation, that of the first layer included."""
_CODE = 2
"""The activation that outputs the code, which dropout applies to."""


class HiddenWeights(NamedTuple):
    """The weights of the hidden layers."""

    kernels: dict[str, jax.Array]
    """The kernels by encoder layer."""
    biases: tuple[jax.Array, ...]


def get_hidden_weights(params: Any) -> HiddenWeights:
    """Select the weights of the hidden layers."""
    kernels = {name: params["encoder"][name]["kernel"] for name, _ in _PRODUCTS}
    biases = tuple(params[part][name]["bias"] for part, name in _BIASES)
    return HiddenWeights(kernels, biases)


class HiddenPass(NamedTuple):
    """The results of a forward pass, one array per activation."""

    values: tuple[jax.Array, ...]  # (users, width) each
    """Outputs of the activations; the last one is the input of the last layer."""
    derivatives: tuple[jax.Array, ...]  # (users, width) each

    @classmethod
    def from_results(cls, results: Sequence[jax.Array]) -> "HiddenPass":
        """Sort the results of ``forward``."""
        return cls(tuple(results[::2]), tuple(results[1::2]))


def forward(
    sums: jax.Array,  # (users, width)
    scale: jax.Array | None,  # (users, code)
    weights: HiddenWeights,
) -> Iterator[jax.Array]:
    """Yield the value and the derivative of every activation.

    The layers are those of ``model.apply_hidden_layers``, but `sums` have no bias yet.
    `scale` has the factors of dropout, and `weights` are arrays or references to them.
    """
    dtype, load_kernel = weights.biases[0].dtype, _build_loader(weights)
    for number, bias in enumerate(weights.biases):
        own_scale = scale if number == _CODE else None
        exact, derivative = _activate(widen(sums) + widen(bias[...]), own_scale, dtype)
        yield (value := exact.astype(dtype))
        yield derivative
        if number < len(_PRODUCTS):
            name, output_dim = _PRODUCTS[number]
            sums = dot(value, load_kernel(name), 1, 1 - output_dim)


def backward(
    gradient: jax.Array,  # (users, width)
    derivatives: tuple[jax.Array, ...],  # (users, width) each
    weights: HiddenWeights,
) -> Iterator[jax.Array]:
    """Yield the gradient of the input of every activation, from the last to the first.

    `gradient` is that of the output of the hidden layers.
    """
    dtype, load_kernel = weights.biases[0].dtype, _build_loader(weights)
    for number, derivative in reversed(list(enumerate(derivatives))):
        error = (widen(gradient) * derivative).astype(dtype)
        yield error
        if number:
            name, output_dim = _PRODUCTS[number - 1]
            gradient = dot(error, load_kernel(name), 1, output_dim)


def _build_loader(weights: HiddenWeights) -> Callable[[str], jax.Array]:
    """Return a function that loads a kernel, once if it is used twice in a row."""
    return functools.lru_cache(maxsize=1)(lambda name: weights.kernels[name][...])


def compute_gradients(
    passes: Sequence[HiddenPass],
    errors: Sequence[Sequence[jax.Array]],  # (users, width) each
    factor: jax.Array,  # ()
) -> Any:
    """Return the gradients of the hidden layers, and of the bias of the first layer.

    `errors` are the results of ``backward`` for each pass, in the order of activations;
    all gradients are multiplied by `factor`.
    """
    dtype = passes[0].values[0].dtype
    gradients: dict[str, dict[str, Any]] = {"encoder": {}, "decoder": {}}
    for number, (part, name) in enumerate(_BIASES):
        total = sum(widen(each[number]).sum(0) for each in errors)
        gradients[part][name] = {"bias": (total * factor).astype(dtype)}
    for layer in ("fc_2", "fc_3"):
        # A kernel is used in both directions in every pass. Each use contributes the outer
        # product of its input and its error, swapped where the kernel is transposed.
        rows, columns = [], []
        for each_pass, each_errors in zip(passes, errors, strict=True):
            for number, (name, output_dim) in enumerate(_PRODUCTS):
                if name == layer:
                    pair = each_pass.values[number], each_errors[number + 1]
                    rows.append(pair[1 - output_dim])
                    columns.append(pair[output_dim])
        product = dot(jnp.concatenate(rows), jnp.concatenate(columns), 0, 0)
        gradients["encoder"][layer]["kernel"] = (product * factor).astype(dtype)
    return gradients


def _activate(
    x: jax.Array, scale: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the scaled SELU and its derivative."""
    value = selu_value(x)
    derivative = selu_derivative(value)
    if scale is not None:
        value, derivative = value * scale, derivative * scale
    if dtype == jnp.float16:
        derivative = jnp.where(value < LARGEST, derivative, 0)
        value = jnp.minimum(value, LARGEST)
    return value, derivative


def dot(x: jax.Array, y: jax.Array, x_dim: int, y_dim: int) -> jax.Array:
    """Contract one dim of each of two matrices, accumulating in float32."""
    dims = (((x_dim,), (y_dim,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=wide_dtype(x))
