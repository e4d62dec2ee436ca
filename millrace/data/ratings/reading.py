"""Loads ratings from text files: parsed once, then mapped from a cache on disk.

A cache folder is named after the hash of the text, so it is never stale. It appears once
it is complete, and its arrays are checked against their hashes when it is opened.
"""

import hashlib
import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from millrace.config import ConfigurationError
from millrace.data.catalog import data_folder
from millrace.data.ratings.chunks import (
    MAX_LINE_BYTES,
    Chunk,
    Events,
    bad_line_error,
    check_regular_file,
    concatenate,
    encode_lines,
    map_in_order,
    open_text,
    parse_chunk,
    read_chunks,
)
from millrace.data.ratings.matrix import Ratings, Unseen, align, from_events
from millrace.data.ratings.netflix import is_netflix_file, read_netflix
from millrace.data.ratings.parser import (
    NAME_COLUMNS,
    BadLine,
    FileLayout,
    TextIdentifier,
    detect_layout,
    detect_texts,
)
from millrace.data.ratings.tables import is_parquet, read_parquet
from millrace.data.source import DatasetError
from millrace.trust import find_writers

STARS = (0.5, 5.0)
"""The range of ratings of Netflix and MovieLens."""
_NETFLIX_FILES = ("training_set/mv_*.txt", "mv_*.txt", "combined_data_*.txt")
_MOVIELENS_FILES = ("ratings.csv", "ratings.dat", "u.data")

_CACHE_VERSION = 2
"""Part of the folder name; increase it if the format or the parsing changes."""
_ARRAYS = ("starts", "items", "values", "user_ids", "item_ids")
_FACTS = ("smallest", "largest", "num_duplicates")
_INCOMPLETE = ".being-made-"
_ABANDONED_SECONDS = 24 * 3600.0
# What opening a damaged folder may raise.
_DAMAGE = (ValueError, KeyError, TypeError)

_log = logging.getLogger("millrace")


def load_ratings(
    path: str | Path,
    *,
    limits: tuple[float, float] = STARS,
    no_ratings: bool = False,
    quiet: bool = False,
) -> Ratings:
    """Return the ratings in a text file, plain or gzip, or in a Parquet file.

    A line has user, item and rating, separated by tabs, commas, semicolons or '::', and
    optionally a time, which is not used. A malformed line is a `DatasetError` that names
    it. If a user rates an item twice, the later line counts, and a warning is logged.

    Lines of user and item, or a header without a rating, are choices of items without
    ratings: the result is `implicit`, and every value is 1.

    Args:
        path: The file.
        limits: The smallest and the largest valid rating.
        no_ratings: Whether to ignore ratings, if there are any. Without a header, a third
            column is then a time.
        quiet: Whether not to log warnings.
    """
    path = Path(path)
    check_regular_file(path)
    try:
        before = path.stat()
        content_hash = hash_file(path)
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}.") from error

    def read() -> Ratings:
        events = read_events(path, limits, no_ratings=no_ratings)
        after = path.stat()
        # The cache would otherwise keep new content under the hash of the old.
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise DatasetError(f"{path} changed while it was being read.")
        return from_events(
            events.users.codes,
            events.items.codes,
            events.values,
            user_ids=events.users.ids,
            item_ids=events.items.ids,
            implicit=events.implicit,
        )

    ratings = _load_cached(content_hash, read, "-implicit" if no_ratings else "")
    lowest, highest = np.array(limits, np.float32)
    is_inside = lowest <= ratings.smallest <= ratings.largest <= highest
    if not ratings.implicit and not is_inside:
        read()  # it was cached with wider limits; parsing again names the line
    if ratings.num_duplicates and not ratings.implicit and not quiet:
        _log.warning(
            "%s has %d ratings of items that the same user had rated before; the later "
            "line counts.",
            path,
            ratings.num_duplicates,
        )
    return ratings


def load_aligned(
    training_path: str | Path,
    validation_path: str | Path,
    *,
    limits: tuple[float, float] = STARS,
) -> tuple[Ratings, Ratings, Unseen]:
    """Return training and validation ratings with the same numbering.

    Validation ratings of users or items that are not in training are dropped and counted.
    """
    training = load_ratings(training_path, limits=limits)
    targets, unseen = load_targets(validation_path, training_path, training, limits)
    return training, targets, unseen


