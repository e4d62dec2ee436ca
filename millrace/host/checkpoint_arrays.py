"""The arrays of a checkpoint on the disk, each written by one process.

A process alone leaves them to orbax. Of several, each writes a file of its own.
"""

import contextlib
import functools
import hashlib
import logging
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from millrace.host import group

_import_lock = threading.Lock()


def write_arrays(partial: Path, state: Any) -> dict[str, list[Any]]:
    """Write this process's arrays; return the files with their sizes and checksums."""
    if group.num_processes() == 1:
        orbax_save(partial / "state", state)
        return _inventory(partial, partial / "state")
    path = partial / "state" / f"{group.process_id():05d}.npz"
    path.parent.mkdir(exist_ok=True)
    leaves = jax.tree.leaves(state)
    # As bytes: NumPy's files know no bfloat16. What they are, the manifest says.
    own = {str(place): _as_bytes(leaves[place]) for place in own_leaves(state)}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **own)  # pyright: ignore[reportArgumentType]
        file.flush()
        os.fsync(file.fileno())
    return _inventory(partial, path)


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
    sizes = [math.prod(np.shape(x)) * np.dtype(x.dtype).itemsize for x in leaves]
    loads = [0] * group.num_processes()
    own = []
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        rank = loads.index(min(loads))
        loads[rank] += max(1, sizes[place])
        if rank == group.process_id():
            own.append(place)
    return sorted(own)


def _as_bytes(array: Any) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def read_arrays(path: Path, arrays: dict[str, str], like: Any) -> Any:
    """Read all arrays of a checkpoint.

    Args:
        path: Its folder.
        arrays: What its manifest says of them, in the order in which they were written.
        like: A state of the same structure, shapes and types.
    """
    if parts := sorted((path / "state").glob("*.npz")):
        return _read_parts(parts, arrays, like)
    target = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), like)
    return _orbax_restore(path / "state", target)


def read_some_arrays(path: Path, arrays: dict[str, str], like: Any) -> Any:
    """Read some fields of a state; `like` is a named tuple of them."""
    if parts := sorted((path / "state").glob("*.npz")):
        return _read_parts(parts, arrays, like)
    target = {
        name: jax.tree.map(lambda x: np.empty(x.shape, x.dtype), tree)
        for name, tree in like._asdict().items()
        if jax.tree.leaves(tree)
    }
    return like._replace(**_orbax_restore_part(path / "state", target))


def _read_parts(parts: list[Path], arrays: dict[str, str], like: Any) -> Any:
    """Read the arrays of `like` from what several processes have written."""
    places = {name: str(place) for place, name in enumerate(arrays)}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(np.load(p, allow_pickle=False)) for p in parts]
        holding = {place: file for file in files for place in file.files}

        def read(path: Any, leaf: Any) -> np.ndarray:
            place = places[jax.tree_util.keystr(path)]
            raw = holding[place][place].tobytes()
            return np.frombuffer(raw, leaf.dtype).reshape(leaf.shape).copy()

        return jax.tree_util.tree_map_with_path(read, like)


def _inventory(folder: Path, written: Path) -> dict[str, list[Any]]:
    files = [written] if written.is_file() else sorted(written.rglob("*"))
    return {
        str(path.relative_to(folder)): [path.stat().st_size, checksum(path)]
        for path in files
        if path.is_file()
    }


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.blake2b(digest_size=16)
        ).hexdigest()


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


def _orbax_restore(path: Path, target: Any) -> Any:
    orbax = import_orbax()
    with _orbax_reader(orbax.StandardCheckpointHandler) as checkpointer:
        restored = checkpointer.restore(
            path.absolute(), args=orbax.args.StandardRestore(target)
        )
    return jax.tree.map(np.asarray, restored)


def _orbax_restore_part(path: Path, target: Any) -> Any:
    orbax = import_orbax()
    how = jax.tree.map(
        lambda x: orbax.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype), target
    )
    with _orbax_reader(orbax.PyTreeCheckpointHandler) as checkpointer:
        return checkpointer.restore(
            path.absolute(),
            args=orbax.args.PyTreeRestore(
                item=target, restore_args=how, partial_restore=True
            ),
        )


def _orbax_reader(handler: Any) -> Any:
    """Return a checkpointer with which this process reads by itself."""
    own = import_orbax().options.MultiprocessingOptions(
        primary_host=group.process_id(), active_processes={group.process_id()}
    )
    return import_orbax().Checkpointer(
        handler(multiprocessing_options=own), multiprocessing_options=own
    )
