"""A list of modules of other libraries as layers, which a pipeline can split."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array

from millrace.adapters.equinox import EquinoxArrays, stage_new_values
from millrace.adapters.model import AdaptedModel, split_info
from millrace.adapters.nnx import NnxParts, list_weights, set_mode
from millrace.nn.layers import Call, Layer, Tree, apply_layers
from millrace.nn.losses import LayeredLoss

BATCH_AXIS = "batch"
"""The name of the dim of samples, for Equinox layers such as ``BatchNorm``."""


class _Adapted(NamedTuple):
    """A module as a layer, with its weights, its state and the way back."""

    layer: Layer
    params: Tree
    state: Tree
    merge: Callable[[Tree, Tree], Any]


def sequential(
    modules: Sequence[Any] | Mapping[str, Any],
    loss: Callable[[Any, Any], Any],
    *,
    inputs: str | Callable[[Any, Array], Any] = "x",
    example: Any = None,
) -> AdaptedModel:
    """Return a sequence of modules as a loss that a plan can split into pipeline stages.

    Args:
        modules: Flax NNX modules, Equinox modules or functions of one array, each applied
            to the output of the one before. Names, which `pipeline_splits` uses, are the
            keys of a mapping, or the type and the number of a module, such as
            ``linear_0``. An Equinox module gets one sample at a time, and batch norm must
            have ``axis_name="batch"``.
        loss: ``(output, batch) -> loss``, or ``(loss, info)`` with a dict of scalars. The
            loss is a mean over the samples of `batch`.
        inputs: The entry of a batch that the first module gets, or a function ``(batch,
            key)`` that returns its input.
        example: A batch of a few samples, by which stages of equal cost are chosen.
    """
    named = dict(modules) if isinstance(modules, Mapping) else _add_names(modules)
    if not named:
        raise ValueError("sequential needs at least one module.")
    _check_shared_weights(named)
    adapted = {name: _adapt(name, module) for name, module in named.items()}
    layers = [each.layer for each in adapted.values()]

    def outputs(y: Any, batch: Any) -> tuple[Array, dict[str, Any]]:
        value, info = split_info(loss(y, batch))
        return value, dict(info)

    def merge(params: Tree, model_state: Tree) -> list[Any]:
        return [
            each.merge(params.get(name, {}), model_state.get(name, {}))
            for name, each in adapted.items()
        ]

    def bind(params: Tree, model_state: Tree) -> Callable[[Any], Any]:
        return lambda x: apply_layers(layers, params, model_state, x, training=False)[0]

    select = (lambda batch, key: batch[inputs]) if isinstance(inputs, str) else inputs
    return AdaptedModel(
        LayeredLoss(layers, select, outputs, example),
        {name: each.params for name, each in adapted.items() if each.params},
        {name: each.state for name, each in adapted.items() if each.state},
        merge,
        bind,
    )


def _check_shared_weights(modules: Mapping[str, Any]) -> None:
    """Raise if NNX modules have weights in common, which would become different ones."""
    owners: dict[int, str] = {}
    for name, module in modules.items():
        for weights in list_weights(module) if _is_nnx(module) else ():
            if (other := owners.setdefault(id(weights), name)) != name:
                raise ValueError(
                    f"sequential gives every module weights of its own, but {other} and "
                    f"{name} have some in common. Use copies, or put both into one module."
                )


def _add_names(modules: Sequence[Any]) -> dict[str, Any]:
    return {f"{_kind(module)}_{n}": module for n, module in enumerate(modules)}


def _kind(module: Any) -> str:
    name = getattr(module, "__name__", type(module).__name__)
    return "function" if name == "<lambda>" else name.lower()


def _list_libraries(module: Any) -> set[str]:
    return {".".join(cls.__module__.split(".")[:2]) for cls in type(module).__mro__}


def _is_nnx(module: Any) -> bool:
    return "flax.nnx" in _list_libraries(module)


def _adapt(name: str, module: Any) -> _Adapted:
    libraries = _list_libraries(module)
    if _is_nnx(module):
        return _adapt_nnx(name, module)
    if any(library.startswith("equinox.") for library in libraries):
        return _adapt_equinox(name, module)
    if not callable(module) or "flax.linen" in libraries:
        raise TypeError(
            "sequential takes NNX and Equinox modules and functions of one array; "
            f"{name} is a {type(module).__module__}.{type(module).__name__}."
        )
    layer = Layer(name, lambda x: ({}, {}), lambda p, s, x, call: (module(x), {}))
    return _Adapted(layer, {}, {}, lambda params, state: module)


def _adapt_nnx(name: str, module: Any) -> _Adapted:
    parts = NnxParts(module)

    def apply(params: Tree, state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        merged = parts.merge(params, state, call.key if call.training else None)
        y = (merged if call.training else set_mode(merged, "eval"))(x)
        return y, parts.get_state(merged)

    layer = Layer(name, lambda x: (parts.params, parts.model_state), apply)
    return _Adapted(layer, parts.params, parts.model_state, parts.merge)


def _adapt_equinox(name: str, module: Any) -> _Adapted:
    from equinox import nn

    is_stateful = isinstance(module, nn.StatefulLayer) and module.is_stateful()
    initial = nn.State(module) if is_stateful else None
    weights, values = EquinoxArrays(module), EquinoxArrays(initial, whole=True)
    takes_key = "key" in inspect.signature(type(module).__call__).parameters

    def apply(params: Tree, state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        merged = weights.merge(params)
        if not call.training:
            merged = nn.inference_mode(merged)
        num_samples = jax.tree.leaves(x)[0].shape[0]
        keys = None if call.key is None else jax.random.split(call.key, num_samples)

        def apply_to_sample(x: Any, key: Any) -> Any:
            options = {"key": key} if takes_key else {}
            if initial is None:
                return merged(x, **options), None
            return merged(x, stage_new_values(values.merge(state)), **options)

        mapped = jax.vmap(apply_to_sample, axis_name=BATCH_AXIS, out_axes=(0, None))
        y, new = mapped(x, keys)
        return y, values.get(new)

    def merge(params: Tree, state: Tree) -> Any:
        merged = weights.merge(params)
        return merged if initial is None else (merged, values.merge(state))

    layer = Layer(name, lambda x: (weights.arrays, values.arrays), apply)
    return _Adapted(layer, weights.arrays, values.arrays, merge)