def load_targets(
    path: str | Path,
    training_path: str | Path,
    like: Ratings,
    limits: tuple[float, float],
    *,
    no_ratings: bool = False,
) -> tuple[Ratings, Unseen]:
    """Return ratings to predict, with the numbering of the training ratings.

    Ratings of users or items that are not in training are dropped and counted.
    """
    loaded = load_like(path, training_path, like, limits, no_ratings=no_ratings)
    targets, unseen = align(loaded, like)
    if not targets.num_ratings:
        raise DatasetError(
            f"No rating in {path} has both its user and its item in {training_path}. Are "
            "the identifiers the same?"
        )
    return targets, unseen


def load_like(
    path: str | Path,
    training_path: str | Path,
    like: Ratings,
    limits: tuple[float, float],
    *,
    no_ratings: bool = False,
) -> Ratings:
    """Return the ratings of a file; it must have ratings if those in training have."""
    loaded = load_ratings(path, limits=limits, no_ratings=no_ratings)
    if loaded.implicit != like.implicit:
        with_ratings, without = (training_path, path)
        if like.implicit:
            with_ratings, without = without, with_ratings
        raise DatasetError(
            f"{without} has no ratings, but {with_ratings} has. Give two files with "
            "ratings, or ignore them with --no-ratings."
        )
    return loaded


def read_timed_events(
    path: Path,
    limits: tuple[float, float],
    columns: Mapping[str, str],
    window: tuple[float, float],
    *,
    times_for: str | None = "to split by",
    no_ratings: bool = False,
) -> Events:
    """Read a file of ratings with times, or the folder of a published dataset.

    Args:
        path: A file, or a folder of the Netflix Prize or of MovieLens.
        limits: The smallest and the largest valid rating.
        columns: See `detect_layout`.
        window: The first time to keep, and the first after it to drop.
        times_for: What times are needed for, for the error message if there are none;
            None if they are read only where they exist.
        no_ratings: See `load_ratings`.
    """
    files = _find_files(path)
    if is_netflix_file(files[0]):
        if columns:
            raise ConfigurationError(
                f"{files[0]} has the columns of the Netflix Prize; they cannot be chosen."
            )
        events = read_netflix(files, limits, window)
        if no_ratings:
            events = events._replace(values=np.ones_like(events.values), implicit=True)
    else:
        options: dict[str, Any] = {"window": window, "no_ratings": no_ratings}
        events = read_events(files[0], limits, columns, **options)
    if events.times is None and times_for is not None:
        raise ConfigurationError(
            f"{files[0]} has no column of times {times_for}. If there is one, give its "
            "name or number with --time-column."
        )
    if len(events.values) == 0:
        raise DatasetError(f"{path} has no ratings in the requested period.")
    return events


def _find_files(path: Path) -> list[Path]:
    if not path.is_dir():
        check_regular_file(path, "file or folder")
        return [path]
    for pattern in _NETFLIX_FILES:
        if files := sorted(path.glob(pattern)) or sorted(path.glob(f"{pattern}.gz")):
            return files
    for name in _MOVIELENS_FILES:
        for file in (path / name, path / f"{name}.gz"):
            if file.is_file():
                return [file]
    raise ConfigurationError(
        f"{path.resolve()} has no ratings; looked for "
        f"{', '.join((*_NETFLIX_FILES, *_MOVIELENS_FILES))} (or .gz). Give a file, or the "
        "folder of one of these."
    )


def read_events(
    path: Path,
    limits: tuple[float, float],
    columns: Mapping[str, str] | None = None,
    *,
    window: tuple[float, float] | None = None,
    no_ratings: bool = False,
) -> Events:
    """Read ratings from text, plain or gzip: user, item, rating and optionally a time.

    Fields are separated by tabs, commas, semicolons or '::'. A header must identify user
    and item by well-known names. Parquet is recognized by its first bytes.

    Args:
        path: The file.
        limits: The smallest and the largest valid rating.
        columns: See `detect_layout`.
        window: If times are needed, too, the first time to keep and the first after it to
            drop.
        no_ratings: See `load_ratings`.
    """
    if is_parquet(path):
        return read_parquet(path, limits, columns, window=window, no_ratings=no_ratings)
    with open_text(path) as file:
        start = file.read(MAX_LINE_BYTES)
    if not start.strip():
        raise DatasetError(f"{path} has no ratings: it is empty.")
    try:
        file_layout = detect_layout(
            start, limits, columns, with_time=window is not None, no_ratings=no_ratings
        )
    except ConfigurationError:
        raise
    except ValueError as error:
        raise DatasetError(f"{path} cannot be read as ratings: {error}.") from None
    # Identifiers are integers until one is not; then the file is read again. That happens
    # at most twice, for users and for items; not at all if the first line tells.
    layout = detect_texts(start[file_layout.num_bytes :], file_layout.lines)
    while True:
        try:
            return _read_lines(path, file_layout._replace(lines=layout), window)
        except TextIdentifier as error:
            if error.index > file_layout.num_lines:
                _log.warning("%s All are treated as text.", bad_line_error(path, error))
            layout = layout._replace(texts=layout.texts | {error.kind})


