"""A trained network made ready for inference: fewer layers, the same outputs.

Batch norm, once its statistics are fixed, multiplies and shifts every channel; that is
taken into the convolution before it. Layers are known by what they do, since they are
plain pairs of functions: a batch norm has moving statistics, a convolution a kernel of
four dims, and where in a residual block they stand is seen from what they pass by.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millrace.nn.branches import on
from millrace.nn.layers import Call, Layer, Tree, layer_output, stateless

SMALL_BATCH = 32
"""Up to so many images, a GPU has no more than small kernels to do in a network of
depthwise convolutions, which is then made to have fewer of them."""

_INFERENCE = Call(training=False)
_FEWEST_CHANNELS = 16
"""Of a group: with fewer, several groups become one, zeros among them. For 16 images that
takes an H200 25 us instead of 28 (56 x 56 x 128) and 16 instead of 19 (28 x 28 x 256)."""
_MERGED = 4
"""Groups that become one."""


def has_depthwise(layers: Sequence[Layer], params: Tree) -> bool:
    """Tell whether a network has a depthwise convolution."""
    return any(
        layer.groups > 1 and params[layer.name]["kernel"].shape[2] == 1 for layer in layers
    )


def fold(
    layers: Sequence[Layer], params: Tree, model_state: Tree, example: Any
) -> tuple[list[Layer], Tree, Tree]:
    """Return layers, weights and model state of the same function, for inference.

    Args:
        layers: A model.
        params: Its weights.
        model_state: Its model state, batch norm's moving statistics among them.
        example: An input, or its shape and type.
    """
    params, model_state = dict(params), dict(model_state)
    spec = jax.eval_shape(lambda x: x, example)
    on_cpu = jax.default_backend() == "cpu"
    joins = not on_cpu and has_depthwise(layers, params)
    folded: list[Layer] = []
    before: _Convolution | None = None
    for layer in layers:
        following = layer_output(layer, params, model_state, spec)
        branch = _branch(layer, params, model_state, spec)
        conv = before if before and before.branch == branch else None
        if conv and not conv.has_norm and _is_batch_norm(layer.name, params, model_state):
            folded[-1] = _absorb(folded[-1], layer, branch, params, model_state)
            before = conv._replace(has_norm=True)
        else:
            # A layer of a block that writes no branch, such as dropout, does nothing.
            silent = branch is None and isinstance(spec, dict)
            if spec == following and not silent and not layer.branches and not on_cpu:
                part = spec if branch is None else spec[branch]
                layer = _for_inference(layer, branch, params, part, conv if joins else None)
            before = _convolution(layer, branch, params)
            if before and not on_cpu:
                params[layer.name] = _with_merged_groups(params[layer.name], layer.groups)
            folded.append(_as_product(layer) if before and joins else layer)
        spec = following
    return folded, params, model_state


class _Convolution(NamedTuple):
    """The convolution right before a layer."""

    branch: str | None
    has_norm: bool
    """Whether it has been given a batch norm to absorb."""
    is_dense: bool
    """Whether a feature sees several channels of several pixels."""


def _convolution(layer: Layer, branch: str | None, params: Tree) -> _Convolution | None:
    kernel = params.get(layer.name, {}).get("kernel")
    if kernel is None or kernel.ndim != 4:
        return None
    is_dense = kernel.shape[2] > 1 and kernel.shape[:2] != (1, 1)
    return _Convolution(branch, has_norm=False, is_dense=is_dense)


def _with_merged_groups(weights: Tree, groups: int) -> Tree:
    """Return a grouped convolution's weights for fewer groups, with zeros between them."""
    kernel = np.asarray(weights["kernel"])
    height, width, channels, features = kernel.shape
    if groups == 1 or not 1 < channels < _FEWEST_CHANNELS:
        return weights
    factor = math.gcd(groups, _MERGED)
    parts = kernel.reshape(height, width, channels, groups // factor, factor, -1)
    merged = np.zeros((height, width, factor, *parts.shape[2:]), kernel.dtype)
    for number in range(factor):
        merged[:, :, number, :, :, number] = parts[..., number, :]
    shape = (height, width, factor * channels, features)
    return weights | {"kernel": merged.reshape(shape)}


def _branch(layer: Layer, params: Tree, model_state: Tree, spec: Any) -> str | None:
    """Name the branch that a layer's result lies on; None where there is only one."""
    if layer.branches:
        return None
    written: list[str] = []

    def trace(params: Tree, model_state: Tree, x: Any) -> Any:
        y, _ = layer.apply(params, model_state, x, _INFERENCE)
        if isinstance(y, dict):
            passed = list(x.values()) if isinstance(x, dict) else [x]
            written.extend(
                name for name, value in y.items() if not any(value is p for p in passed)
            )
        return y

    jax.eval_shape(trace, params.get(layer.name, {}), model_state.get(layer.name, {}), spec)
    return written[0] if written else None


def _is_batch_norm(name: str, params: Tree, model_state: Tree) -> bool:
    return set(params.get(name, {})) == {"scale", "bias"} and set(
        model_state.get(name, {})
    ) == {"mean", "var"}


def _absorb(
    conv: Layer, norm: Layer, branch: str | None, params: Tree, model_state: Tree
) -> Layer:
    """Take a batch norm into the convolution before it; its own entries are removed."""
    affine, statistics = params.pop(norm.name), model_state.pop(norm.name)
    channels = affine["scale"].shape[-1]

    def output(x: jax.Array, affine: Tree, statistics: Tree) -> np.ndarray:
        placed = x if branch is None else {branch: x}
        y, _ = norm.apply(affine, statistics, placed, _INFERENCE)
        return np.asarray(y if branch is None else y[branch], np.float32)

    shift = output(jnp.zeros(channels), affine, statistics)
    # Without its shift, one stays exactly the factor.
    unshifted = {"bias": jnp.zeros(channels)}, {"mean": jnp.zeros(channels)}
    factor = output(jnp.ones(channels), affine | unshifted[0], statistics | unshifted[1])
    weights = params[conv.name]
    has_bias = "bias" in weights
    params[conv.name] = {
        "kernel": np.asarray(weights["kernel"], np.float32) * factor,
        "bias": shift + (np.asarray(weights["bias"]) * factor if has_bias else 0),
    }
    return conv if has_bias else _with_bias(conv, branch)


def _with_bias(conv: Layer, branch: str | None) -> Layer:
    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        y, model_state = conv.apply(params, model_state, x, call)
        if branch is None:
            return y + params["bias"], model_state
        return {**y, branch: y[branch] + params["bias"]}, model_state

    return conv._replace(apply=apply)


def _for_inference(
    layer: Layer, branch: str | None, params: Tree, spec: Any, conv: _Convolution | None
) -> Layer:
    """Return the form of an activation that goes best with the convolution before it."""
    if layer.name in params:
        return layer
    x = _probe(spec)
    y, _ = layer.apply({}, {}, x if branch is None else {branch: x}, _INFERENCE)
    found = np.asarray(y if branch is None else y[branch])
    if np.array_equal(found, np.maximum(x, 0)):
        # As a maximum, XLA joins it with a convolution and its bias.
        relu = stateless(layer.name, lambda x: jnp.maximum(x, 0))
        return relu if branch is None else on(branch, relu)
    if conv and conv.is_dense and not np.array_equal(found, x):
        return _apart(layer, branch)
    return layer


def _probe(spec: Any) -> jax.Array:
    """Make an input that tells a ReLU from whatever is one only for some values.

    A ReLU6 is one up to 6, and a ReLU with a blur behind it is one on single pixels: so
    numbers of all sizes, in the input's own shape and in no order.
    """
    sizes = np.concatenate([np.logspace(-6, 4, 41), [6, 7, 20, 255, 256], [0]])
    values = np.concatenate([sizes, -sizes])
    of_a_sample = math.prod(spec.shape[1:])
    shape = (-(-len(values) // of_a_sample), *spec.shape[1:])
    mixed = np.random.default_rng(0).permuted(np.resize(values, shape), axis=None)
    return jnp.asarray(mixed, spec.dtype)


def _as_product(layer: Layer) -> Layer:
    """Make a convolution of single pixels a product, in a small batch.

    XLA joins it with whatever comes before and after, which it cannot do with a
    convolution: EfficientNet-B0 with a batch of one took 0.37 ms, not 0.41.
    """

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        is_small = jax.tree.leaves(x)[0].shape[0] <= SMALL_BATCH
        return layer.apply(params, model_state, x, call._replace(as_product=is_small))

    return layer._replace(apply=apply)


def _apart(layer: Layer, branch: str | None) -> Layer:
    """Keep XLA from joining an activation with the convolution of a small batch.

    It would try, and fail: cuDNN accepts a ReLU there, but no swish.
    """

    def apart(x: jax.Array) -> jax.Array:
        return lax.optimization_barrier(x) if x.shape[0] <= SMALL_BATCH else x

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        x = apart(x) if branch is None else {**x, branch: apart(x[branch])}
        return layer.apply(params, model_state, x, call)

    return layer._replace(apply=apply)
