"""What of a rating is due to its user and its item alone: some rate high, some are liked.

Users are rows here and items columns; of turned ratings it is the other way round.
"""

from dataclasses import dataclass, replace

import numpy as np

from millrace.data.ratings.matrix import Biases, Ratings

_ROUNDS = 8
"""In the last of them no item's bias of Netflix' three months moves by more than 0.002."""
_STRENGTH = 10.0
"""Of 2, 5, 10 and 25 the best for Netflix' three months, by their validation ratings."""
_ALMOST_NOTHING = 1e-4
"""For what is left of a rating that is exactly as foretold: 0 is for no rating."""


@dataclass(frozen=True, eq=False)
class ColumnBiases:
    """The mean rating, and what the columns add to it; that of a row, its ratings tell."""

    mean: float
    of_column: np.ndarray
    """float32[num_items]"""
    strength: float = _STRENGTH
    """A bias is drawn to 0 as by so many ratings that are as foretold without it."""

    def of_rows(self, ratings: Ratings) -> np.ndarray:
        """Return what each row adds to its ratings beyond mean and columns."""
        left = np.float32(ratings.values) - (self.mean + self.of_column[ratings.items])
        return _means(left, _rows(ratings), ratings.num_users, self.strength)

    def subtracted(self, ratings: Ratings, known: Ratings) -> Ratings:
        """Return what is left of ratings without their biases, and which these were.

        Args:
            ratings: Of the rows and columns of `known`.
            known: The ratings that the rows' biases are learned from.
        """
        biases = Biases(self.mean, self.of_rows(known), self.of_column)
        left = np.float32(ratings.values) - biases.of(_rows(ratings), ratings.items)
        left[left == 0] = _ALMOST_NOTHING
        return replace(ratings, values=left.astype(np.float32), biases=biases)


def fit_biases(ratings: Ratings, strength: float = _STRENGTH) -> ColumnBiases:
    """Fit ``mean + row's bias + column's bias``, in turn until they hardly change."""
    rows = _rows(ratings)
    mean = float(np.mean(ratings.values, dtype=np.float64)) if len(ratings.values) else 0.0
    left = np.float32(ratings.values) - np.float32(mean)
    fitted = ColumnBiases(mean, np.zeros(ratings.num_items, np.float32), strength)
    for _ in range(_ROUNDS):
        rest = left - fitted.of_rows(ratings)[rows]
        of_column = _means(rest, ratings.items, ratings.num_items, strength)
        fitted = replace(fitted, of_column=of_column)
    return fitted


def _rows(ratings: Ratings) -> np.ndarray:
    return np.repeat(
        np.arange(ratings.num_users, dtype=np.int32), ratings.num_ratings_by_user
    )


def _means(
    values: np.ndarray, places: np.ndarray, count: int, strength: float
) -> np.ndarray:
    """Return the mean of the values at each place, drawn to 0."""
    sums = np.bincount(places, values, count)
    counts = np.bincount(places, minlength=count)
    return (sums / (counts + strength)).astype(np.float32)
