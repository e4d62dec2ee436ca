"""Ratings in tables: Parquet files, and DataFrames of pandas, polars and others.

Only Parquet needs a library, pyarrow. A DataFrame is recognized by its columns, so neither
pandas nor polars is imported. With pyarrow, text in it is read without a Python object for
each value.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.config import ConfigurationError
from millrace.data.ratings.chunks import MIN_MILLISECONDS, Events
from millrace.data.ratings.identifiers import CodedIds, encode, merge
from millrace.data.ratings.parser import find_columns, parse_time
from millrace.data.source import DatasetError

_MAGIC = b"PAR1"
_SUFFIXES = (".parquet", ".pq")
_LARGEST_ID = 10**18
"""Integers below this can be written as text and read again."""

Ids = np.ndarray | CodedIds
"""Identifiers of a column: integers, or text with each distinct one stored once."""


class Columns(NamedTuple):
    """The columns of a table of ratings."""

    users: Ids
    items: Ids
    values: np.ndarray | None
    """float32; None if there is no column of ratings."""
    times: np.ndarray | None
    """int64, seconds since 1970."""


class _BadColumn(ValueError):
    """A column that cannot be read; the message continues a sentence about it."""


# ------------------------------------------------------------------------------ Parquet


def import_pyarrow(what: str) -> Any:
    """Return the module pyarrow.

    Args:
        what: What needs it, for the error message.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigurationError(
            f"{what} needs the library pyarrow: pip install pyarrow."
        ) from None
    return pyarrow


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, or has its name without being it, which is an error."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}.") from error
    if start != _MAGIC and path.suffix.lower() in _SUFFIXES:
        raise DatasetError(
            f"{path} is not a Parquet file: it starts with {start!r} instead of "
            f"{_MAGIC!r}. If it is text, give it another name."
        )
    return start == _MAGIC


def read_parquet(
    path: Path,
    limits: tuple[float, float],
    columns: Mapping[str, str] | None = None,
    *,
    window: tuple[float, float] | None = None,
    no_ratings: bool = False,
) -> Events:
    """Read a Parquet file; the arguments are those of `read_events`."""
    pyarrow = import_pyarrow(f"Reading {path}")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = list(file.schema_arrow.names)
            places = _find(str(path), names, columns or {}, no_ratings, window is not None)
            table = file.read([names[place] for place in places.values()])
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DatasetError(f"{path} is a damaged Parquet file: {reason}.") from None
    found = _read_columns(str(path), lambda kind: table[names[places[kind]]], places)
    if found.values is not None:
        _check_limits(str(path), found.values, limits)
    events = _build_events(found)
    if window is not None and events.times is not None:
        inside = (events.times >= window[0]) & (events.times < window[1])
        events = select_events(events, np.flatnonzero(inside))
    return events


def select_events(events: Events, chosen: np.ndarray) -> Events:
    """Return the ratings at these indices."""
    return events._replace(
        users=events.users._replace(codes=events.users.codes[chosen]),
        items=events.items._replace(codes=events.items.codes[chosen]),
        values=events.values[chosen],
        times=None if events.times is None else events.times[chosen],
    )


def _build_events(columns: Columns) -> Events:
    users, items = (
        ids if isinstance(ids, CodedIds) else merge([encode(ids.astype(np.int64))])
        for ids in (columns.users, columns.items)
    )
    values = columns.values
    implicit = values is None
    if values is None:
        values = np.ones(len(users.codes), np.float32)
    return Events(users, items, values, columns.times, implicit)


# --------------------------------------------------------------------------- DataFrames


def is_table(data: Any) -> bool:
    """Whether a value has columns with names."""
    return isinstance(data, Mapping) or hasattr(data, "columns")


