"""Ratings that are passed as arrays or as a table from Python."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.config import ConfigurationError
from millrace.data.memory import HeldArrays, as_numpy
from millrace.data.ratings.matrix import Ratings, from_events

_COLUMNS = ("user", "item", "rating")


def hold_ratings(data: Any, validation_data: Any = None) -> HeldArrays:
    """Check ratings and keep them in memory; their record is for the run.

    Args:
        data: ``(users, items, ratings)``, or a table with these three columns.
        validation_data: The same, to predict.
    """
    if data is None:
        raise ConfigurationError("validation_data needs data: the ratings to train on.")
    arrays = _split("data", data, "")
    if validation_data is not None:
        arrays |= _split("validation_data", validation_data, "validation_")
    return HeldArrays(arrays)


def _split(name: str, data: Any, prefix: str) -> dict[str, np.ndarray]:
    columns = [as_numpy(f"{name} {column}", c) for column, c in _find_columns(name, data)]
    lengths = [array.shape for array in columns]
    if columns[0].ndim != 1 or len(set(lengths)) != 1 or not len(columns[0]):
        raise ConfigurationError(
            f"{name} must have as many users as items and ratings, got arrays of the "
            f"shapes {', '.join(map(str, lengths))}."
        )
    users, items, ratings = columns
    for column, ids in (("users", users), ("items", items)):
        if ids.dtype.kind not in "iuU":
            raise ConfigurationError(
                f"The {column} of {name} must be integers or text, got {ids.dtype}."
            )
    if ratings.dtype.kind not in "iuf" or not np.isfinite(ratings).all():
        raise ConfigurationError(f"The ratings of {name} must be finite numbers.")
    values = (users, items, ratings.astype(np.float32))
    return {prefix + column: v for column, v in zip(_COLUMNS, values, strict=True)}


def _find_columns(name: str, data: Any) -> list[tuple[str, Any]]:
    """Return the three columns of a tuple, a mapping or a table such as a DataFrame."""
    if isinstance(data, tuple | list):
        if len(data) != 3:
            raise ConfigurationError(
                f"{name} must be (users, items, ratings), got {len(data)} values."
            )
        return list(zip(_COLUMNS, data, strict=True))
    if not isinstance(data, Mapping) and not hasattr(data, "columns"):
        raise ConfigurationError(
            f"{name} must be (users, items, ratings) or a table, got {type(data).__name__}."
        )
    names = [str(column) for column in getattr(data, "columns", data)]
    found = []
    for column in _COLUMNS:
        matches = [n for n in names if n.lower().startswith(column)]
        if len(matches) != 1:
            raise ConfigurationError(
                f"{name} needs one column each for user, item and rating; its columns are "
                f"{', '.join(names[:8])}."
            )
        found.append((column, _as_text(data[matches[0]])))
    return found


def _as_text(column: Any) -> Any:
    """Return a column of a table; text in objects becomes an array of text."""
    array = np.asarray(column)
    is_text = array.dtype == object and all(isinstance(value, str) for value in array)
    return array.astype(str) if is_text else array


def build_ratings(
    arrays: Mapping[str, np.ndarray], prefix: str, limits: tuple[float, float]
) -> Ratings:
    """Return a matrix of ratings.

    Args:
        arrays: From ``hold_ratings``.
        prefix: The prefix of the names of the split.
        limits: The smallest and the largest valid rating.
    """
    users, items, values = (arrays[prefix + column] for column in _COLUMNS)
    if values.min() < limits[0] or values.max() > limits[1]:
        raise ConfigurationError(
            f"Ratings are between {limits[0]:g} and {limits[1]:g}, but the arrays have "
            f"{values.min():g} to {values.max():g}. Set rating_range=[low, high]."
        )
    user_ids, user_codes = np.unique(users, return_inverse=True)
    item_ids, item_codes = np.unique(items, return_inverse=True)
    return from_events(user_codes, item_codes, values, user_ids=user_ids, item_ids=item_ids)
