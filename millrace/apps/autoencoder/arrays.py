"""Ratings that are passed as arrays or as a table from Python."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.config import ConfigurationError
from millrace.data.memory import HeldArrays, as_numpy
from millrace.data.ratings.identifiers import CodedIds, encode, merge
from millrace.data.ratings.matrix import Ratings, from_events
from millrace.data.ratings.tables import is_table, read_table
from millrace.data.source import DatasetError

_COLUMNS = ("user", "item", "rating")


def hold_ratings(data: Any, validation_data: Any = None) -> HeldArrays:
    """Check ratings and keep them in memory; their record is for the run.

    Args:
        data: ``(users, items, ratings)``, or a table with these three columns. Without
            ratings, users have chosen items without rating them.
        validation_data: The same, to predict.
    """
    if data is None:
        raise ConfigurationError("validation_data needs data: the ratings to train on.")
    arrays = _split("data", data, "")
    if validation_data is not None:
        arrays |= _split("validation_data", validation_data, "validation_")
        if ("rating" in arrays) != ("validation_rating" in arrays):
            raise ConfigurationError(
                "One of data and validation_data has ratings, the other has none."
            )
    return HeldArrays(arrays)


def hold_again(record: Any, data: Any, validation_data: Any = None) -> HeldArrays:
    """Return the ratings that a run was trained on, which are passed again.

    Args:
        record: What the run has recorded about them.
        data: See ``hold_ratings``.
        validation_data: See ``hold_ratings``.
    """
    if record is None:
        raise ConfigurationError("The run was trained on files, so it takes no data.")
    held = hold_ratings(data, validation_data)
    if held.record["checksum"] != record["checksum"]:
        raise ConfigurationError(
            "These are not the data that the run was trained on: their checksum is "
            f"{held.record['checksum']}, that of the run {record['checksum']}. Pass the "
            "same data, and the validation_data if there were any."
        )
    return held


def _split(name: str, data: Any, prefix: str) -> dict[str, np.ndarray]:
    columns = _read_frame(name, data) if is_table(data) else _read_tuple(name, data)
    lengths = [array.shape for array in columns.values()]
    if columns["user"].ndim != 1 or len(set(lengths)) != 1 or not len(columns["user"]):
        raise ConfigurationError(
            f"{name} must have as many users as items and ratings, got arrays of the "
            f"shapes {', '.join(map(str, lengths))}."
        )
    for column in ("user", "item"):
        if columns[column].dtype.kind not in "iuU":
            raise ConfigurationError(
                f"The {column}s of {name} must be integers or text, got "
                f"{columns[column].dtype}."
            )
    if (ratings := columns.get("rating")) is not None:
        if ratings.dtype.kind not in "iuf" or not np.isfinite(ratings).all():
            raise ConfigurationError(f"The ratings of {name} must be finite numbers.")
        columns["rating"] = ratings.astype(np.float32)
    return {prefix + column: array for column, array in columns.items()}


def _read_tuple(name: str, data: Any) -> dict[str, np.ndarray]:
    if not isinstance(data, tuple | list):
        raise ConfigurationError(
            f"{name} must be (users, items, ratings) or a table, got {type(data).__name__}."
        )
    if len(data) not in (2, 3):
        raise ConfigurationError(
            f"{name} must be (users, items, ratings), got {len(data)} values."
        )
    named = zip(_COLUMNS, data, strict=False)
    return {column: as_numpy(f"{name} {column}", array) for column, array in named}


def _read_frame(name: str, data: Any) -> dict[str, np.ndarray]:
    """Return the columns of a mapping or a DataFrame as arrays."""
    try:
        found = read_table(name, data)
    except DatasetError as error:
        raise ConfigurationError(str(error)) from None
    columns = {
        column: ids.ids[ids.codes] if isinstance(ids, CodedIds) else ids
        for column, ids in (("user", found.users), ("item", found.items))
    }
    return columns if found.values is None else columns | {"rating": found.values}


def build_ratings(
    arrays: Mapping[str, np.ndarray], prefix: str, limits: tuple[float, float]
) -> Ratings:
    """Return a matrix of ratings.

    Args:
        arrays: From ``hold_ratings``.
        prefix: The prefix of the names of the split.
        limits: The smallest and the largest valid rating.
    """
    users, items = (_number(arrays[prefix + column]) for column in ("user", "item"))
    values = arrays.get(prefix + "rating")
    implicit = values is None
    if values is None:
        values = np.ones(len(users.codes), np.float32)
    elif values.min() < limits[0] or values.max() > limits[1]:
        raise ConfigurationError(
            f"Ratings are between {limits[0]:g} and {limits[1]:g}, but the arrays have "
            f"{values.min():g} to {values.max():g}. Set rating_range=[low, high]."
        )
    return from_events(
        users.codes,
        items.codes,
        values,
        user_ids=users.ids,
        item_ids=items.ids,
        implicit=implicit,
    )


def _number(ids: np.ndarray) -> CodedIds:
    """Number identifiers in ascending order."""
    is_large = ids.dtype.kind == "u" and len(ids) and ids.max() > np.iinfo(np.int64).max
    if is_large:
        return CodedIds(*np.unique(ids, return_inverse=True))
    found = merge([encode(ids if ids.dtype.kind == "U" else ids.astype(np.int64))])
    return found._replace(ids=found.ids.astype(ids.dtype, copy=False))
