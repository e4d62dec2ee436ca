"""How many ratings there are, for options that depend on it. Imports nothing heavy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Counts(NamedTuple):
    """The size of a set of ratings."""

    users: int
    items: int
    ratings: int
    implicit: bool = False
    """Whether there are no ratings, only choices: every value is 1."""


def count_file(
    path: Path, limits: tuple[float, float], *, no_ratings: bool = False
) -> Counts:
    """Count the ratings in a file, which is parsed and cached for the run."""
    from millrace.data.ratings.reading import load_ratings

    ratings = load_ratings(path, limits=limits, no_ratings=no_ratings, quiet=True)
    return Counts(
        ratings.num_users, ratings.num_items, ratings.num_ratings, ratings.implicit
    )


def count_arrays(record: Mapping[str, Any], function: str) -> Counts:
    """Count the ratings in arrays that are held in memory.

    Args:
        record: The record of the arrays ``user``, ``item`` and ``rating``.
        function: The Python function that takes them, for the error message.
    """
    import numpy as np

    from millrace.data.memory import require_held

    arrays = require_held(record, function).arrays
    users, items = (len(np.unique(arrays[name])) for name in ("user", "item"))
    return Counts(users, items, len(arrays["user"]), "rating" not in arrays)
