"""The manifest of a checkpoint: its metadata, and size and checksum of every file.

A manifest must be unchanged since it was written and contain everything that readers rely
on. Otherwise the checkpoint is damaged, and a run falls back to an older one.
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

from millrace.checkpoint.structure import describe_structure
from millrace.durable import finite_json, write_atomically
from millrace.versions import versions

_FORMAT = 2
_NAME = "manifest.json"

_DAMAGE_ERRNOS = {errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
"""Read errors caused by the checkpoint itself. Others, such as EACCES, may go away."""

FORMAT_1_FIELDS = {"model_state": "carried", "optimizer_state": "optimiser_state"}
"""Fields of a training state with another name in checkpoint format 1."""
_FORMAT_1_FIELD = re.compile(r"(?<!['\w])\.(carried|optimiser_state)\b")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint has changed since it was written, or is incomplete."""


def has_manifest(path: Path) -> bool:
    """Whether a checkpoint has a manifest, which is written last."""
    return (path / _NAME).is_file()


def update_manifest(folder: Path, **entries: Any) -> None:
    """Replace entries in the manifest of a checkpoint; older formats stay as they are."""
    manifest = read_manifest(folder)
    if manifest["format"] == _FORMAT:
        _write(folder, manifest | entries)


def write_manifest(
    folder: Path,
    state: Any,
    update: int,
    metadata: dict[str, Any],
    files: dict[str, list[Any]],
) -> None:
    """Write the manifest of a checkpoint whose other files are on disk.

    Args:
        folder: Where the checkpoint is being written.
        state: The saved state, or its shapes and types.
        update: Number of updates made.
        metadata: More entries, as JSON values.
        files: Size and checksum of every file, by its path in the folder.
    """
    manifest = {
        "format": _FORMAT,
        "update": update,
        **metadata,
        "arrays": describe_arrays(state),
        "structure": {
            name: describe_structure(getattr(state, name))
            for name in ("params", "model_state")
            if hasattr(state, name)
        },
        "versions": versions(),
        "files": files,
    }
    _write(folder, manifest)


def _write(folder: Path, manifest: dict[str, Any]) -> None:
    manifest = finite_json(manifest)
    manifest["checksum"] = manifest_checksum(manifest)
    write_atomically(folder / _NAME, json.dumps(manifest, indent=1))


def describe_arrays(state: Any) -> dict[str, str]:
    """Return type and shape of every array of a state by its path, in leaf order."""
    return {
        jax.tree_util.keystr(path): f"{x.dtype.name}{list(x.shape)}"
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, with the field names of the current format."""
    try:
        with classify_read_errors(path):
            manifest = json.loads((path / _NAME).read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path} is damaged: its manifest cannot be parsed ({error})."
        ) from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is int and version > _FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {version}; this version of millrace reads up to "
            f"{_FORMAT}."
        )
    is_known = type(version) is int and 1 <= version <= _FORMAT
    is_intact = is_known and manifest.pop("checksum", None) == manifest_checksum(manifest)
    if not is_intact or not _has_required_entries(manifest):
        raise DamagedCheckpointError(
            f"{path} is damaged: {_NAME} has changed since it was written."
        )
    if version == 1:
        manifest["arrays"] = {
            _FORMAT_1_FIELD.sub(_current_name, name): array
            for name, array in manifest["arrays"].items()
        }
    return manifest


def _current_name(old_field: re.Match[str]) -> str:
    current = {old: new for new, old in FORMAT_1_FIELDS.items()}
    return f".{current[old_field[1]]}"


def manifest_checksum(manifest: dict[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _has_required_entries(manifest: dict[str, Any]) -> bool:
    """Whether a manifest has the entries that readers rely on, with the right types."""
    update, arrays, files = (manifest.get(n) for n in ("update", "arrays", "files"))
    return (
        type(update) is int
        and update >= 0
        and isinstance(arrays, dict)
        and all(isinstance(array, str) for array in arrays.values())
        and isinstance(files, dict)
        and all(_is_file_entry(name, entry) for name, entry in files.items())
        and isinstance(manifest.get("scores", {}), dict)
    )


def _is_file_entry(name: str, entry: Any) -> bool:
    # Names are joined to the folder, and must not lead out of it.
    path = PurePosixPath(name)
    return (
        not path.is_absolute()
        and ".." not in path.parts
        and isinstance(entry, list)
        and [type(part) for part in entry] == [int, str]
    )


def verify_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise an error if a file of a checkpoint is missing or has changed."""
    for name, (size, digest) in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpointError(
                f"The checkpoint {folder} is damaged: {name} is missing."
            )
        with classify_read_errors(folder):
            actual_size = path.stat().st_size
            is_same = actual_size == size and file_checksum(path) == digest
        if not is_same:
            raise DamagedCheckpointError(
                f"The checkpoint {folder} is damaged: {name} has changed since it was "
                f"written ({actual_size} bytes now, {size} then)."
            )


def check_compatible(path: Path, found: dict[str, str], wanted: dict[str, str]) -> None:
    """Raise an error if the arrays of a checkpoint are not those of this model."""
    # Orbax would convert types silently, and its errors about structures say little.
    differing = [
        f"{name} is {found.get(name, 'missing')}, this model has "
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
def classify_read_errors(path: Path) -> Iterator[None]:
    """Turn OSError into an error that tells damage from a temporary failure."""
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGE_ERRNOS:
            raise DamagedCheckpointError(f"{path} is damaged: {error}.") from error
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def file_checksum(path: Path) -> str:
    """Return a checksum of the contents of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.blake2b(digest_size=16)
        ).hexdigest()
