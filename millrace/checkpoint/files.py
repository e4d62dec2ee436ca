"""One checkpoint on disk: written completely or not at all, and verified when read."""

import contextlib
import functools
import operator
import os
import re
import secrets
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.checkpoint.arrays import (
    merge_arrays,
    prepare_arrays,
    read_arrays,
    read_some_arrays,
    write_arrays,
)
from millrace.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    check_compatible,
    classify_read_errors,
    describe_arrays,
    file_checksum,
    read_manifest,
    verify_files,
    write_manifest,
)
from millrace.distributed import coordination
from millrace.durable import PARTIAL, discard, locked, make_folder, rename
from millrace.program.ema import NUM_UPDATES
from millrace.storage.address import StorageError
from millrace.storage.download import download_arrays

_AVERAGE = ".optimizer_state.average"
"""Path of a moving average of the weights; see ``millrace.program.ema``."""


class Restored(NamedTuple):
    """A checkpoint that has been read."""

    state: Any
    manifest: dict[str, Any]


def write_checkpoint(
    path: Path,
    state: Any,
    update: int,
    metadata: dict[str, Any],
    *,
    before_rename: Callable[[], None] | None = None,
) -> None:
    """Write a checkpoint of NumPy arrays; it appears only when all of it is on disk.

    All processes call this, and succeed or fail together. Each writes its part of the
    arrays; the first process creates the folder and finishes it.

    Args:
        path: The folder to write; an existing one is replaced.
        state: A named tuple. A process needs only the arrays that it has to write; the
            others may be shapes and types.
        update: Number of updates made.
        metadata: More entries of the manifest, as JSON values.
        before_rename: Called by the first process before the folder gets its name.
    """
    with contextlib.ExitStack() as stack:
        step = functools.partial(_run_collectively, path, update)

        def prepare() -> str:
            created = _create_partial(path, stack)
            prepare_arrays(created, state)
            return str(created)

        (created, *_) = step("make the folder", prepare)
        partial = Path(created)
        write_part = functools.partial(write_arrays, partial, state)
        files_per_process = step("write", write_part, in_all_processes=True)

        def finish() -> None:
            files_per_process.append(merge_arrays(partial, state))
            files = functools.reduce(operator.or_, files_per_process)
            # The arrays are on disk already; writing the manifest syncs the folder too.
            write_manifest(partial, state, update, metadata, files)
            if before_rename is not None:
                before_rename()
            # The rename is what makes the checkpoint exist, so it comes last.
            discard(path)
            rename(partial, path)

        step("finish", finish)


def _create_partial(path: Path, stack: contextlib.ExitStack) -> Path:
    """Create a folder to write in, deleted on exit if it has not been renamed."""
    make_folder(path.parent)
    # Its name is unique: a run and its resume may write the same update at once.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    partial.mkdir()
    # The lock keeps ``clear_leftovers`` of another process away from it.
    stack.enter_context(locked(partial))
    stack.callback(shutil.rmtree, partial, ignore_errors=True)
    return partial


def _run_collectively(
    path: Path,
    update: int,
    name: str,
    action: Callable[[], Any],
    *,
    in_all_processes: bool = False,
) -> list[Any]:
    """Run an action in the first process or in all; if one fails, all raise its error.

    Returns:
        The results of all processes, None for those that did nothing.
    """
    outcome: dict[str, Any] = {}
    cause: Exception | None = None
    if in_all_processes or coordination.is_first():
        try:
            outcome = {"value": action()}
        except Exception as error:
            cause = error
            outcome = {"error": short_reason(error)}
    outcomes = coordination.gather(f"checkpoint: {name}", outcome)
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if errors:
        raise CheckpointError(
            f"The checkpoint after update {update} could not be written to "
            f"{path.parent}: {errors[0]}. Earlier ones are intact; once there is space and "
            "permission to write, --resume continues from them."
        ) from cause
    return [outcome.get("value") for outcome in outcomes]


