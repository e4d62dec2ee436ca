"""Equinox models: pytrees whose floating arrays are weights."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from millrace.adapters.model import AdaptedModel, split_info


def from_equinox(model: Any, loss: Callable[..., Any], state: Any = None) -> AdaptedModel:
    """Return an Equinox model as a loss and plain trees of arrays.

    Args:
        model: Its floating arrays are the weights; all else stays as it is.
        loss: ``(model, batch, key) -> loss``, or ``(loss, info)`` with a dict of scalars.
            With `state`, ``(model, state, batch, key) -> (loss, state)``, or ``(loss,
            (state, info))``. The loss is a mean over the samples of `batch`.
        state: From ``eqx.nn.make_with_state``, for models with batch norm and the like.
    """
    weights, values = EquinoxArrays(model), EquinoxArrays(state, whole=True)

    def loss_fn(params: Any, model_state: Any, batch: Any, key: Array) -> Any:
        merged = weights.merge(params)
        if state is None:
            value, info = split_info(loss(merged, batch, key))
            return value, (model_state, info)
        value, rest = loss(merged, stage_new_values(values.merge(model_state)), batch, key)
        new, info = rest if isinstance(rest, tuple) else (rest, {})
        return value, (values.get(new), info)

    def merge(params: Any, model_state: Any) -> Any:
        merged = weights.merge(params)
        return merged if state is None else (merged, values.merge(model_state))

    def bind(params: Any, model_state: Any) -> Any:
        from equinox.nn import inference_mode

        merged = inference_mode(weights.merge(params))
        if state is None:
            return merged
        return merged, stage_new_values(values.merge(model_state))

    initial = None if state is None else values.arrays
    return AdaptedModel(loss_fn, weights.arrays, initial, merge, bind)


class EquinoxArrays:
    """The arrays of a pytree in a dictionary by path, and the rest of the pytree.

    Args:
        tree: A model, or its state.
        whole: Whether to take all arrays; otherwise those with floating values.
    """

    def __init__(self, tree: Any, *, whole: bool = False) -> None:
        import equinox as eqx

        self._is_taken = eqx.is_array if whole else eqx.is_inexact_array
        taken, self._rest = eqx.partition(tree, self._is_taken)
        named, self._structure = jax.tree_util.tree_flatten_with_path(taken)
        self._names = [
            jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named
        ]
        assert len(set(self._names)) == len(self._names), "paths are unique"
        self.arrays = {n: leaf for n, (_, leaf) in zip(self._names, named, strict=True)}

    def merge(self, arrays: dict[str, Any]) -> Any:
        """Return the pytree with these arrays."""
        import equinox as eqx

        leaves = [arrays[name] for name in self._names]
        return eqx.combine(jax.tree.unflatten(self._structure, leaves), self._rest)

    def get(self, tree: Any) -> dict[str, Any]:
        """Return the arrays of a pytree of the same structure."""
        import equinox as eqx

        leaves = jax.tree.leaves(eqx.filter(tree, self._is_taken))
        return dict(zip(self._names, leaves, strict=True))


def stage_new_values(state: Any) -> Any:
    """Return an ``eqx.nn.State`` that takes constants as new values in every program.

    ``State.set`` also compares the shardings of the old value and the new one. Inside
    ``jax.shard_map``, arrays have the sharding of the mesh and constants have none, so
    that ``BatchNorm`` with ``mode="ema"`` could not set its flag.
    """
    values, names = state.tree_flatten()
    return _make_staged_state().tree_unflatten(names, values)


def _stage(value: Any) -> Array:
    """Return a value as the result of an operation; only those have the mesh's sharding."""
    array = jnp.asarray(value)
    return jax.lax.select(jnp.array(True), array, array)


@functools.cache
def _make_staged_state() -> type[Any]:
    from equinox.nn import State

    @jax.tree_util.register_pytree_node_class
    class StagedState(State):
        """A state whose new values may be constants."""

        def set(self, item: Any, value: Any) -> Any:
            return stage_new_values(super().set(item, jax.tree.map(_stage, value)))

        def substate(self, pytree: Any) -> Any:
            return stage_new_values(super().substate(pytree))

        def update(self, substate: Any) -> Any:
            values, names = substate.tree_flatten()
            plain = State.tree_unflatten(names, values)
            return stage_new_values(super().update(plain))

    return StagedState
