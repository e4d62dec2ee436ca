"""Biases of users and items: the part of a rating that does not depend on their match.

Rows are users and columns items; for transposed ratings it is the other way around.
"""

from dataclasses import dataclass, replace

import numpy as np

from millrace.data.ratings.matrix import Biases, Ratings

_ROUNDS = 8
"""In the last round no item bias of the three Netflix months moves by more than 0.002."""
_STRENGTH = 10.0
"""The best of 2, 5, 10 and 25 on the validation ratings of the three Netflix months."""
_ALMOST_ZERO = 1e-4
"""Stands for a residual of exactly 0, because 0 means that there is no rating."""


@dataclass(frozen=True, eq=False)
class ColumnBiases:
    """The mean rating and the biases of the columns.

    The bias of a row is computed from its known ratings, so new rows need no training.
    """

    mean: float
    of_column: np.ndarray
    """float32[num_items]"""
    strength: float = _STRENGTH
    """L2 shrinkage of the biases, in units of ratings."""

    def of_rows(self, ratings: Ratings) -> np.ndarray:
        """Return the bias of each row, given the mean and the columns."""
        residuals = np.float32(ratings.values) - (self.mean + self.of_column[ratings.items])
        return _shrunk_means(residuals, ratings.users, ratings.num_users, self.strength)

    def subtract(self, ratings: Ratings, known: Ratings) -> Ratings:
        """Return the ratings without their biases.

        Args:
            ratings: Ratings with the rows and columns of `known`.
            known: The ratings from which the biases of the rows are computed.
        """
        biases = Biases(self.mean, self.of_rows(known), self.of_column)
        residuals = np.float32(ratings.values)
        residuals = residuals - biases.lookup(ratings.users, ratings.items)
        residuals[residuals == 0] = _ALMOST_ZERO
        return replace(ratings, values=residuals.astype(np.float32), biases=biases)


def fit_biases(ratings: Ratings, strength: float = _STRENGTH) -> ColumnBiases:
    """Fit ``mean + row bias + column bias`` by alternating least squares."""
    rows = ratings.users
    mean = float(np.mean(ratings.values, dtype=np.float64)) if len(ratings.values) else 0.0
    centered = np.float32(ratings.values) - np.float32(mean)
    fitted = ColumnBiases(mean, np.zeros(ratings.num_items, np.float32), strength)
    for _ in range(_ROUNDS):
        residuals = centered - fitted.of_rows(ratings)[rows]
        of_column = _shrunk_means(residuals, ratings.items, ratings.num_items, strength)
        fitted = replace(fitted, of_column=of_column)
    return fitted


def _shrunk_means(
    values: np.ndarray, groups: np.ndarray, num_groups: int, strength: float
) -> np.ndarray:
    """Return the mean of each group, shrunk toward 0."""
    sums = np.bincount(groups, values, num_groups)
    counts = np.bincount(groups, minlength=num_groups)
    return (sums / (counts + strength)).astype(np.float32)
