"""What a working copy has, and what of it belongs in object storage."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from millrace.durable import PARTIAL, write_atomically

MANIFEST = "manifest.json"
"""The file of a checkpoint that is written last: without it, there is no checkpoint."""

RECORD = ".remote.json"
"""The file in a working copy that says what is known about it."""
_CONFIG = "config.yml"
_CHECKPOINT = re.compile(r"update-\d+.*", re.ASCII)
_UNFINISHED = (PARTIAL, ".damaged")


class Record(NamedTuple):
    """What is known about a working copy; saved in it."""

    writer: str | None = None
    """The name of the run that wrote it on this machine; None if it was only read."""
    versions: dict[str, str] = {}  # noqa: RUF012  # never changed
    """The versions of the files that were downloaded."""

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """Read the record of a working copy; an empty one if there is none."""
        try:
            values = json.loads((folder / RECORD).read_text())
            return cls(values["writer"], dict(values["versions"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    def write(self, folder: Path) -> None:
        """Save the record in a working copy."""
        write_atomically(folder / RECORD, json.dumps(self._asdict()))


def forget(folder: Path) -> None:
    """Delete the record of a working copy."""
    (folder / RECORD).unlink(missing_ok=True)


class Contents(NamedTuple):
    """Names of files, relative to the run directory."""

    checkpoints: dict[str, set[str]]
    """The files of each complete checkpoint, by the name of its folder."""
    others: set[str]
    """Files of no checkpoint."""


def sort_files(names: Iterable[str]) -> Contents:
    """Return which files belong to checkpoints.

    Files that are being written, those of checkpoints without a manifest and hidden files
    are left out.
    """
    names = [name for name in names if _is_shown(name)]
    folders = {str(PurePosixPath(n).parent) for n in names if n.endswith(f"/{MANIFEST}")}
    checkpoints: dict[str, set[str]] = {folder: set() for folder in folders}
    others = set()
    for name in names:
        parents = [str(folder) for folder in PurePosixPath(name).parents]
        inside = next((folder for folder in parents if folder in folders), None)
        if inside is not None:
            checkpoints[inside].add(name)
        elif find_checkpoint(name) is None:
            others.add(name)
    return Contents(checkpoints, others)


def find_checkpoint(name: str) -> str | None:
    """Return the folder of the checkpoint, complete or not, that a file belongs to."""
    folders = [str(folder) for folder in PurePosixPath(name).parents]
    return next((f for f in folders if _CHECKPOINT.fullmatch(Path(f).name)), None)


def _is_shown(name: str) -> bool:
    return not any(
        part.startswith(".") or part.endswith(_UNFINISHED) for part in name.split("/")
    )


def list_files(folder: Path, *, with_runs: bool = True) -> Iterator[str]:
    """Yield the names of all files in a working copy.

    Args:
        folder: The working copy.
        with_runs: Whether to include runs of their own in subfolders.
    """
    for root, folders, names in os.walk(folder):
        if not with_runs and root != str(folder) and _CONFIG in names:
            folders.clear()
            continue
        for name in names:
            yield Path(root, name).relative_to(folder).as_posix()


def find_runs(names: Iterable[str]) -> set[str]:
    """Return the subfolders with runs of their own, without those inside of other runs."""
    ending = f"/{_CONFIG}"
    runs = {name.removesuffix(ending) for name in names if name.endswith(ending)}
    return {
        run for run in runs if not any(str(p) in runs for p in PurePosixPath(run).parents)
    }


def without_runs(names: Iterable[str]) -> set[str]:
    """Return the files that are not in subfolders with runs of their own."""
    names = set(names)
    runs = tuple(f"{run}/" for run in find_runs(names))
    return {name for name in names if not name.startswith(runs)}


def newest_first(folders: Iterable[str]) -> list[str]:
    """Return folders of checkpoints, that of the largest update first."""

    def update(folder: str) -> int:
        number = re.match(r"update-(\d+)", Path(folder).name)
        return int(number[1]) if number else -1

    return sorted(folders, key=lambda folder: (update(folder), folder), reverse=True)


def list_arrays(manifest: bytes) -> dict[str, Any]:
    """Return size and checksum of the files that a manifest lists; empty if damaged."""
    try:
        files = json.loads(manifest)["files"]
        return dict(files)
    except (ValueError, KeyError, TypeError):
        return {}
