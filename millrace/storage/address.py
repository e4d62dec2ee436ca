"""Addresses of runs in object storage, and the folders with their working copies.

The working copy of ``s3://bucket/runs/first`` is ``~/.cache/millrace/remote/s3/bucket/runs/
first``. Either can be computed from the other, so that all code works with plain paths.
Imports nothing heavy.
"""

import os
import re
from pathlib import Path
from typing import Any

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?!/)(.*)|(file):/{1,3}(?!/)(.*)")
"""A path made of an address has lost one of its two slashes."""


class StorageError(ValueError):
    """A run in object storage cannot be opened, read or written."""


def is_url(value: Any) -> bool:
    """Whether text or a path is an address such as ``s3://bucket/run``."""
    return isinstance(value, str | Path) and _URL.fullmatch(str(value)) is not None


def working_copies() -> Path:
    """Return the folder of all working copies, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.abspath(Path(cache).expanduser())) / "millrace" / "remote"


def to_local(place: Path | str) -> Path:
    """Return the working copy of an address; another path stays as it is."""
    match = _URL.fullmatch(str(place))
    if match is None:
        return Path(place)
    scheme, rest = match[1] or match[3], match[2] or match[4] or ""
    parts = rest.rstrip("/").split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise StorageError(
            f"{place} is not the address of a run: it must be like s3://BUCKET/FOLDER, "
            "without empty parts and without dots for folders."
        )
    return working_copies().joinpath(scheme, *parts)


def find_url(path: Path) -> str | None:
    """Return the address of which a path is the working copy; None for other paths."""
    path, root = Path(os.path.abspath(path)), working_copies()
    if not path.is_relative_to(root):
        return None
    scheme, *parts = path.relative_to(root).parts or ("",)
    if not parts:
        return None
    return f"{scheme}://{'/' if scheme == 'file' else ''}{'/'.join(parts)}"


def display(path: Path) -> str:
    """Return the address of a working copy, as users know it, or another path as text."""
    return find_url(path) or str(path)
