"""Rewrite a trained network for inference: fewer layers, the same outputs.

With fixed statistics, a batch norm scales and shifts every channel, which the convolution
before it can do. Layers are plain pairs of functions, so they are recognized by what they
do: a batch norm has moving statistics, a convolution has a kernel of four dims, and the
branch of a residual block that a layer works on shows in what it passes through.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from millrace.nn import winograd
from millrace.nn.layers import Call, Layer, Tree, layer_output, on_branch, stateless

SMALL_BATCH = 32
"""Largest batch in which a network of depthwise convolutions runs only small kernels on a
GPU, so that launching fewer of them pays off."""

_INFERENCE = Call(training=False)
_MIN_GROUP_CHANNELS = 16
"""Groups with fewer channels are merged, with zeros between them. For 16 images, an H200
then takes 25 us instead of 28 (56 x 56 x 128) and 16 instead of 19 (28 x 28 x 256)."""
_MERGED_GROUPS = 4
"""Groups that are merged into one."""


def has_depthwise(layers: Sequence[Layer], params: Tree) -> bool:
    """Whether a network has a depthwise convolution."""
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
        model_state: Its model state, with the moving statistics of batch norm.
        example: An input, or its shape and dtype.
    """
    params, model_state = dict(params), dict(model_state)
    spec = jax.eval_shape(lambda x: x, example)
    on_cpu = jax.default_backend() == "cpu"
    fuses = not on_cpu and has_depthwise(layers, params)
    folded: list[Layer] = []
    before: _Convolution | None = None
    for layer in layers:
        following = layer_output(layer, params, model_state, spec)
        branch = _written_branch(layer, params, model_state, spec)
        conv = before if before and before.branch == branch else None
        if conv and not conv.has_norm and _is_batch_norm(layer.name, params, model_state):
            folded[-1] = _absorb_norm(folded[-1], layer, branch, params, model_state)
            before = conv._replace(has_norm=True)
        else:
            # In a residual block, a layer that writes no branch, such as dropout, is
            # the identity.
            is_identity = branch is None and isinstance(spec, dict)
            if spec == following and not is_identity and not layer.branches and not on_cpu:
                part = spec if branch is None else spec[branch]
                layer = _rewrite_activation(
                    layer, branch, params, part, conv if fuses else None
                )
            before = _describe_convolution(layer, branch, params)
            if before and not on_cpu:
                params[layer.name] = _merge_groups(params[layer.name], layer.groups)
            folded.append(_as_product(layer) if before and fuses else layer)
        spec = following
    return folded, params, model_state


def add_transformed(layers: Sequence[Layer], params: Tree) -> Tree:
    """Return float32 weights, on a CPU with transformed kernels next to the others.

    Whether a convolution uses one also depends on the size of its images, see ``conv2d``.
    """
    if jax.default_backend() != "cpu":
        return params
    params = dict(params)
    for layer in layers:
        weights = params.get(layer.name, {})
        kernel = weights.get("kernel", np.zeros(0))
        is_plain = layer.groups == layer.strides == 1
        if is_plain and winograd.is_worthwhile(kernel.shape):
            transformed = winograd.transform_kernel(np.asarray(kernel))
            params[layer.name] = weights | {winograd.TRANSFORMED: transformed}
    return params


class _Convolution(NamedTuple):
    """The convolution right before a layer."""

    branch: str | None
    has_norm: bool
    """Whether it has already absorbed a batch norm."""
    is_dense: bool
    """Whether a feature depends on several channels of several pixels."""


def _describe_convolution(
    layer: Layer, branch: str | None, params: Tree
) -> _Convolution | None:
    kernel = params.get(layer.name, {}).get("kernel")
    if kernel is None or kernel.ndim != 4:
        return None
    is_dense = kernel.shape[2] > 1 and kernel.shape[:2] != (1, 1)
    return _Convolution(branch, has_norm=False, is_dense=is_dense)


