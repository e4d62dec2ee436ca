"""Flax NNX models: objects that hold weights, moving averages and random state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from millrace.adapters.model import AdaptedModel, split_info

Paths = list[tuple[Any, ...]]


def from_nnx(model: Any, loss: Callable[[Any, Any, Array], Any]) -> AdaptedModel:
    """Return a Flax NNX model as a loss and plain trees of arrays.

    The weights are all ``nnx.Param`` with floating values. Everything else that a model
    holds is model state, except for random streams: they are derived from their own
    keys and the key of each micro-batch, so that a run can be resumed exactly.

    Args:
        model: Stays as it is. It is trained in the mode that it is in; ``model.train()``
            sets that.
        loss: ``(model, batch, key) -> loss``, or ``(loss, info)`` with a dict of scalars.
            The loss is a mean over the samples of `batch`.
    """
    parts = NnxParts(model)

    def loss_fn(params: Any, model_state: Any, batch: Any, key: Array) -> Any:
        merged = parts.merge(params, model_state, key)
        value, info = split_info(loss(merged, batch, key))
        return value, (parts.get_state(merged), info)

    return AdaptedModel(
        loss_fn,
        parts.params,
        parts.model_state,
        parts.merge,
        lambda params, model_state: set_mode(parts.merge(params, model_state), "eval"),
    )


class NnxParts:
    """A model taken apart: its graph, and its arrays in dictionaries."""

    def __init__(self, model: Any) -> None:
        from flax import nnx

        self._filters = (_is_trainable, nnx.RngKey, nnx.RngCount, ...)
        self._graph, params, keys, self._counts, rest = nnx.split(model, *self._filters)
        self.params, self._param_paths = _to_dict(params)
        self.model_state, self._state_paths = _to_dict(rest)
        self._keys, self._key_paths = _to_dict(keys)
        # On the host, and words instead of keys: a pipeline has to pack what it keeps.
        self._key_words = jax.tree.map(
            lambda key: np.asarray(jax.device_get(jax.random.key_data(key))), self._keys
        )

    def merge(self, params: Any, model_state: Any, key: Array | None = None) -> Any:
        """Return the model with these values; a key changes its random streams."""
        from flax import nnx

        keys = self._keys
        if key is not None:
            # Streams differ in their own keys, and calls in these bits.
            bits = jax.random.bits(key)
            keys = jax.tree.map(
                lambda own, words: _derive_key(own, words, bits), keys, self._key_words
            )
        return nnx.merge(
            self._graph,
            _from_dict(params, self._param_paths),
            _from_dict(keys, self._key_paths),
            nnx.to_pure_dict(self._counts),
            _from_dict(model_state, self._state_paths),
        )

    def get_state(self, model: Any) -> Any:
        """Return the model state of a merged model."""
        from flax import nnx

        *_, rest = nnx.split(model, *self._filters)
        tree, paths = _to_dict(rest)
        if paths != self._state_paths:
            names = [_name(path) for path in paths if path not in self._state_paths]
            raise ValueError(
                f"The loss added state to the model: {', '.join(names)}. Training needs "
                "the same values before and after; create them in the constructor."
            )
        return tree


def _derive_key(own: Array, words: Any, bits: Array) -> Array:
    impl = jax.random.key_impl(own)
    return jax.random.fold_in(jax.random.wrap_key_data(words, impl=impl), bits)


def set_mode(model: Any, mode: str) -> Any:
    """Return a model in the mode "train" or "eval"."""
    getattr(model, mode)()
    return model


def list_weights(model: Any) -> list[Any]:
    """Return the ``nnx.Param`` of a model."""
    from flax import nnx

    return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)]


def _is_trainable(path: Any, value: Any) -> bool:
    from flax import nnx

    del path
    is_param = isinstance(value, nnx.Param) or issubclass(
        getattr(value, "type", type(None)), nnx.Param
    )
    return is_param and jnp.issubdtype(value.dtype, jnp.floating)


def _to_dict(state: Any) -> tuple[dict[str, Any], Paths]:
    """Return the arrays of an NNX state in dictionaries with text as keys."""
    from flax import nnx

    tree: dict[str, Any] = {}
    paths: Paths = []
    for path, variable in nnx.to_flat_state(state):
        *parents, last = map(str, path)
        place = tree
        for name in parents:
            place = place.setdefault(name, {})
        # An array that is no variable stands for itself.
        is_variable = isinstance(variable, nnx.Variable)
        place[last] = variable.get_value() if is_variable else variable
        paths.append(path)
    return tree, paths


def _from_dict(tree: Any, paths: Paths) -> dict[Any, Any]:
    """Return arrays in dictionaries with the keys of NNX, some of them integers."""
    restored: dict[Any, Any] = {}
    for path in paths:
        value, place = tree, restored
        for key in path[:-1]:
            value, place = value[str(key)], place.setdefault(key, {})
        place[path[-1]] = value[str(path[-1])]
    return restored


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
