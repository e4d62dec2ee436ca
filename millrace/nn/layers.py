"""A model is a list of named layers, each a pair of pure functions.

Weights and model state are plain dictionaries keyed by layer name, so that a model can be
split before any layer and a checkpoint is readable.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from millrace.config import ConfigurationError
from millrace.nn import pooling, winograd
from millrace.nn.convolution import EmptyOutputError, check_groups, conv2d
from millrace.nn.dense_convolution import Images, Outputs
from millrace.nn.initializers import Init, init_tree

Tree = dict[str, Any]

KEPT = "millrace_kept"
"""Checkpoint name of the activations that recomputation keeps: results of products."""


class Call(NamedTuple):
    """How a layer is called."""

    training: bool
    key: Array | None = None
    as_product: bool = False
    """Whether to compute a 1x1 convolution as a product, see ``conv2d``."""


class Layer(NamedTuple):
    """A named step of a model."""

    name: str
    init: Callable[[Any], tuple[Tree, Tree]]
    """``input -> (params, model_state)``; only shapes and dtypes of the input matter.
    Random weights are returned as an ``Init``."""
    apply: Callable[[Tree, Tree, Any, Call], tuple[Any, Tree]]
    """``(params, model_state, input, call) -> (output, model_state)``."""
    branches: "tuple[tuple[Layer, ...], ...]" = ()
    """The branches of a ``concurrent`` layer, which has nothing else."""
    groups: int = 1
    """The groups of a convolution."""
    strides: int = 1
    """The strides of a convolution."""


def init_layers(layers: Sequence[Layer], key: Array, example: Any) -> tuple[Tree, Tree]:
    """Return initial weights and model state for inputs like `example`."""
    check_names(layers)
    # This runs once: compiling with optimization took 3.9 s of a run of ten, without 0.9.
    fast = {"xla_backend_optimization_level": "0"}
    options = fast if jax.default_backend() == "cpu" else {}

    def init(key: Array) -> tuple[Tree, Tree]:
        return init_tree(_init_placeholders(layers, example), key)

    return jax.jit(init, compiler_options=options)(key)


def init_shapes(layers: Sequence[Layer], example: Any) -> tuple[Tree, Tree]:
    """Return the shapes of what ``init_layers`` returns, without computing it."""
    check_names(layers)
    placeholders = _init_placeholders(layers, example)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), placeholders)


def _init_placeholders(layers: Sequence[Layer], example: Any) -> tuple[Tree, Tree]:
    """Return weights, with an ``Init`` for those still to be sampled, and model state."""
    params, model_state, spec = {}, {}, example
    for layer in layers:
        new_params, new_model_state = _init_layer(layer, spec)
        params |= new_params
        model_state |= new_model_state
        output = _output_if_any(layer, new_params, new_model_state, spec)
        if output is None:
            raise ConfigurationError(
                f"The input is too small for this model: {layer.name} leaves nothing "
                f"of {_format_shapes(spec)} (the model's input is "
                f"{_format_shapes(example)}). Use larger images or another model."
            )
        spec = output
    return params, model_state


def _output_if_any(layer: Layer, params: Tree, model_state: Tree, x: Any) -> Any:
    try:
        output = layer_output(layer, params, model_state, x)
    except EmptyOutputError:
        return None
    return None if any(y.size == 0 for y in jax.tree.leaves(output)) else output


def _format_shapes(spec: Any) -> str:
    return ", ".join(str(leaf.shape[1:]) for leaf in jax.tree.leaves(spec))


def _init_layer(layer: Layer, spec: Any) -> tuple[Tree, Tree]:
    params, model_state = {}, {}
    for branch in layer.branches:
        trees = _init_placeholders(branch, spec)
        for tree, own in zip((params, model_state), trees, strict=True):
            tree |= own
    if not layer.branches:
        own_params, own_model_state = layer.init(spec)
        params = {layer.name: own_params} if own_params else {}
        model_state = {layer.name: own_model_state} if own_model_state else {}
    return params, model_state


def layer_output(layer: Layer, params: Tree, model_state: Tree, x: Any) -> Any:
    """Return the shapes and dtypes of a layer's output for an input like `x`."""

    def output(params: Tree, model_state: Tree, x: Any) -> Any:
        # In training, a layer may need a mesh axis to reduce over, or a key.
        return apply_layers([layer], params, model_state, x, training=False)[0]

    names = layer_names([layer])
    own = ({n: tree[n] for n in names if n in tree} for tree in (params, model_state))
    return jax.eval_shape(output, *own, x)


