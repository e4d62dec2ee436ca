"""Checkpoints of earlier versions: other field names, and a file for each process."""

import contextlib
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from millrace.checkpoint.manifest import FORMAT_1_FIELDS
from millrace.checkpoint.stored import from_stored, raw_spec

_PROCESS_FILE = re.compile(r"state/\d+\.npz")
"""Name of the file that one of several processes wrote up to version 0.2."""


def find_process_files(path: Path, manifest: dict[str, Any]) -> list[Path]:
    """Return the files of a checkpoint with one file for each process, otherwise none."""
    return [path / name for name in manifest["files"] if _PROCESS_FILE.fullmatch(name)]


def read_process_files(paths: list[Path], arrays: dict[str, str], like: Any) -> Any:
    """Read the arrays of `like` from the files of all processes.

    Args:
        paths: The files; each array is in one of them, as bytes under its number.
        arrays: The arrays in the manifest, in the order in which they are numbered.
        like: A tree of some of them, or of their shapes and types.
    """
    keys = {name: str(index) for index, name in enumerate(arrays)}
    with contextlib.ExitStack() as stack:
        # Opened here: np.load does not close a file that turns out not to be an npz.
        opened = [stack.enter_context(path.open("rb")) for path in paths]
        files = [stack.enter_context(np.load(x, allow_pickle=False)) for x in opened]
        file_with = {key: file for file in files for key in file.files}

        def read(path: Any, leaf: Any) -> Any:
            key = keys[jax.tree_util.keystr(path)]
            raw = np.frombuffer(file_with[key][key].tobytes(), raw_spec(leaf).dtype)
            return from_stored(raw.copy(), leaf)

        return jax.tree_util.tree_map_with_path(read, like)


def to_format_1(tree: Any) -> Any:
    """Return a tree with the field names of format 1 in training states."""

    def rename(node: Any) -> Any:
        if not _is_renamed(node):
            return node
        return {FORMAT_1_FIELDS.get(n, n): value for n, value in node._asdict().items()}

    return jax.tree.map(rename, tree, is_leaf=_is_renamed)


def from_format_1(stored: Any, like: Any) -> Any:
    """Undo ``to_format_1``; `like` has the current structure."""

    def rename(node: Any, found: Any) -> Any:
        if not _is_renamed(node):
            return found
        fields = {name: found[FORMAT_1_FIELDS.get(name, name)] for name in node._fields}
        return type(node)(**fields)

    return jax.tree.map(rename, like, stored, is_leaf=_is_renamed)


def _is_renamed(node: Any) -> bool:
    return bool(FORMAT_1_FIELDS.keys() & set(getattr(node, "_fields", ())))
