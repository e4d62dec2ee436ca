"""Linen modules and Haiku networks: functions of weights, state and random keys."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array

from millrace.adapters.model import AdaptedModel, split_info

Call = Callable[[Any, Any, Array | None, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]
"""``(params, model_state, key, args, kwargs) -> (output, model_state)``."""


def from_linen(
    module: Any,
    loss: Callable[[Any, Any, Array], Any],
    variables: Mapping[str, Any],
    *,
    rngs: Sequence[str] = ("dropout",),
) -> AdaptedModel:
    """Return a Flax Linen module as a loss and plain trees of arrays.

    Args:
        module: The module.
        loss: ``(model, batch, key) -> loss``, or ``(loss, info)`` with a dict of scalars.
            The loss is a mean over the samples of `batch`. ``model(...)`` calls
            ``module.apply(...)`` with variables and random keys, and keeps the collections
            that it changes.
        variables: From ``module.init``. The collection "params" has the weights, all
            others are model state.
        rngs: Names of the random streams that the module uses.
    """
    from flax import linen
    from flax.core import unfreeze

    plain = linen.unbox(unfreeze(dict(variables)))
    params = plain.pop("params", {})

    def call(params: Any, state: Any, key: Array | None, args: Any, kwargs: Any) -> Any:
        values = {"params": params, **state}
        if key is None:
            return module.apply(values, *args, **kwargs), state
        keys = {name: _fold_in_name(key, name) for name in rngs}
        if not state:
            return module.apply(values, *args, rngs=keys, **kwargs), state
        mutable = list(state)
        y, changed = module.apply(values, *args, rngs=keys, mutable=mutable, **kwargs)
        return y, {**state, **unfreeze(changed)}

    return _adapt(call, loss, params, plain, lambda p, state: {"params": p, **state})


def from_haiku(
    network: Any,
    loss: Callable[[Any, Any, Array], Any],
    params: Any,
    state: Any = None,
) -> AdaptedModel:
    """Return a Haiku network as a loss and plain trees of arrays.

    Args:
        network: From ``haiku.transform`` or ``haiku.transform_with_state``.
        loss: ``(model, batch, key) -> loss``, or ``(loss, info)`` with a dict of scalars.
            The loss is a mean over the samples of `batch`. ``model(...)`` calls
            ``network.apply(...)`` with weights, state and a random key, and keeps the new
            state.
        params: From ``network.init``.
        state: From ``network.init`` of a network that is transformed with state.
    """

    def call(params: Any, state: Any, key: Array | None, args: Any, kwargs: Any) -> Any:
        if state is None:
            return network.apply(params, key, *args, **kwargs), None
        return network.apply(params, state, key, *args, **kwargs)

    def merge(params: Any, state: Any) -> Any:
        return params if state is None else (params, state)

    return _adapt(call, loss, params, state, merge)


def _adapt(
    call: Call,
    loss: Callable[..., Any],
    params: Any,
    model_state: Any,
    merge: Callable[[Any, Any], Any],
) -> AdaptedModel:
    def loss_fn(params: Any, model_state: Any, batch: Any, key: Array) -> Any:
        model = BoundModel(call, params, model_state, key)
        value, info = split_info(loss(model, batch, key))
        return value, (model.state, info)

    def bind(params: Any, model_state: Any) -> "BoundModel":
        return BoundModel(call, params, model_state, None)

    return AdaptedModel(loss_fn, params, model_state, merge, bind)


class BoundModel:
    """A function with weights, state and a key; each call leaves the next state."""

    def __init__(self, call: Call, params: Any, state: Any, key: Array | None) -> None:
        self._call = call
        self._params = params
        self.state = state
        self._key = key
        self._num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output; calls of one loss have different random numbers."""
        key = self._key
        if key is not None:
            key = jax.random.fold_in(key, self._num_calls)
        self._num_calls += 1
        y, self.state = self._call(self._params, self.state, key, args, kwargs)
        return y


def _fold_in_name(key: Array, name: str) -> Array:
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