def _merge_groups(weights: Tree, groups: int) -> Tree:
    """Return the weights of a grouped convolution for fewer, wider groups."""
    kernel = np.asarray(weights["kernel"])
    height, width, channels, features = kernel.shape
    if groups == 1 or not 1 < channels < _MIN_GROUP_CHANNELS:
        return weights
    factor = math.gcd(groups, _MERGED_GROUPS)
    parts = kernel.reshape(height, width, channels, groups // factor, factor, -1)
    merged = np.zeros((height, width, factor, *parts.shape[2:]), kernel.dtype)
    for number in range(factor):
        merged[:, :, number, :, :, number] = parts[..., number, :]
    shape = (height, width, factor * channels, features)
    return weights | {"kernel": merged.reshape(shape)}


def _written_branch(layer: Layer, params: Tree, model_state: Tree, spec: Any) -> str | None:
    """Return the branch that a layer writes; None outside of residual blocks."""
    if layer.branches:
        return None
    written: list[str] = []

    def trace(params: Tree, model_state: Tree, x: Any) -> Any:
        y, _ = layer.apply(params, model_state, x, _INFERENCE)
        if isinstance(y, dict):
            # A value that is passed through is the very same tracer.
            passed = list(x.values()) if isinstance(x, dict) else [x]
            written.extend(
                name for name, value in y.items() if not any(value is p for p in passed)
            )
        return y

    jax.eval_shape(trace, params.get(layer.name, {}), model_state.get(layer.name, {}), spec)
    return written[0] if written else None


def _is_batch_norm(name: str, params: Tree, model_state: Tree) -> bool:
    affine, statistics = params.get(name, {}), model_state.get(name, {})
    return "bias" in affine and set(statistics) == {"mean", "var"}


def _absorb_norm(
    conv: Layer, norm: Layer, branch: str | None, params: Tree, model_state: Tree
) -> Layer:
    """Move a batch norm into the convolution before it; remove its own entries."""
    affine, statistics = params.pop(norm.name), model_state.pop(norm.name)
    channels = affine["bias"].shape[-1]

    def output(
        x: Float[Array, " channels"], affine: Tree, statistics: Tree
    ) -> Float[np.ndarray, " channels"]:
        placed = x if branch is None else {branch: x}
        y, _ = norm.apply(affine, statistics, placed, _INFERENCE)
        return np.asarray(y if branch is None else y[branch], np.float32)

    shift = output(jnp.zeros(channels), affine, statistics)
    # Without the shift, an input of 1 gives exactly the factor.
    unshifted = {"bias": jnp.zeros(channels)}, {"mean": jnp.zeros(channels)}
    factor = output(jnp.ones(channels), affine | unshifted[0], statistics | unshifted[1])
    weights = params[conv.name]
    has_bias = "bias" in weights
    params[conv.name] = {
        "kernel": np.asarray(weights["kernel"], np.float32) * factor,
        "bias": shift + (np.asarray(weights["bias"]) * factor if has_bias else 0),
    }
    return conv if has_bias else _add_bias(conv, branch)


def _add_bias(conv: Layer, branch: str | None) -> Layer:
    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        y, model_state = conv.apply(params, model_state, x, call)
        if branch is None:
            return y + params["bias"], model_state
        return {**y, branch: y[branch] + params["bias"]}, model_state

    return conv._replace(apply=apply)


def _rewrite_activation(
    layer: Layer, branch: str | None, params: Tree, spec: Any, conv: _Convolution | None
) -> Layer:
    """Return an activation in the form that suits the convolution before it."""
    if layer.name in params:
        return layer
    x = _probe_input(spec)
    y, _ = layer.apply({}, {}, x if branch is None else {branch: x}, _INFERENCE)
    output = np.asarray(y if branch is None else y[branch])
    if np.array_equal(output, np.maximum(x, 0)):
        # XLA fuses a maximum with a convolution and its bias.
        relu = stateless(layer.name, lambda x: jnp.maximum(x, 0))
        return relu if branch is None else on_branch(branch, relu)
    if conv and conv.is_dense and not np.array_equal(output, x):
        return _keep_apart(layer, branch)
    return layer


def _probe_input(spec: Any) -> Array:
    """Return an input that tells a ReLU from functions that equal it for some inputs.

    ReLU6 equals it up to 6, and a ReLU with a blur equals it on single pixels. So the
    input has the real shape and numbers of all magnitudes in random order.
    """
    magnitudes = np.concatenate([np.logspace(-6, 4, 41), [6, 7, 20, 255, 256], [0]])
    values = np.concatenate([magnitudes, -magnitudes])
    sample_size = math.prod(spec.shape[1:])
    shape = (-(-len(values) // sample_size), *spec.shape[1:])
    shuffled = np.random.default_rng(0).permuted(np.resize(values, shape), axis=None)
    return jnp.asarray(shuffled, spec.dtype)


def _as_product(layer: Layer) -> Layer:
    """Compute a 1x1 convolution as a product if the batch is small.

    XLA fuses a product with the operations around it, but not a convolution:
    EfficientNet-B0 with a batch of one took 0.37 ms instead of 0.41.
    """

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        is_small = jax.tree.leaves(x)[0].shape[0] <= SMALL_BATCH
        return layer.apply(params, model_state, x, call._replace(as_product=is_small))

    return layer._replace(apply=apply)


def _keep_apart(layer: Layer, branch: str | None) -> Layer:
    """Keep XLA from fusing an activation with the convolution of a small batch.

    It would try and fail: cuDNN accepts a ReLU there, but no swish.
    """

    def barrier(x: Array) -> Array:
        return lax.optimization_barrier(x) if x.shape[0] <= SMALL_BATCH else x

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        x = barrier(x) if branch is None else {**x, branch: barrier(x[branch])}
        return layer.apply(params, model_state, x, call)

    return layer._replace(apply=apply)
