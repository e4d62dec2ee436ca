"""The arrays of a checkpoint on disk.

They are one orbax checkpoint, which any number of processes write together.
"""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from millrace.checkpoint import orbax_files
from millrace.checkpoint.manifest import FORMAT_1_FIELDS, file_checksum
from millrace.checkpoint.old_formats import (
    find_process_files,
    from_format_1,
    read_process_files,
    to_format_1,
)
from millrace.checkpoint.stored import from_stored, stored_like, to_stored
from millrace.distributed import coordination
from millrace.durable import sync_file, sync_folder, sync_tree

_FOLDER = "state"

# Writing: the first process prepares, all of them write, and the first one merges.


def prepare_arrays(partial: Path, state: Any) -> None:
    """Create the folder that all processes write their arrays to."""
    orbax_files.describe(partial / _FOLDER, jax.tree.map(stored_like, state))


def write_arrays(partial: Path, state: Any) -> dict[str, list[Any]]:
    """Write the arrays of this process; return its files with sizes and checksums.

    The files are on disk when this returns.
    """
    names, leaves = orbax_files.name_arrays(state), jax.tree.leaves(state)
    own = {names[index]: to_stored(leaves[index]) for index in assigned_leaves(state)}
    share = orbax_files.write_share(partial / _FOLDER, own)
    sync_tree(share)
    return _inventory(partial, sorted(share.rglob("*")))


def merge_arrays(partial: Path, state: Any) -> dict[str, list[Any]]:
    """Merge what all processes have written; return the files that are new."""
    folder = partial / _FOLDER
    shares = orbax_files.merge(folder, orbax_files.name_arrays(state))
    new = [path for path in sorted(folder.rglob("*")) if not shares & {path, *path.parents}]
    for path in [*new, folder]:
        sync_folder(path) if path.is_dir() else sync_file(path)
    return _inventory(partial, new)


def _inventory(folder: Path, files: list[Path]) -> dict[str, list[Any]]:
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, file_checksum(path)]
        for path in files
        if path.is_file()
    }


def assigned_leaves(state: Any) -> list[int]:
    """Return the indices of the leaves that this process has to write.

    If some leaves are only shapes, those are written elsewhere, and this process writes the
    rest. Otherwise all processes have all leaves, and each gets about the same number of
    bytes: the largest first, each to the process with the least so far.
    """
    leaves = jax.tree.leaves(state)
    here = [n for n, x in enumerate(leaves) if not isinstance(x, jax.ShapeDtypeStruct)]
    if len(here) < len(leaves):
        return here
    sizes = [math.prod(np.shape(x)) * x.dtype.itemsize for x in leaves]
    loads = [0] * coordination.num_processes()
    own = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        process = loads.index(min(loads))
        loads[process] += max(1, sizes[index])
        if process == coordination.process_id():
            own.append(index)
    return sorted(own)


# Reading


def read_arrays(path: Path, manifest: dict[str, Any], like: Any) -> Any:
    """Read all arrays of a checkpoint.

    Args:
        path: The folder of the checkpoint.
        manifest: Its manifest, with the arrays in the order in which they were written.
        like: A state of the same structure, shapes and types.
    """
    _check_has_arrays(manifest)
    if files := find_process_files(path, manifest):
        return read_process_files(files, manifest["arrays"], like)
    wanted = jax.tree.map(stored_like, like)
    if manifest["format"] == 1:
        stored = orbax_files.restore(path / _FOLDER, to_format_1(wanted))
        stored = from_format_1(stored, like)
    else:
        stored = orbax_files.restore(path / _FOLDER, wanted)
    return jax.tree.map(from_stored, stored, like)


def read_some_arrays(path: Path, manifest: dict[str, Any], like: Any) -> Any:
    """Read some fields of a state; `like` is a named tuple of them."""
    _check_has_arrays(manifest)
    if files := find_process_files(path, manifest):
        return read_process_files(files, manifest["arrays"], like)
    fields = {name: tree for name, tree in like._asdict().items() if jax.tree.leaves(tree)}
    old_names = FORMAT_1_FIELDS if manifest["format"] == 1 else {}
    wanted = {
        old_names.get(name, name): jax.tree.map(stored_like, tree)
        for name, tree in fields.items()
    }
    found = orbax_files.restore(path / _FOLDER, wanted, partially=True)
    stored = {name: found[old_names.get(name, name)] for name in fields}
    return like._replace(**jax.tree.map(from_stored, stored, fields))


def _check_has_arrays(manifest: dict[str, Any]) -> None:
    if not any(name.startswith(f"{_FOLDER}/") for name in manifest["files"]):
        raise ValueError("its manifest lists no file of arrays")
