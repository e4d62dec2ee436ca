"""The manifest of a checkpoint: what is in it, with sizes and checksums of all files.

A manifest is believed only if it is as it was written and has everything that a reader
looks up in it. All else is damage, which a run gets around with an older checkpoint.
"""

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import jax

from millrace.durable import finite_json, write_atomically
from millrace.versions import versions

_FORMAT = 2
_NAME = "manifest.json"

_NOT_AS_WRITTEN = {errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
"""Reasons for which a file cannot be read that lie in the checkpoint itself."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class Damaged(CheckpointError):
    """A checkpoint is not as it was written."""


def has_manifest(path: Path) -> bool:
    """Tell whether a checkpoint is complete, as far as its files' names go."""
    return (path / _NAME).is_file()


def write_manifest(
    folder: Path,
    state: Any,
    update: int,
    facts: dict[str, Any],
    files: dict[str, list[Any]],
) -> None:
    """Write the manifest of a checkpoint whose other files are on the disk.

    Args:
        folder: Where the checkpoint is being written.
        state: What was saved, or its shapes and types.
        update: The number of updates made.
        facts: What else to say, as JSON has it.
        files: Size and checksum of every file, by its path in the folder.
    """
    manifest = {
        "format": _FORMAT,
        "update": update,
        **facts,
        "arrays": describe_arrays(state),
        "versions": versions(),
        "files": files,
    }
    manifest = finite_json(manifest)
    manifest["checksum"] = _checksum_of(manifest)
    write_atomically(folder / _NAME, json.dumps(manifest, indent=1))


def describe_arrays(state: Any) -> dict[str, str]:
    """Describe every array of a state, by its path, in the order of the leaves."""
    return {
        jax.tree_util.keystr(path): f"{x.dtype.name}{list(x.shape)}"
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says about itself."""
    try:
        with reading(path):
            manifest = json.loads((path / _NAME).read_bytes())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged, without a manifest: {error}.") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if type(found) is int and found > _FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {found}; this version reads {_FORMAT}."
        )
    is_known = type(found) is int and 1 <= found <= _FORMAT
    is_whole = is_known and manifest.pop("checksum", None) == _checksum_of(manifest)
    if not is_whole or not _has_its_entries(manifest):
        raise Damaged(f"{path} is damaged: {_NAME} is not as it was written.")
    if found == 1:
        manifest["arrays"] = {
            _FORMER_FIELD.sub(_current_name, name): array
            for name, array in manifest["arrays"].items()
        }
    return manifest


FORMAT_1_FIELDS = {"model_state": "carried", "optimizer_state": "optimiser_state"}
"""Fields of a training state that had another name in checkpoint format 1."""
_FORMER_FIELD = re.compile(r"(?<!['\w])\.(carried|optimiser_state)\b")


def _current_name(former: re.Match[str]) -> str:
    current = {old: new for new, old in FORMAT_1_FIELDS.items()}
    return f".{current[former[1]]}"


def _checksum_of(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _has_its_entries(manifest: dict[str, Any]) -> bool:
    """Tell whether a manifest has what every reader relies on, each of its own type."""
    update, arrays, files = (manifest.get(n) for n in ("update", "arrays", "files"))
    return (
        type(update) is int
        and update >= 0
        and isinstance(arrays, dict)
        and all(isinstance(said, str) for said in arrays.values())
        and isinstance(files, dict)
        and all(_is_file_entry(name, entry) for name, entry in files.items())
        and isinstance(manifest.get("scores", {}), dict)
    )


def _is_file_entry(name: str, entry: Any) -> bool:
    path = PurePosixPath(name)
    return (
        not path.is_absolute()
        and ".." not in path.parts
        and isinstance(entry, list)
        and [type(part) for part in entry] == [int, str]
    )


def check_inventory(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuse a checkpoint of which a file is gone, or is not as it was written."""
    for name, (size, written) in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"The checkpoint {folder} is damaged: {name} is gone.")
        with reading(folder):
            found = path.stat().st_size
            is_same = found == size and checksum(path) == written
        if not is_same:
            raise Damaged(
                f"The checkpoint {folder} is damaged: {name} is not as it was written "
                f"({found} bytes, {size} were written)."
            )


def check_fits(path: Path, found: dict[str, str], wanted: dict[str, str]) -> None:
    """Refuse a checkpoint of other arrays than those that are wanted."""
    # Orbax would quietly convert types, and says little about structures.
    differing = [
        f"{name} is {found.get(name, 'not in it')}, this model has "
        f"{wanted.get(name, 'no such array')}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]
    if differing:
        rest = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise CheckpointError(
            f"The checkpoint {path} does not fit this model: "
            f"{'; '.join(differing[:3])}{rest}."
        )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tell a damaged checkpoint from one that cannot be read at the moment."""
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_AS_WRITTEN:
            raise Damaged(f"{path} is damaged: {error}.") from error
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def checksum(path: Path) -> str:
    """Return a checksum of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.blake2b(digest_size=16)
        ).hexdigest()
