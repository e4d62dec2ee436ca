"""The files of an orbax checkpoint, written by any number of processes.

Orbax itself would write NumPy arrays in process 0 only, and let processes wait for one
another with collectives on the devices, which cannot be used from a thread. Here, the first
process describes all arrays with orbax. Then each process writes its share of them with
tensorstore, to a folder with the name and the layout that orbax would have used. At the
end, the first process lets orbax merge the shares.
"""

import collections
import functools
import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from millrace.distributed import coordination

_import_lock = threading.Lock()

_OCDBT = {
    "driver": "ocdbt",
    "assume_config": True,
    "target_data_file_size": 2**31,
    "config": {
        "manifest_kind": "single",
        "max_inline_value_bytes": 1024,
        "max_decoded_node_bytes": 100_000_000,
    },
}
"""The database of a share. Orbax merges it into one with these settings."""

_MAX_CHUNK_BYTES = 2**30
"""Larger arrays are split, so that every part fits into a file of the database."""


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


# Writing


def name_arrays(tree: Any) -> list[str]:
    """Return the name that orbax gives to each array of a tree, in leaf order."""
    names = import_orbax().tree.get_param_names(tree, include_empty_nodes=False)
    return jax.tree.leaves(names)


def describe(folder: Path, tree: Any) -> None:
    """Create an orbax checkpoint without contents, and a folder for each process.

    Args:
        folder: The folder to create.
        tree: NumPy arrays of the shapes and types that will be written.
    """
    orbax = import_orbax()
    _check_names(name_arrays(tree))

    class WrittenLater(orbax.type_handlers.NumpyHandler):
        """Leaves arrays out, which orbax then only describes."""

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
            return []

    types = orbax.type_handlers.create_type_handler_registry((np.ndarray, WrittenLater()))
    with _checkpointer(type_handler_registry=types) as checkpointer:
        checkpointer.save(folder.absolute(), args=orbax.args.PyTreeSave(tree))
    for process in range(coordination.num_processes()):
        # Here, because machines that share files may not see new names of others at once.
        _share(folder, process).mkdir()


def _share(folder: Path, process: int) -> Path:
    return folder / f"ocdbt.process_{process}"  # the names that orbax merges


def _check_names(names: list[str]) -> None:
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise ValueError(
                f"{count} arrays would have the name {name}; do not use periods in keys"
            )


def write_share(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """Write the arrays of this process; return its folder, which is not synced.

    Args:
        folder: The folder of the checkpoint; see ``describe``.
        arrays: The arrays by their names; see ``name_arrays``.
    """
    import tensorstore

    share = _share(folder, coordination.process_id())
    context = tensorstore.Context({"file_io_sync": False})
    opened = [
        tensorstore.open(_array_spec(share, name, array), context=context, create=True)
        for name, array in arrays.items()
    ]
    written = [
        store.result().write(array, can_reference_source_data_indefinitely=True)
        for store, array in zip(opened, arrays.values(), strict=True)
    ]
    for future in written:
        future.result()
    return share


def _array_spec(share: Path, name: str, array: np.ndarray) -> dict[str, Any]:
    """Return how tensorstore writes an array, with the layout of orbax."""
    base = {"driver": "file", "path": f"{share.absolute()}/"}
    return {
        "driver": "zarr",
        "kvstore": _OCDBT | {"base": base, "path": f"{name}/"},
        "metadata": {"compressor": {"id": "zstd", "level": 1}},
        "schema": {
            "dtype": array.dtype.name,
            "domain": {"shape": list(array.shape)},
            "chunk_layout": {"chunk": {"elements": _MAX_CHUNK_BYTES // array.itemsize}},
        },
        # Otherwise, reading could not tell zeros from an array that is missing.
        "store_data_equal_to_fill_value": True,
    }


def merge(folder: Path, names: list[str]) -> set[Path]:
    """Merge the shares of all processes into one checkpoint; return their folders.

    Args:
        folder: The folder of the checkpoint; see ``describe``.
        names: The names of all arrays, none of which may be missing.
    """
    with _checkpointer() as checkpointer:
        checkpointer.handler.finalize(folder.absolute())
    # Orbax merges what it finds, and does not know what there should be.
    if missing := set(names) - _list_arrays(folder):
        raise RuntimeError(f"{len(missing)} arrays, such as {min(missing)}, are missing")
    return {_share(folder, process) for process in range(coordination.num_processes())}


def _list_arrays(folder: Path) -> set[str]:
    """Return the names of the arrays in a checkpoint."""
    import tensorstore

    base = {"driver": "file", "path": f"{folder.absolute()}/"}
    keys = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().list()
    ending = b"/.zarray"
    found = (key for key in keys.result() if key.endswith(ending))
    return {key.removesuffix(ending).decode() for key in found}


# Reading


def restore(folder: Path, target: Any, *, partially: bool = False) -> Any:
    """Read arrays of the shapes and types of `target`.

    Args:
        folder: The folder that was written.
        target: The arrays to read.
        partially: Whether the folder may contain others, which are skipped.
    """
    orbax = import_orbax()
    as_numpy = orbax.RestoreArgs(restore_type=np.ndarray)
    with _checkpointer() as checkpointer:
        found = checkpointer.restore(
            folder.absolute(),
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


def _checkpointer(**options: Any) -> Any:
    """Return a checkpointer that does not wait for other processes."""
    orbax = import_orbax()
    own = orbax.options.MultiprocessingOptions(
        primary_host=coordination.process_id(), active_processes={coordination.process_id()}
    )
    handler = orbax.PyTreeCheckpointHandler(multiprocessing_options=own, **options)
    return orbax.Checkpointer(handler, multiprocessing_options=own)