def read_table(name: str, table: Any) -> Columns:
    """Return the columns of a mapping, or of a DataFrame of any library.

    Columns are recognized by the names that headers of text files have, or because they
    are the only ones that start with user, item or rating.

    Args:
        name: What the caller calls the table, for error messages.
        table: The table.
    """
    # A table of pyarrow has names and columns; its columns have no names.
    names = [
        str(n) for n in getattr(table, "column_names", getattr(table, "columns", table))
    ]
    chosen: dict[str, str] = {}
    for kind in ("user", "item", "rating"):
        matches = [n for n in names if n.lower().startswith(kind)]
        if len(matches) == 1:
            chosen[kind] = matches[0]
    places = _find(name, names, chosen, False, True)
    own_names = list(getattr(table, "column_names", getattr(table, "columns", table)))
    return _read_columns(name, lambda kind: table[own_names[places[kind]]], places)


# ------------------------------------------------------------------------------ columns


def _find(
    source: str,
    names: list[str],
    columns: Mapping[str, str],
    no_ratings: bool,
    with_time: bool,
) -> dict[str, int]:
    try:
        places = find_columns(names, True, columns, no_ratings=no_ratings)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise DatasetError(f"{source} cannot be read as ratings: {error}.") from None
    return places if with_time else {k: p for k, p in places.items() if k != "time"}


def _read_columns(
    source: str, get: Callable[[str], Any], places: Mapping[str, int]
) -> Columns:
    readers = {"user": _read_ids, "item": _read_ids, "rating": _read_values}
    readers["time"] = _read_times
    found: dict[str, Any] = {}
    for kind in places:
        try:
            found[kind] = readers[kind](_as_column(get(kind)))
        except _BadColumn as error:
            raise DatasetError(f"{source}: the column of the {kind}s {error}.") from None
    lengths = {
        kind: len(column.codes if isinstance(column, CodedIds) else column)
        for kind, column in found.items()
    }
    if len(set(lengths.values())) != 1:
        raise DatasetError(f"{source}: the columns have different lengths: {lengths}.")
    if not lengths["user"]:
        raise DatasetError(f"{source} has no ratings: it has no rows.")
    return Columns(found["user"], found["item"], found.get("rating"), found.get("time"))


