"""The arrays of a checkpoint on disk.

A single process writes them with orbax. With several, each array is written by one of
them, and each process writes one file.
"""

import contextlib
import functools
import logging
import math
import re
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.checkpoint.manifest import FORMAT_1_FIELDS, file_checksum
from millrace.distributed import coordination
from millrace.durable import sync_file, sync_folder, sync_tree

_import_lock = threading.Lock()

_PROCESS_FILE = re.compile(r"state/\d+\.npz")
"""Name of the file that one of several processes writes."""


def write_arrays(partial: Path, state: Any) -> dict[str, list[Any]]:
    """Write the arrays of this process; return its files with sizes and checksums.

    The files are on disk when this returns.
    """
    folder = partial / "state"
    if coordination.num_processes() == 1:
        orbax_save(folder, jax.tree.map(to_stored, state))
        sync_tree(folder)  # orbax does not sync all of its files, nor their names
        return _inventory(partial, sorted(folder.rglob("*")))
    folder.mkdir(exist_ok=True)
    path = folder / f"{coordination.process_id():05d}.npz"
    leaves = jax.tree.leaves(state)
    # As bytes, because npz files have no bfloat16; the manifest has the types.
    own = {str(index): _as_bytes(leaves[index]) for index in assigned_leaves(state)}
    with path.open("xb") as file:
        np.savez(file, allow_pickle=False, **own)  # pyright: ignore[reportArgumentType]
    sync_file(path)
    sync_folder(folder)
    return _inventory(partial, [path])


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


def is_prng_key(leaf: Any) -> bool:
    """Whether an array, or its shape and type, holds typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_stored(leaf: Any) -> np.ndarray:
    """Convert an array to one that orbax can write; see ``from_stored``."""
    raw = np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
    if raw.size == 0:
        return np.zeros(1, np.uint8)  # orbax cannot write empty arrays
    return raw.view(_stored_type(raw.dtype))


def from_stored(stored: Any, like: Any) -> Any:
    """Undo ``to_stored``: return an array of the shape and type of `like`.

    It is a NumPy array, or a JAX array for typed random keys, which NumPy does not have.
    """
    raw = _raw_spec(like)
    if math.prod(raw.shape) == 0:
        stored = np.empty(raw.shape, raw.dtype)
    stored = np.asarray(stored).view(raw.dtype).reshape(raw.shape)
    if not is_prng_key(like):
        return stored
    return jax.random.wrap_key_data(stored, impl=_key_impl(like))


def _raw_spec(like: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and type of an array, or of the data of random keys."""
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return jax.eval_shape(jax.random.key_data, shape) if is_prng_key(like) else shape


def _key_impl(like: Any) -> Any:
    # jax.random.key_impl takes arrays only, so it is called while tracing one.
    impls = []
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), shape)
    return impls[0]


def _stored_like(like: Any) -> np.ndarray:
    """Return an array of the shape and type that ``to_stored`` would return."""
    raw = _raw_spec(like)
    if math.prod(raw.shape) == 0:
        return np.zeros(1, np.uint8)
    return np.empty(raw.shape, _stored_type(np.dtype(raw.dtype)))


@functools.cache
def _stored_type(dtype: np.dtype) -> np.dtype:
    """Return `dtype`, or an unsigned type of its size if tensorstore does not know it."""
    import_orbax()
    import tensorstore

    try:
        tensorstore.dtype(dtype)
    except (TypeError, ValueError):
        return np.dtype(f"u{dtype.itemsize}")
    return dtype


def _as_bytes(leaf: Any) -> np.ndarray:
    raw = np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
    return np.frombuffer(np.ascontiguousarray(raw).tobytes(), np.uint8)


def read_arrays(path: Path, manifest: dict[str, Any], like: Any) -> Any:
    """Read all arrays of a checkpoint.

    Args:
        path: The folder of the checkpoint.
        manifest: Its manifest, with the arrays in the order in which they were written.
        like: A state of the same structure, shapes and types.
    """
    if files := _process_files(path, manifest):
        return _read_process_files(files, manifest["arrays"], like)
    wanted = jax.tree.map(_stored_like, like)
    if manifest["format"] == 1:
        stored = _orbax_restore(path / "state", _to_format_1(wanted))
        stored = _from_format_1(stored, like)
    else:
        stored = _orbax_restore(path / "state", wanted)
    return jax.tree.map(from_stored, stored, like)


