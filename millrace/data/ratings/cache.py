"""Keeps what was read from a text file as arrays on disk, to be mapped into memory.

A folder is named by the hash of the text it was made from, so it is never out of date. It
appears when it is whole, and what is in it is checked against its own hashes when opened.
"""

import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from millrace.data.catalog import data_folder
from millrace.data.ratings.matrix import Ratings

_VERSION = 2
"""Of what is kept, and of how text is read: another one is another folder."""
_ARRAYS = ("starts", "items", "values", "user_ids", "item_ids")
_FACTS = ("smallest", "largest", "num_duplicates")
_BEING_MADE = ".being-made-"
_ABANDONED_SECONDS = 24 * 3600.0

_DAMAGE = (OSError, ValueError, KeyError, TypeError)
"""What opening a damaged folder may raise."""

_log = logging.getLogger("millrace")


def cached(content_hash: str, make: Callable[[], Ratings]) -> Ratings:
    """Return what was kept under this hash, or make it and keep it.

    Where nothing can be written, what was made is returned as it is.
    """
    folder = data_folder() / "ratings" / f"{content_hash[:32]}-v{_VERSION}"
    try:
        return _open(folder)
    except FileNotFoundError:
        pass
    except _DAMAGE as error:
        _log.warning("%s is damaged (%s); it is made again.", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
    ratings = make()
    try:
        _keep(ratings, folder)
        return _open(folder)
    except _DAMAGE as error:
        _log.warning("Ratings cannot be kept for the next time: %s.", error)
        return ratings


def file_hash(path: Path) -> str:
    """Return the hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(folder: Path) -> Ratings:
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        facts = json.loads((folder / "facts.json").read_text())
        for name in _ARRAYS:
            if file_hash(folder / f"{name}.npy") != facts["hashes"][name]:
                raise ValueError(f"{name}.npy is not what was written")
    except FileNotFoundError as error:  # the folder is there, so this is damage
        raise ValueError(f"{Path(error.filename).name} is missing") from error
    arrays: dict[str, Any] = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
    }
    return Ratings(**arrays, **{name: facts[name] for name in _FACTS})


def _keep(ratings: Ratings, folder: Path) -> None:
    """Write a folder beside its place and move it there, unless another has come first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    place = Path(tempfile.mkdtemp(prefix=_BEING_MADE, dir=folder.parent))
    try:
        for name in _ARRAYS:
            np.save(place / f"{name}.npy", getattr(ratings, name))
        hashes = {name: file_hash(place / f"{name}.npy") for name in _ARRAYS}
        facts = {name: getattr(ratings, name) for name in _FACTS}
        (place / "facts.json").write_text(json.dumps({**facts, "hashes": hashes}))
        try:
            place.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove what a run that was killed long ago left half made."""
    for entry in folder.glob(f"{_BEING_MADE}*"):
        if time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(entry, ignore_errors=True)