def _as_column(column: Any) -> Any:
    """Return a column of pyarrow, if it is one or can become one, else an array."""
    if hasattr(column, "dictionary_encode"):
        return column
    pyarrow = _find_pyarrow() if hasattr(column, "__arrow_c_stream__") else None
    if pyarrow is not None:
        try:
            return pyarrow.chunked_array(column)
        except (pyarrow.ArrowException, TypeError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise _BadColumn(f"has values of several kinds ({reason})") from None
    array = np.asarray(column)
    if array.ndim != 1:
        raise _BadColumn(f"has the shape {array.shape} instead of one value per row")
    if array.dtype == object:
        return _convert_objects(array)
    return array


def _find_pyarrow() -> Any | None:
    """Return the module pyarrow; None without it, because a DataFrame does not need it."""
    try:
        import pyarrow
    except ImportError:
        return None
    return pyarrow


def _convert_objects(array: np.ndarray) -> np.ndarray:
    """Return text or numbers that are Python objects as an array of their own type."""
    for place, value in enumerate(array):
        if _is_missing(value):
            raise _BadColumn(f"has no value in row {place + 1}")
    kinds = {str if isinstance(value, str) else type(value) for value in array}
    if len(kinds) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise _BadColumn(f"mixes values of the types {names}; convert all to one")
    if kinds == {str}:
        return _convert_texts(array.tolist())
    converted = np.array(array.tolist())
    if converted.dtype == object or converted.ndim != 1:
        raise _BadColumn(f"has values of the type {kinds.pop().__name__}")
    return converted


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or NA of pandas, which compares to NA."""
    try:
        return value is None or bool(value != value)
    except TypeError:
        return True


def _check_complete(column: Any) -> None:
    """Raise if a column of pyarrow has a row without a value."""
    if getattr(column, "null_count", 0):
        places = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
        raise _BadColumn(f"has no value in row {places[0] + 1}")


def _as_array(column: Any) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column
    _check_complete(column)
    return np.asarray(column.to_numpy())


def _read_ids(column: Any) -> Ids:
    if not isinstance(column, np.ndarray):
        _check_complete(column)
        kind = str(column.type)
        if "string" in kind or "utf8" in kind:
            return _read_texts(column)
    ids = _as_array(column)
    if ids.dtype == object:
        ids = _convert_objects(ids)
    if ids.dtype.kind == "U":
        _check_texts(ids)
        return merge([encode(ids)])
    if ids.dtype.kind not in "iu":
        raise _BadColumn(
            f"must be integers or text, but has values of the type {ids.dtype}"
        )
    if len(ids) and not -_LARGEST_ID < int(ids.min()) <= int(ids.max()) < _LARGEST_ID:
        raise _BadColumn("has integers of more than 18 digits; convert them to text")
    return ids


def _read_texts(column: Any) -> CodedIds:
    """Return text of pyarrow, which numbers the distinct ones itself."""
    import pyarrow

    if not pyarrow.types.is_dictionary(column.type):
        column = column.cast(pyarrow.large_string()).dictionary_encode()
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.unify_dictionaries().combine_chunks()
    chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
    coded = []
    for chunk in chunks:
        ids = _convert_texts(chunk.dictionary.to_pylist())
        codes = np.asarray(chunk.indices.to_numpy(zero_copy_only=False))
        is_used = np.zeros(len(ids), bool)
        is_used[codes] = True
        _check_texts(ids[is_used])
        ranks = np.cumsum(is_used, dtype=np.int32) - np.int32(1)
        coded.append(CodedIds(ids[is_used], ranks[codes]))
    return merge(coded)


def _convert_texts(texts: list[str]) -> np.ndarray:
    # Zero bytes would vanish at the end of a text of NumPy.
    if any("\0" in text for text in texts):
        raise _BadColumn("has a text with a zero byte")
    return np.array(texts, np.str_)


def _check_texts(ids: np.ndarray) -> None:
    if (ids == "").any():
        raise _BadColumn("has an empty text")


def _read_values(column: Any) -> np.ndarray:
    values = _as_array(column)
    if values.dtype == object:
        if any(isinstance(value, str) for value in values):
            raise _BadColumn("must be numbers, but has text")
        values = values.astype(np.float64)  # such as Decimal
    if values.dtype.kind not in "iuf":
        raise _BadColumn(f"must be numbers, but has values of the type {values.dtype}")
    if not (is_finite := np.isfinite(values)).all():
        place = int(np.flatnonzero(~is_finite)[0])
        raise _BadColumn(f"has the value {values[place]} in row {place + 1}")
    return values.astype(np.float32)


def _read_times(column: Any) -> np.ndarray:
    times = _as_array(column)
    if times.dtype == object and len(times) and hasattr(times[0], "isoformat"):
        times = times.astype("datetime64[s]")  # dates of pyarrow
    if times.dtype.kind == "M":
        if np.isnat(times).any():
            place = int(np.flatnonzero(np.isnat(times))[0])
            raise _BadColumn(f"has no value in row {place + 1}")
        return times.astype("datetime64[s]").astype(np.int64)
    if times.dtype.kind in "iuf" and np.isfinite(times).all():
        times = np.floor(times).astype(np.int64)
        return np.where(times < MIN_MILLISECONDS, times, times // 1000)
    if times.dtype.kind in "UO":
        distinct, codes = np.unique(times.astype(str), return_inverse=True)
        try:
            seconds = np.array([parse_time(text) for text in distinct.tolist()], np.int64)
        except ValueError as error:
            raise _BadColumn(f"cannot be read: {error}") from None
        return np.where(seconds < MIN_MILLISECONDS, seconds, seconds // 1000)[codes]
    raise _BadColumn(f"must be times, but has values of the type {times.dtype}")


def _check_limits(source: str, values: np.ndarray, limits: tuple[float, float]) -> None:
    lowest, highest = np.array(limits, np.float32)
    outside = np.flatnonzero((values < lowest) | (values > highest))
    if len(outside):
        place = int(outside[0])
        raise DatasetError(
            f"{source}, row {place + 1}: the rating {values[place]:g} is not between "
            f"{limits[0]:g} and {limits[1]:g}."
        )