def read_some_arrays(path: Path, manifest: dict[str, Any], like: Any) -> Any:
    """Read some fields of a state; `like` is a named tuple of them."""
    if files := _process_files(path, manifest):
        return _read_process_files(files, manifest["arrays"], like)
    fields = {name: tree for name, tree in like._asdict().items() if jax.tree.leaves(tree)}
    old_names = FORMAT_1_FIELDS if manifest["format"] == 1 else {}
    wanted = {
        old_names.get(name, name): jax.tree.map(_stored_like, tree)
        for name, tree in fields.items()
    }
    found = _orbax_restore(path / "state", wanted, partially=True)
    stored = {name: found[old_names.get(name, name)] for name in fields}
    return like._replace(**jax.tree.map(from_stored, stored, fields))


def _is_renamed(node: Any) -> bool:
    return bool(FORMAT_1_FIELDS.keys() & set(getattr(node, "_fields", ())))


def _to_format_1(tree: Any) -> Any:
    """Return a tree with the field names of format 1 in training states."""

    def rename(node: Any) -> Any:
        if not _is_renamed(node):
            return node
        return {FORMAT_1_FIELDS.get(n, n): value for n, value in node._asdict().items()}

    return jax.tree.map(rename, tree, is_leaf=_is_renamed)


def _from_format_1(stored: Any, like: Any) -> Any:
    """Undo ``_to_format_1``; `like` has the current structure."""

    def rename(node: Any, found: Any) -> Any:
        if not _is_renamed(node):
            return found
        fields = {name: found[FORMAT_1_FIELDS.get(name, name)] for name in node._fields}
        return type(node)(**fields)

    return jax.tree.map(rename, like, stored, is_leaf=_is_renamed)


def _process_files(path: Path, manifest: dict[str, Any]) -> list[Path]:
    """Return the files of a checkpoint that several processes wrote, otherwise none."""
    files = manifest["files"]
    if not any(name.startswith("state/") for name in files):
        raise ValueError("its manifest lists no file of arrays")
    return [path / name for name in files if _PROCESS_FILE.fullmatch(name)]


def _read_process_files(paths: list[Path], arrays: dict[str, str], like: Any) -> Any:
    """Read the arrays of `like` from the files that several processes wrote."""
    keys = {name: str(index) for index, name in enumerate(arrays)}
    with contextlib.ExitStack() as stack:
        # Opened here: np.load does not close a file that turns out not to be an npz.
        opened = [stack.enter_context(path.open("rb")) for path in paths]
        files = [stack.enter_context(np.load(x, allow_pickle=False)) for x in opened]
        file_with = {key: file for file in files for key in file.files}

        def read(path: Any, leaf: Any) -> Any:
            key = keys[jax.tree_util.keystr(path)]
            raw = np.frombuffer(file_with[key][key].tobytes(), _raw_spec(leaf).dtype)
            return from_stored(raw.copy(), leaf)

        return jax.tree_util.tree_map_with_path(read, like)


def _inventory(folder: Path, files: list[Path]) -> dict[str, list[Any]]:
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, file_checksum(path)]
        for path in files
        if path.is_file()
    }


def import_orbax() -> Any:
    """Import orbax; it takes a second, and may be called from several threads."""
    with _import_lock:
        import orbax.checkpoint

        _silence_orbax()
        return orbax.checkpoint


@functools.cache
def _silence_orbax() -> None:
    """Keep orbax from printing errors that it raises as well."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    sys.unraisablehook = functools.partial(_skip_closed_loop, sys.unraisablehook)


def _skip_closed_loop(hook: Any, unraisable: Any) -> None:
    """Skip the errors of tasks that outlive a failed write, whose loop is closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)


def orbax_save(path: Path, state: Any) -> None:
    """Write arrays to a new folder."""
    orbax = import_orbax()
    with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path.absolute(), args=orbax.args.StandardSave(state))


def _orbax_restore(path: Path, target: Any, *, partially: bool = False) -> Any:
    """Read arrays of the shapes and types of `target`.

    Args:
        path: The folder that orbax wrote.
        target: The arrays to read.
        partially: Whether the folder may contain others, which are skipped.
    """
    orbax = import_orbax()
    as_numpy = orbax.RestoreArgs(restore_type=np.ndarray)
    with _orbax_reader(orbax.PyTreeCheckpointHandler) as checkpointer:
        found = checkpointer.restore(
            path.absolute(),
            args=orbax.args.PyTreeRestore(
                item=target,
                restore_args=jax.tree.map(lambda _: as_numpy, target),
                partial_restore=partially,
            ),
        )
    for read, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
        if (read.shape, read.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"an array is {read.dtype}{list(read.shape)}, but "
                f"{wanted.dtype}{list(wanted.shape)} in the manifest"
            )
    return found


def _orbax_reader(handler: Any) -> Any:
    """Return a checkpointer that reads without waiting for other processes."""
    own = import_orbax().options.MultiprocessingOptions(
        primary_host=coordination.process_id(), active_processes={coordination.process_id()}
    )
    return import_orbax().Checkpointer(
        handler(multiprocessing_options=own), multiprocessing_options=own
    )
