"""A model is a list of named layers, each a pair of pure functions.

Weights and carried values are plain dictionaries keyed by layer name, so that a model
can be split before any layer and a checkpoint can be read by eye.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from millrace.nn.convolution import conv2d

Tree = dict[str, Any]

KEPT = "millrace_kept"
"""Names the activations that recomputation keeps: results of products."""


class Call(NamedTuple):
    """How a layer is being used."""

    training: bool
    key: jax.Array | None = None


class Layer(NamedTuple):
    """A named step of a model."""

    name: str
    init: Callable[[jax.Array, Any], tuple[Tree, Tree]]
    """``(key, input) -> (params, carried)``; only shapes and types of input matter."""
    apply: Callable[[Tree, Tree, Any, Call], tuple[Any, Tree]]
    """``(params, carried, input, call) -> (output, carried)``."""


def init_layers(layers: Sequence[Layer], key: jax.Array, example: Any) -> tuple[Tree, Tree]:
    """Make the weights and carried values of a model for inputs like `example`."""
    # Run once: compiling it well took 3.9 s of a run of ten, compiling it fast 0.9.
    fast = {"xla_backend_optimization_level": "0"}
    options = fast if jax.default_backend() == "cpu" else {}
    return jax.jit(_initialiser(layers, example), compiler_options=options)(key)


def init_shapes(layers: Sequence[Layer], example: Any) -> tuple[Tree, Tree]:
    """Return the shapes of what ``init_layers`` would make, without making it."""
    return jax.eval_shape(_initialiser(layers, example), jax.random.key(0))


def _initialiser(
    layers: Sequence[Layer], example: Any
) -> Callable[[jax.Array], tuple[Tree, Tree]]:
    _check_names(layers)

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        params, carried, spec = {}, {}, example
        for layer in layers:
            own = layer.init(_layer_key(key, layer.name), spec)
            params[layer.name], carried[layer.name] = own
            # Not as in training: there, a layer may reduce over replicas, or draw.
            call = Call(training=False)
            spec = jax.eval_shape(functools.partial(_output, layer, own, call), spec)
        return _without_empty(params), _without_empty(carried)

    return init


def _output(layer: Layer, own: tuple[Tree, Tree], call: Call, x: Any) -> Any:
    return layer.apply(own[0], own[1], x, call)[0]


def apply_layers(
    layers: Sequence[Layer],
    params: Tree,
    carried: Tree,
    x: Any,
    *,
    training: bool,
    key: jax.Array | None = None,
) -> tuple[Any, Tree]:
    """Run a model and return its output with the new carried values."""
    new = dict(carried)
    for layer in layers:
        own_key = None if key is None else _layer_key(key, layer.name)
        x, own = layer.apply(
            params.get(layer.name, {}),
            carried.get(layer.name, {}),
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
    bias: bool = False,
) -> Layer:
    """A convolution; weights drawn from He's normal distribution."""
    size = (kernel, kernel) if isinstance(kernel, int) else kernel

    def init(key: jax.Array, x: Any) -> tuple[Tree, Tree]:
        shape = (*size, x.shape[-1], features)
        params = {"kernel": _he_normal(key, shape)}
        if bias:
            params["bias"] = jnp.zeros(features)
        return params, {}

    def apply(params: Tree, carried: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        del carried, call
        y = conv2d(x, params["kernel"], strides=(strides, strides), padding=padding)
        y = checkpoint_name(y, KEPT)
        return y + params["bias"] if bias else y, {}

    return Layer(name, init, apply)


def dense(name: str, features: int) -> Layer:
    """A matrix product and a bias."""

    def init(key: jax.Array, x: Any) -> tuple[Tree, Tree]:
        fan_in = x.shape[-1]
        kernel = jax.random.normal(key, (fan_in, features)) * fan_in**-0.5
        return {"kernel": kernel, "bias": jnp.zeros(features)}, {}

    def apply(params: Tree, carried: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        del carried, call
        return x @ params["kernel"] + params["bias"], {}

    return Layer(name, init, apply)


def stateless(name: str, function: Callable[[Any], Any]) -> Layer:
    """A layer without weights.

    >>> relu = stateless("relu", jax.nn.relu)
    """

    def apply(params: Tree, carried: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        del params, carried, call
        return function(x), {}

    return Layer(name, lambda key, x: ({}, {}), apply)


def relu(name: str) -> Layer:
    """Negative values to zero."""
    return stateless(name, jax.nn.relu)


def flatten(name: str) -> Layer:
    """Everything but the samples into one dim."""
    return stateless(name, lambda x: x.reshape(x.shape[0], -1))


def global_average_pool(name: str) -> Layer:
    """The mean over height and width."""
    return stateless(name, lambda x: x.mean((1, 2), dtype=jnp.float32).astype(x.dtype))


def max_pool(name: str, window: int, strides: int, padding: Any = "VALID") -> Layer:
    """The largest value in each window."""

    def pool(x: jax.Array) -> jax.Array:
        return lax.reduce_window(
            x,
            jnp.array(-jnp.inf, x.dtype),
            lax.max,
            (1, window, window, 1),
            (1, strides, strides, 1),
            padding,
        )

    return stateless(name, pool)


def dropout(name: str, rate: float) -> Layer:
    """Set a part of the values to zero while training, and scale up the rest."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout rate must be at least 0 and below 1, got {rate}.")

    def apply(params: Tree, carried: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        del params, carried
        if not call.training or rate == 0:
            return x, {}
        if call.key is None:
            raise ValueError(f"Layer {name} drops values at random: pass a key.")
        kept = jax.random.bernoulli(call.key, 1 - rate, x.shape)
        return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype), {}

    return Layer(name, lambda key, x: ({}, {}), apply)


def num_parameters(params: Any) -> int:
    """Count the trainable numbers."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _he_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    fan_in = shape[0] * shape[1] * shape[2]
    return jax.random.truncated_normal(key, -2, 2, shape) * (2 / fan_in) ** 0.5 / 0.88


def _layer_key(key: jax.Array, name: str) -> jax.Array:
    """By name, so that a split of the model or another order changes nothing."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


def _check_names(layers: Sequence[Layer]) -> None:
    names = [layer.name for layer in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Layer names must be unique; used twice: {', '.join(twice)}.")


def _without_empty(tree: Tree) -> Tree:
    return {name: own for name, own in tree.items() if own}