def _read_lines(
    path: Path, layout: FileLayout, window: tuple[float, float] | None
) -> Events:
    def parse(chunk: Chunk) -> Events:
        try:
            return encode_lines(parse_chunk(chunk.text, layout.lines), window)
        except BadLine as error:
            error.index += chunk.lines_before
            raise

    try:
        with open_text(path) as file:
            file.read(layout.num_bytes)
            chunks = read_chunks(file, path, layout.num_lines)
            parsed = list(map_in_order(parse, chunks))
    except TextIdentifier:
        raise
    except BadLine as error:
        if layout.may_be_header and error.index == layout.num_lines:
            error.reason += f" (if the line is a header: {NAME_COLUMNS})"
        raise bad_line_error(path, error) from None
    if not parsed or (window is None and not any(len(chunk.values) for chunk in parsed)):
        raise DatasetError(f"{path} has no ratings, only a header.")
    return concatenate(parsed)._replace(implicit=layout.lines.rating is None)


# ------------------------------------------------------------------------------ cache


def hash_file(path: Path) -> str:
    """Return the SHA-256 of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load_cached(
    content_hash: str, read: Callable[[], Ratings], suffix: str = ""
) -> Ratings:
    """Return the ratings cached under this hash, or read and cache them.

    If the cache cannot be written, the ratings are returned from memory.
    """
    folder = data_folder() / "ratings" / f"{content_hash[:32]}-v{_CACHE_VERSION}{suffix}"
    if (reason := find_writers(folder, trust_owner=True)) is not None:
        _log.warning("Ratings are not cached, because %s.", reason)
        return read()
    try:
        return _open_cached(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("The cache %s cannot be read: %s.", folder, error)
        return read()
    except _DAMAGE as error:
        _log.warning("The cache %s is damaged (%s); rebuilding it.", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
    ratings = read()
    try:
        _write_cache(ratings, folder)
        return _open_cached(folder)
    except (OSError, *_DAMAGE) as error:
        _log.warning("Cannot cache the ratings: %s.", error)
        return ratings


def _open_cached(folder: Path) -> Ratings:
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        facts = json.loads((folder / "facts.json").read_text())
        for name in _ARRAYS:
            if hash_file(folder / f"{name}.npy") != facts["hashes"][name]:
                raise ValueError(f"the hash of {name}.npy does not match")
    except FileNotFoundError as error:  # the folder exists, so this is damage
        raise ValueError(f"{Path(error.filename).name} is missing") from error
    arrays: dict[str, Any] = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS
    }
    implicit = facts.get("implicit", False)  # older folders do not have it
    return Ratings(**arrays, **{name: facts[name] for name in _FACTS}, implicit=implicit)


def _write_cache(ratings: Ratings, folder: Path) -> None:
    """Write a folder under a temporary name and rename it, unless another came first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    # Unlike a temporary folder, others may read it if the umask lets them.
    temporary = folder.parent / f"{_INCOMPLETE}{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        for name in _ARRAYS:
            np.save(temporary / f"{name}.npy", getattr(ratings, name))
        hashes = {name: hash_file(temporary / f"{name}.npy") for name in _ARRAYS}
        facts = {name: getattr(ratings, name) for name in (*_FACTS, "implicit")}
        (temporary / "facts.json").write_text(json.dumps({**facts, "hashes": hashes}))
        try:
            temporary.rename(folder)
        except OSError:  # another process has written the same content
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove the incomplete folders of runs that were killed long ago."""
    for entry in folder.glob(f"{_INCOMPLETE}*"):
        if time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(entry, ignore_errors=True)
