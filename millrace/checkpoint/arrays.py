"""The arrays of a checkpoint on the disk, each written by one process.

A process alone leaves them to orbax. Of several, each writes a file of its own.
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

from millrace.checkpoint.manifest import FORMAT_1_FIELDS, checksum
from millrace.distributed import coordination
from millrace.durable import sync_file, sync_folder, sync_tree

_import_lock = threading.Lock()

_PART = re.compile(r"state/\d+\.npz")
"""The name of what one of several processes has written."""


def write_arrays(partial: Path, state: Any) -> dict[str, list[Any]]:
    """Write this process's arrays; return the files with their sizes and checksums.

    All of them are on the disk when this returns.
    """
    folder = partial / "state"
    if coordination.num_processes() == 1:
        orbax_save(folder, jax.tree.map(as_stored, state))
        sync_tree(folder)  # orbax leaves some of its files, and all names, to the system
        return _inventory(partial, sorted(folder.rglob("*")))
    folder.mkdir(exist_ok=True)
    path = folder / f"{coordination.process_id():05d}.npz"
    leaves = jax.tree.leaves(state)
    # As bytes: NumPy's files know no bfloat16. What they are, the manifest says.
    own = {str(place): _as_bytes(leaves[place]) for place in own_leaves(state)}
    with path.open("xb") as file:
        np.savez(file, allow_pickle=False, **own)  # pyright: ignore[reportArgumentType]
    sync_file(path)
    sync_folder(folder)
    return _inventory(partial, [path])


def own_leaves(state: Any) -> list[int]:
    """Return the places of the arrays that are this process's to write.

    Where some are known by their shapes only, those that are here. Otherwise all processes
    have all: they are shared out by size, the largest first, each to the process with the
    least so far.
    """
    leaves = jax.tree.leaves(state)
    here = [n for n, x in enumerate(leaves) if not isinstance(x, jax.ShapeDtypeStruct)]
    if len(here) < len(leaves):
        return here
    sizes = [math.prod(np.shape(x)) * x.dtype.itemsize for x in leaves]
    loads = [0] * coordination.num_processes()
    own = []
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        rank = loads.index(min(loads))
        loads[rank] += max(1, sizes[place])
        if rank == coordination.process_id():
            own.append(place)
    return sorted(own)


def is_key(leaf: Any) -> bool:
    """Tell whether an array, or its shape and type, is of typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_stored(leaf: Any) -> np.ndarray:
    """Return an array as one that orbax can write; see ``from_stored``."""
    raw = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    if raw.size == 0:
        return np.zeros(1, np.uint8)  # it writes no empty ones
    return raw.view(_stored_type(raw.dtype))


def from_stored(stored: Any, like: Any) -> Any:
    """Return an array as it was before ``as_stored``, of the shape and type of `like`.

    A NumPy array, or a JAX array where it is of typed random keys: NumPy has none.
    """
    raw = _raw(like)
    if math.prod(raw.shape) == 0:
        stored = np.empty(raw.shape, raw.dtype)
    stored = np.asarray(stored).view(raw.dtype).reshape(raw.shape)
    if not is_key(like):
        return stored
    return jax.random.wrap_key_data(stored, impl=_key_impl(like))


