"""Read the weights in a checkpoint without the model that they belong to."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from millrace.checkpoint.files import restore_part
from millrace.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    read_manifest,
)
from millrace.checkpoint.structure import (
    UnknownContainerError,
    parse_array,
    rebuild,
    rebuild_from_names,
)
from millrace.program.step import Weights


def restore_weights(path: Path, like: Any = None) -> Weights:
    """Read the weights and the model state in a checkpoint.

    Args:
        path: A folder ``update-<n>``.
        like: Weights of the structure that was saved, or a state with `params` and
            `model_state`; needed only if they have containers that cannot be rebuilt.
    """
    manifest = read_manifest(path)
    names = list(manifest["arrays"])
    if not any(name.startswith(".params") for name in names):
        raise CheckpointError(
            f"The checkpoint {path} has no weights of a single model: its arrays are "
            f"{', '.join(names[:3])} and so on."
        )
    given: dict[str, Any] = {"params": like}
    if all(hasattr(like, name) for name in Weights._fields):
        given = {name: getattr(like, name) for name in Weights._fields}
    specs = {}
    for name in Weights._fields:
        if given.get(name) is None:
            specs[name] = _rebuild_field(path, manifest, name)
        else:
            specs[name] = jax.tree.map(_get_spec, given[name])
    return restore_part(path, Weights(**specs)).state


def _get_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    array = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _rebuild_field(path: Path, manifest: dict[str, Any], field: str) -> Any:
    """Return a field of the state with shapes and types in place of arrays."""
    try:
        specs = {
            name.removeprefix(f".{field}"): parse_array(array)
            for name, array in manifest["arrays"].items()
            if re.match(rf"\.{field}(?!\w)", name)
        }
        structure = manifest.get("structure")
        if not isinstance(structure, dict) or field not in structure:
            return rebuild_from_names(specs)
        return rebuild(structure[field], iter(specs.values()))
    except UnknownContainerError as error:
        raise CheckpointError(
            f"The weights in {path} are in containers of the class {error}, which cannot "
            "be rebuilt from the checkpoint. Pass like=, weights of the same structure, "
            "such as those that training started from."
        ) from error
    except (RuntimeError, StopIteration, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{path} is damaged: its manifest does not describe its weights ({error})."
        ) from error
