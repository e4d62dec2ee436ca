"""One checkpoint: a folder, written whole or not at all, and checked when it is read."""

import contextlib
import functools
import operator
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from millrace.checkpoint.arrays import read_arrays, read_some_arrays, write_arrays
from millrace.checkpoint.manifest import (
    CheckpointError,
    Damaged,
    check_fits,
    check_inventory,
    describe_arrays,
    read_manifest,
    reading,
    write_manifest,
)
from millrace.distributed import coordination
from millrace.durable import PARTIAL, discard, locked, make_folder, rename


class Restored(NamedTuple):
    """A checkpoint, read back."""

    state: Any
    manifest: dict[str, Any]


def write_checkpoint(
    path: Path,
    state: Any,
    update: int,
    facts: dict[str, Any],
    *,
    first: Callable[[], None] | None = None,
) -> None:
    """Write a checkpoint of NumPy arrays; it is there only when all of it is on the disk.

    Args:
        path: The folder it becomes; one that is there already is replaced.
        state: A named tuple. Of several processes, each needs only the arrays that are
            its own to write; all of them call this, and succeed or fail together.
        update: The number of updates made.
        facts: What else its manifest says, as JSON has it.
        first: Called by the first process before the folder gets its name.
    """
    with contextlib.ExitStack() as stack:
        writing = functools.partial(together, path, update)
        (made, *_) = writing("make the folder", lambda: _begin(path, stack))
        partial = Path(made)
        write_part = functools.partial(write_arrays, partial, state)
        files = writing("write", write_part, everybody=True)

        def finish() -> None:
            listed = functools.reduce(operator.or_, files)
            # The arrays are on the disk; this puts the rest and all names there.
            write_manifest(partial, state, update, facts, listed)
            if first is not None:
                first()
            discard(path)
            rename(partial, path)

        writing("finish", finish)


def _begin(path: Path, stack: contextlib.ExitStack) -> str:
    """Make a folder to write in, which is deleted if it does not become a checkpoint."""
    make_folder(path.parent)
    # A name of its own: the same update may be written twice, in a run and its resume.
    made = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    made.mkdir()
    stack.enter_context(locked(made))
    stack.callback(shutil.rmtree, made, ignore_errors=True)
    return str(made)


def together(
    path: Path,
    update: int,
    what: str,
    action: Callable[[], Any],
    *,
    everybody: bool = False,
) -> list[Any]:
    """Do something in the first process or in all; where it fails in one, all fail."""
    found: dict[str, Any] = {}
    cause: Exception | None = None
    if everybody or coordination.is_first():
        try:
            found = {"value": action()}
        except Exception as error:
            cause = error
            found = {"error": reason(error)}
    each = coordination.gather(f"checkpoint: {what}", found)
    errors = [said["error"] for said in each if "error" in said]
    if errors:
        raise CheckpointError(
            f"The checkpoint after update {update} could not be written to "
            f"{path.parent}: {errors[0]}. Earlier ones are intact; with space and "
            "permission restored, --resume continues from them."
        ) from cause
    return [said.get("value") for said in each]


def reason(error: Exception) -> str:
    """Say in a few words why something could not be written."""
    if code := _system_code(error):
        return os.strerror(code)
    return getattr(error, "strerror", None) or str(error).split("\n")[0]


def _system_code(error: Exception) -> int | None:
    """Return the system's number of an error that tensorstore reports."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return int(code[1]) if code else None


def restore(path: Path, like: Any) -> Restored:
    """Read one checkpoint, checking that all of it is there.

    Args:
        path: A folder ``update-<n>``.
        like: A state of the same structure; its shapes and types are what is expected.
    """
    manifest = read_manifest(path)
    check_inventory(path, manifest)
    check_fits(path, manifest["arrays"], describe_arrays(like))
    with _reading_arrays(path):
        return Restored(read_arrays(path, manifest, like), manifest)


def restore_part(path: Path, like: Any) -> Restored:
    """Read some fields of the state in a checkpoint, checking all of it.

    Args:
        path: A folder ``update-<n>``.
        like: A named tuple with the fields to read, as ``restore`` takes it. Other
            fields of the state, and those that are None here, may be anything: weights
            can be read whatever optimizer was used.
    """
    manifest = read_manifest(path)
    check_inventory(path, manifest)
    named = [name for name in like._fields if getattr(like, name) is not None]
    fields = tuple(f".{name}" for name in named)
    found = {n: array for n, array in manifest["arrays"].items() if n.startswith(fields)}
    check_fits(path, found, describe_arrays(like))
    with _reading_arrays(path):
        return Restored(read_some_arrays(path, manifest, like), manifest)


@contextlib.contextmanager
def _reading_arrays(path: Path) -> Iterator[None]:
    """Take what the libraries say about odd files for damage, which it is."""
    try:
        with reading(path):
            try:
                yield
            except Exception as error:
                if code := _system_code(error):
                    raise OSError(code, os.strerror(code)) from error
                raise
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise Damaged(
            f"The checkpoint {path} is damaged: its arrays cannot be read ({said})."
        ) from error