def _raw(like: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and type of an array, or of what random keys are made of."""
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return jax.eval_shape(jax.random.key_data, shape) if is_key(like) else shape


def _key_impl(like: Any) -> Any:
    found = []
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), shape)
    return found[0]


def _stored_like(like: Any) -> np.ndarray:
    """Return an array of the shape and type that ``as_stored`` gives one like this."""
    raw = _raw(like)
    if math.prod(raw.shape) == 0:
        return np.zeros(1, np.uint8)
    return np.empty(raw.shape, _stored_type(np.dtype(raw.dtype)))


@functools.cache
def _stored_type(dtype: np.dtype) -> np.dtype:
    """Return a type of the same size that tensorstore knows; it lacks some small ones."""
    import_orbax()
    import tensorstore

    try:
        tensorstore.dtype(dtype)
    except (TypeError, ValueError):
        return np.dtype(f"u{dtype.itemsize}")
    return dtype


def _as_bytes(leaf: Any) -> np.ndarray:
    raw = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return np.frombuffer(np.ascontiguousarray(raw).tobytes(), np.uint8)


def read_arrays(path: Path, manifest: dict[str, Any], like: Any) -> Any:
    """Read all arrays of a checkpoint, from the files that its manifest lists.

    Args:
        path: Its folder.
        manifest: Whose arrays are in the order in which they were written.
        like: A state of the same structure, shapes and types.
    """
    if parts := _parts(path, manifest):
        return _read_parts(parts, manifest["arrays"], like)
    wanted = jax.tree.map(_stored_like, like)
    if manifest["format"] == 1:
        found = _orbax_restore(path / "state", _as_format_1(wanted))
        stored = _from_format_1(found, like)
    else:
        stored = _orbax_restore(path / "state", wanted)
    return jax.tree.map(from_stored, stored, like)


def read_some_arrays(path: Path, manifest: dict[str, Any], like: Any) -> Any:
    """Read some fields of a state; `like` is a named tuple of them."""
    if parts := _parts(path, manifest):
        return _read_parts(parts, manifest["arrays"], like)
    fields = {name: tree for name, tree in like._asdict().items() if jax.tree.leaves(tree)}
    former = FORMAT_1_FIELDS if manifest["format"] == 1 else {}
    wanted = {former.get(n, n): jax.tree.map(_stored_like, t) for n, t in fields.items()}
    found = _orbax_restore(path / "state", wanted, partially=True)
    stored = {name: found[former.get(name, name)] for name in fields}
    return like._replace(**jax.tree.map(from_stored, stored, fields))


def _has_former_names(node: Any) -> bool:
    return bool(FORMAT_1_FIELDS.keys() & set(getattr(node, "_fields", ())))


def _as_format_1(tree: Any) -> Any:
    """Return a tree whose training states have the field names of format 1."""

    def rename(node: Any) -> Any:
        if not _has_former_names(node):
            return node
        return {FORMAT_1_FIELDS.get(n, n): value for n, value in node._asdict().items()}

    return jax.tree.map(rename, tree, is_leaf=_has_former_names)


def _from_format_1(stored: Any, like: Any) -> Any:
    """Undo ``_as_format_1``; `like` has the current structure."""

    def rename(node: Any, found: Any) -> Any:
        if not _has_former_names(node):
            return found
        fields = {name: found[FORMAT_1_FIELDS.get(name, name)] for name in node._fields}
        return type(node)(**fields)

    return jax.tree.map(rename, like, stored, is_leaf=_has_former_names)


def _parts(path: Path, manifest: dict[str, Any]) -> list[Path]:
    """Return the files of several processes, if they wrote the checkpoint."""
    files = manifest["files"]
    if not any(name.startswith("state/") for name in files):
        raise ValueError("its manifest lists no file of arrays")
    return [path / name for name in files if _PART.fullmatch(name)]


def _read_parts(parts: list[Path], arrays: dict[str, str], like: Any) -> Any:
    """Read the arrays of `like` from what several processes have written."""
    places = {name: str(place) for place, name in enumerate(arrays)}
    with contextlib.ExitStack() as stack:
        # Opened here: of a file that is none of its own, NumPy would leave that to chance.
        opened = [stack.enter_context(path.open("rb")) for path in parts]
        files = [stack.enter_context(np.load(x, allow_pickle=False)) for x in opened]
        holding = {place: file for file in files for place in file.files}

        def read(path: Any, leaf: Any) -> Any:
            place = places[jax.tree_util.keystr(path)]
            raw = np.frombuffer(holding[place][place].tobytes(), _raw(leaf).dtype)
            return from_stored(raw.copy(), leaf)

        return jax.tree_util.tree_map_with_path(read, like)


def _inventory(folder: Path, files: list[Path]) -> dict[str, list[Any]]:
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, checksum(path)]
        for path in files
        if path.is_file()
    }


def import_orbax() -> Any:
    with _import_lock:
        import orbax.checkpoint

        _hush_orbax()
        return orbax.checkpoint


@functools.cache
def _hush_orbax() -> None:
    """Have what goes wrong raised, which it is, and not printed as well."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    sys.unraisablehook = functools.partial(_unless_late, sys.unraisablehook)


def _unless_late(hook: Any, said: Any) -> None:
    """Leave out what a failed write's companions say when they find its loop closed."""
    if str(said.exc_value) != "Event loop is closed":
        hook(said)


def orbax_save(path: Path, state: Any) -> None:
    orbax = import_orbax()
    with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path.absolute(), args=orbax.args.StandardSave(state))


def _orbax_restore(path: Path, target: Any, *, partially: bool = False) -> Any:
    """Read arrays of the shapes and types of `target`; there may be others, partially."""
    orbax = import_orbax()
    as_they_are = orbax.RestoreArgs(restore_type=np.ndarray)
    with _orbax_reader(orbax.PyTreeCheckpointHandler) as checkpointer:
        found = checkpointer.restore(
            path.absolute(),
            args=orbax.args.PyTreeRestore(
                item=target,
                restore_args=jax.tree.map(lambda _: as_they_are, target),
                partial_restore=partially,
            ),
        )
    for read, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
        if (read.shape, read.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"an array is {read.dtype}{list(read.shape)} where the manifest says "
                f"{wanted.dtype}{list(wanted.shape)}"
            )
    return found


def _orbax_reader(handler: Any) -> Any:
    """Return a checkpointer with which this process reads by itself."""
    own = import_orbax().options.MultiprocessingOptions(
        primary_host=coordination.process_id(), active_processes={coordination.process_id()}
    )
    return import_orbax().Checkpointer(
        handler(multiprocessing_options=own), multiprocessing_options=own
    )
