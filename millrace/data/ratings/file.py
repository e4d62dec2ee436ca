"""Ratings from text files: read once, then mapped from what was kept."""

import logging
from pathlib import Path

import numpy as np

from millrace.config import ConfigurationError
from millrace.data.ratings.cache import cached, file_hash
from millrace.data.ratings.chunks import check_plain_file
from millrace.data.ratings.matrix import Ratings, Unseen, align, from_events
from millrace.data.ratings.text import read_events
from millrace.data.source import DatasetError

STARS = (0.5, 5.0)
"""What ratings are on the scales of Netflix and MovieLens."""

_log = logging.getLogger("millrace")


def load_ratings(path: str | Path, *, limits: tuple[float, float] = STARS) -> Ratings:
    """Return the ratings in a text file, plain or gzip.

    A line is user, item and rating, with tabs, commas, semicolons or '::' between, perhaps
    followed by a time, which is not used. Whatever is wrong with a line is a
    `DatasetError` that names it. If a user rates an item twice the later line counts; a
    warning says how often.

    Args:
        path: The file.
        limits: The smallest and the largest that a rating may be.
    """
    path = Path(path)
    check_plain_file(path)
    try:
        before = path.stat()
        content_hash = file_hash(path)
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}.") from error

    def read() -> Ratings:
        ratings = _read(path, limits)
        after = path.stat()
        if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
            raise DatasetError(f"{path} changed while it was being read.")
        return ratings

    ratings = cached(content_hash, read)
    lowest, highest = np.array(limits, np.float32)
    if not lowest <= ratings.smallest <= ratings.largest <= highest:
        read()  # it was kept under wider limits; this finds the line
    if ratings.num_duplicates:
        _log.warning(
            "%s rates %d times what the same user had rated before; the later line counts.",
            path,
            ratings.num_duplicates,
        )
    return ratings


def _read(path: Path, limits: tuple[float, float]) -> Ratings:
    users, items, values, _ = read_events(path, limits)
    return from_events(
        users.codes, items.codes, values, user_ids=users.ids, item_ids=items.ids
    )


def paired(
    training_path: str | Path,
    validation_path: str | Path,
    *,
    limits: tuple[float, float] = STARS,
) -> tuple[Ratings, Ratings, Unseen]:
    """Return training and validation ratings, numbered alike.

    Validation ratings of users or items that training does not know are left out, and
    counted.
    """
    training = load_ratings(training_path, limits=limits)
    validation, unseen = align(load_ratings(validation_path, limits=limits), training)
    if not validation.num_ratings:
        raise DatasetError(
            f"No rating in {validation_path} is by a user and of an item that are in "
            f"{training_path}. Are the identifiers the same?"
        )
    return training, validation, unseen