def apply_layers(
    layers: Sequence[Layer],
    params: Tree,
    model_state: Tree,
    x: Any,
    *,
    training: bool,
    key: Array | None = None,
) -> tuple[Any, Tree]:
    """Run a model; return its output and the new model state."""
    new = dict(model_state)
    for layer in layers:
        if layer.branches:
            results = [
                apply_layers(branch, params, model_state, x, training=training, key=key)
                for branch in layer.branches
            ]
            x = tuple(output for output, _ in results)
            for branch, (_, changed) in zip(layer.branches, results, strict=True):
                names = layer_names(branch)
                new |= {name: changed[name] for name in names if name in changed}
            continue
        own_key = None if key is None else _layer_key(key, layer.name)
        x, own = layer.apply(
            params.get(layer.name, {}),
            model_state.get(layer.name, {}),
            x,
            Call(training, own_key),
        )
        if own:
            new[layer.name] = own
    return x, new


def conv(
    name: str,
    features: int,
    kernel: int | tuple[int, int] = 3,
    *,
    strides: int = 1,
    padding: Any = "SAME",
    groups: int = 1,
    bias: bool = False,
    fan: Literal["in", "out"] = "in",
    copies_inputs: bool = False,
) -> Layer:
    """Return a convolution with He-normal weights.

    Args:
        name: The layer's name.
        features: Output channels.
        kernel: Height and width, or one number for both.
        strides: For height and width.
        padding: See ``conv2d``.
        groups: See ``conv2d``; one per input channel is a depthwise convolution.
        bias: Whether to add one.
        fan: Whether He's variance counts the inputs or the outputs of the kernel.
        copies_inputs: Start as the identity instead (Dirac weights); features beyond the
            number of inputs start with small uniform weights.
    """
    size = (kernel, kernel) if isinstance(kernel, int) else kernel

    def init(x: Any) -> tuple[Tree, Tree]:
        check_groups(x.shape[-1], features, groups)
        shape = (*size, x.shape[-1] // groups, features)
        params: Tree = {"kernel": _he_normal(shape, fan)}
        if copies_inputs:
            params["kernel"] = Init("uniform", shape, _fan_in(shape) ** -0.5, True)
        if bias:
            params["bias"] = jnp.zeros(features)
        return params, {}

    def apply(
        params: Tree, model_state: Tree, x: Images, call: Call
    ) -> tuple[Outputs, Tree]:
        del model_state
        weights = params["kernel"]
        # Folding may have merged groups, so the kernel's shape decides how many there are.
        merged = max(1, x.shape[-1] // weights.shape[2])
        y = conv2d(
            x,
            weights,
            strides=(strides, strides),
            padding=padding,
            groups=groups if groups % merged else merged,
            as_product=call.as_product,
            transformed=params.get(winograd.TRANSFORMED),
        )
        y = checkpoint_name(y, KEPT)
        return y + params["bias"] if bias else y, {}

    return Layer(name, init, apply, groups=groups, strides=strides)


def dense(name: str, features: int) -> Layer:
    """Return a matrix product with a bias."""

    def init(x: Any) -> tuple[Tree, Tree]:
        fan_in = x.shape[-1]
        kernel = Init("normal", (fan_in, features), fan_in**-0.5)
        return {"kernel": kernel, "bias": jnp.zeros(features)}, {}

    def apply(
        params: Tree, model_state: Tree, x: Float[Array, "*batch channels"], call: Call
    ) -> tuple[Float[Array, "*batch features"], Tree]:
        del model_state, call
        return x @ params["kernel"] + params["bias"], {}

    return Layer(name, init, apply)


def stateless(name: str, function: Callable[[Any], Any]) -> Layer:
    """Return a layer without weights.

    >>> relu = stateless("relu", jax.nn.relu)
    """

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        del params, model_state, call
        return function(x), {}

    return Layer(name, lambda x: ({}, {}), apply)


def concurrent(name: str, *branches: Sequence[Layer]) -> Layer:
    """Return a layer that runs several lists of layers on the same input.

    Its output is the tuple of theirs. A pipeline stage that consists of this layer alone
    can be spread over several devices.
    """
    if len(branches) < 2 or not all(branches):
        raise ValueError(f"Layer {name}: a concurrent layer needs two branches or more.")

    def never(*_: Any) -> Any:
        raise AssertionError("apply_layers and init_layers run the branches themselves")

    return Layer(name, never, never, tuple(tuple(branch) for branch in branches))


def relu(name: str) -> Layer:
    """Return a layer that sets negative values to zero."""
    # Not a maximum: XLA:CPU recomputes a maximum for every reader, and with it every
    # residual block in all later ones (cifar_resnet20: 380 ms per update instead of 330).
    return stateless(name, lambda x: jnp.where(x <= 0, 0, x))


def gelu(name: str) -> Layer:
    """Return a layer with the Gaussian error linear unit."""
    # jax.nn.gelu computes erfc, for precision far below 0 that no network needs.
    return stateless(name, lambda x: 0.5 * x * (1 + lax.erf(x * 0.5**0.5)))


def flatten(name: str) -> Layer:
    """Return a layer that flattens all dims but the batch."""
    return stateless(name, lambda x: x.reshape(x.shape[0], -1))


def global_average_pool(name: str) -> Layer:
    """Return a layer that averages over height and width."""

    def average(x: Images) -> Float[Array, "batch channels"]:
        return x.mean((1, 2), dtype=jnp.float32).astype(x.dtype)

    return stateless(name, average)


def max_pool(
    name: str, window: int, strides: int, pads: Sequence[Any] = ((0, 0), (0, 0))
) -> Layer:
    """Return max pooling; `pads` are (before, after) for height and width."""
    return stateless(name, lambda x: pooling.max_pool(x, window, strides, pads))


def dropout(name: str, rate: float, *, whole_samples: bool = False) -> Layer:
    """Return a layer that zeroes values at random in training and scales up the rest.

    With `whole_samples`, it drops all values of a sample or none. At the end of a residual
    branch, this is stochastic depth (drop connect).
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout rate must be at least 0 and below 1, got {rate}.")

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        del params, model_state
        if not call.training or rate == 0:
            return x, {}
        if call.key is None:
            raise ValueError(f"Layer {name} drops values at random: pass a key.")
        shape = (x.shape[0], *(1,) * (x.ndim - 1)) if whole_samples else x.shape
        kept = jax.random.bernoulli(call.key, 1 - rate, shape)
        return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype), {}

    return Layer(name, lambda x: ({}, {}), apply)


def num_parameters(params: Any) -> int:
    """Return the number of trainable parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _he_normal(shape: tuple[int, ...], fan: str) -> Init:
    count = shape[0] * shape[1] * shape[3] if fan == "out" else _fan_in(shape)
    return Init("truncated_normal", shape, (2 / count) ** 0.5)


def _fan_in(shape: tuple[int, ...]) -> int:
    return shape[0] * shape[1] * shape[2]


def _layer_key(key: Array, name: str) -> Array:
    # By name, so that splitting or reordering the model changes no random number.
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


def layer_names(layers: Sequence[Layer]) -> list[str]:
    """Return the names of all layers, including those in branches."""
    names = []
    for layer in layers:
        names.append(layer.name)
        for branch in layer.branches:
            names += layer_names(branch)
    return names


def check_names(layers: Sequence[Layer]) -> None:
    """Raise if two layers have the same name."""
    names = layer_names(layers)
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"Layer names must be unique; used twice: {', '.join(duplicates)}."
        )


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

    return Layer(layer.name, init, apply, groups=layer.groups, strides=layer.strides)


def close_residual(name: str) -> Layer:
    """Add the skip connection to the main branch."""
    return stateless(name, lambda x: x["main"] + x["skip"])