def short_reason(error: Exception) -> str:
    """Return in a few words why something could not be written."""
    if code := _system_code(error):
        return os.strerror(code)
    return getattr(error, "strerror", None) or str(error).split("\n")[0]


def _system_code(error: Exception) -> int | None:
    """Return the errno in an error message of tensorstore."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return int(code[1]) if code else None


def restore(path: Path, like: Any) -> Restored:
    """Read one checkpoint and verify that it is complete.

    Args:
        path: A folder ``update-<n>``.
        like: A state with the expected structure, shapes and types.
    """
    manifest = _read_verified(path)
    check_compatible(path, manifest["arrays"], describe_arrays(like))
    with _damage_from_any_error(path):
        return Restored(read_arrays(path, manifest, like), manifest)


def _read_verified(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files are all here and unchanged."""
    manifest = read_manifest(path)
    try:
        download_arrays(path, manifest["files"], file_checksum)
    except StorageError as error:
        raise CheckpointError(str(error)) from error
    verify_files(path, manifest)
    return manifest


def restore_part(path: Path, like: Any) -> Restored:
    """Read some fields of the state in a checkpoint, and verify that it is complete.

    Args:
        path: A folder ``update-<n>``.
        like: A named tuple with the fields to read, as ``restore`` takes it. All other
            fields, and those that are None here, may be anything: weights can be read
            whatever the optimizer was. If the run kept a moving average of the weights,
            ``params`` is the average.
    """
    manifest = _read_verified(path)
    names = [name for name in like._fields if getattr(like, name) is not None]
    prefixes = tuple(f".{name}" for name in names)
    expected = describe_arrays(like)
    arrays = {
        name: array
        for name, array in manifest["arrays"].items()
        if name.startswith(prefixes)
        and (name in expected or not name.endswith(f"['{NUM_UPDATES}']"))
    }
    check_compatible(path, arrays, expected)
    with _damage_from_any_error(path):
        has_average = any(name.startswith(_AVERAGE) for name in manifest["arrays"])
        if has_average and "params" in names and "optimizer_state" not in like._fields:
            return Restored(_read_average(path, manifest, like), manifest)
        return Restored(read_some_arrays(path, manifest, like), manifest)


class _Average(NamedTuple):
    """The part of an optimizer state that is read; see ``EmaState``."""

    average: Any


def _read_average(path: Path, manifest: dict[str, Any], like: Any) -> Any:
    """Read some fields, with the moving average of the weights in place of the weights."""
    arrays = manifest["arrays"]

    def stored(key_path: Any, leaf: Any) -> Any:
        # 16-bit weights may have an average in 32 bits.
        name = arrays[_AVERAGE + jax.tree_util.keystr(key_path)].split("[")[0]
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(name))

    average = _Average(jax.tree_util.tree_map_with_path(stored, like.params))
    rest = {name: getattr(like, name) for name in like._fields if name != "params"}
    fields = namedtuple("fields", [*rest, "optimizer_state"])(
        **rest, optimizer_state=average
    )
    found = read_some_arrays(path, manifest, fields)
    params = jax.tree.map(
        lambda a, p: np.asarray(a).astype(p.dtype),
        found.optimizer_state.average,
        like.params,
    )
    return like._replace(
        **{name: getattr(found, name) for name in rest} | {"params": params}
    )


@contextlib.contextmanager
def _damage_from_any_error(path: Path) -> Iterator[None]:
    """Treat any error as damage, except those of the system and our own.

    Orbax, tensorstore and NumPy raise all kinds of errors about malformed files.
    """
    try:
        with classify_read_errors(path):
            try:
                yield
            except Exception as error:
                if code := _system_code(error):
                    raise OSError(code, os.strerror(code)) from error
                raise
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DamagedCheckpointError(
            f"The checkpoint {path} is damaged: its arrays cannot be read ({reason})."
        ) from error
