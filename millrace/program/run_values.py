"""Values that the host may change between calls, without compiling anything again.

They are scalars of a training state: hyperparameters of ``optax.inject_hyperparams``, and
scalars that a loss keeps in its model state.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.config import ConfigurationError
from millrace.program.accumulate import path_name
from millrace.program.replicas import put_on_devices

_HYPERPARAMETERS, _SCHEDULES = "hyperparams", "hyperparams_states"
"""Attributes of the state of ``optax.inject_hyperparams``."""


class RunValue(NamedTuple):
    """A scalar leaf of a model state or an optimizer state."""

    name: str
    position: int
    """Its position among the leaves of its tree."""


def find_hyperparameters(optimizer_state: Any) -> list[RunValue]:
    """Return the hyperparameters in an optimizer state that follow no schedule."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(optimizer_state)]
    scheduled = {path[: at + 2] for path in paths for at in _positions_of(path, _SCHEDULES)}
    found = []
    for position, path in enumerate(paths):
        for at in _positions_of(path, _HYPERPARAMETERS):
            schedule = (*path[:at], jax.tree_util.GetAttrKey(_SCHEDULES), path[at + 1])
            if len(path) == at + 2 and schedule not in scheduled:
                found.append(RunValue(_name(path), position))
    return found


def find_scalars(model_state: Any) -> list[RunValue]:
    """Return the scalars of a model state."""
    leaves = jax.tree_util.tree_leaves_with_path(model_state)
    return [
        RunValue(_name(path), position)
        for position, (path, leaf) in enumerate(leaves)
        if not leaf.shape and path
    ]


def check_values(values: Mapping[str, Any], *found: list[RunValue]) -> None:
    """Raise if a value is not a number, or belongs to nothing in the state."""
    known = sorted({value.name for values in found for value in values})
    for name, value in values.items():
        if name not in known:
            raise ConfigurationError(
                f"The training state has no value {name!r} to set; it has "
                f"{', '.join(known) or 'none'}. Values are hyperparameters of "
                "optax.inject_hyperparams that follow no schedule, and scalars of the "
                "model state."
            )
        if np.ndim(value):
            raise ConfigurationError(
                f"{name} must be a number, got an array of shape {np.shape(value)}."
            )


def replace_values(tree: Any, found: list[RunValue], values: Mapping[str, Any]) -> Any:
    """Return a tree with new scalars, in the dtypes and places of the old ones."""
    leaves, structure = jax.tree.flatten(tree)
    for name, position in found:
        if name in values:
            leaves[position] = replace_scalar(leaves[position], values[name])
    return jax.tree.unflatten(structure, leaves)


def replace_scalar(old: Any, value: Any) -> jax.Array:
    """Return a number like `old`: with its dtype, on its devices."""
    return put_on_devices(np.asarray(value, old.dtype), old.sharding)


def _positions_of(path: tuple[Any, ...], attribute: str) -> Iterator[int]:
    key = jax.tree_util.GetAttrKey(attribute)
    return (at for at, part in enumerate(path[:-1]) if part == key)


def _name(path: tuple[Any, ...]) -> str:
    return path_name(path[-1:])
