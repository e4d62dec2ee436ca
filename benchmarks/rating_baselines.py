"""Baselines for recommenders: biases of users and items, and matrix factorization.

Both are fitted by alternating least squares in NumPy. The regularization is chosen on the
validation ratings, like the checkpoint of the autoencoder.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from millrace.data.ratings import matrix
from millrace.data.ratings.matrix import Biases, Ratings

_FACTOR_ROUNDS = 12
_BIAS_STRENGTHS = (2.0, 5.0, 10.0, 25.0)
_FACTOR_STRENGTHS = (0.05, 0.08, 0.12, 0.2)


class Events(NamedTuple):
    """Ratings as triples of user, item and value."""

    user: np.ndarray
    item: np.ndarray
    value: np.ndarray


class Fitted(NamedTuple):
    """The fit with the lowest RMSE on validation ratings."""

    validation_rmse: float
    strength: float
    predict: Callable[[Events], np.ndarray]


def list_events(ratings: Ratings) -> Events:
    """Return the ratings as triples."""
    users = np.repeat(np.arange(ratings.num_users), ratings.num_ratings_by_user)
    return Events(users, np.asarray(ratings.items), np.float64(ratings.values))


def rmse(predict: Callable[[Events], np.ndarray], events: Events) -> float:
    """Return the RMSE over all ratings."""
    return float(np.sqrt(np.mean((predict(events) - events.value) ** 2)))


def best_biases(training: Ratings, validation: Events) -> Fitted:
    """Fit ``mean + user bias + item bias``."""
    return _best(
        _BIAS_STRENGTHS, lambda strength: fit_biases(training, strength), validation
    )


def best_factors(training: Ratings, validation: Events, rank: int = 50) -> Fitted:
    """Fit biases, and their residuals as a product of `rank` factors."""
    by_biases = best_biases(training, validation).predict
    return _best(
        _FACTOR_STRENGTHS,
        lambda strength: fit_factors(training, by_biases, rank, strength),
        validation,
    )


def _best(
    strengths: Sequence[float],
    fit: Callable[[float], Callable[[Events], np.ndarray]],
    validation: Events,
) -> Fitted:
    fits = []
    for strength in strengths:
        predict = fit(strength)
        fits.append(Fitted(rmse(predict, validation), strength, predict))
    return min(fits, key=lambda fit: fit.validation_rmse)


def fit_biases(training: Ratings, strength: float) -> Callable[[Events], np.ndarray]:
    """Fit biases with L2 shrinkage in units of ratings."""
    fitted = matrix.fit_biases(training, strength)
    biases = Biases(fitted.mean, fitted.of_rows(training), fitted.of_column)
    return lambda e: biases.lookup(e.user, e.item)


def fit_factors(
    training: Ratings,
    by_biases: Callable[[Events], np.ndarray],
    rank: int,
    strength: float,
) -> Callable[[Events], np.ndarray]:
    """Fit factors with an L2 penalty of `strength` per rating."""
    events = list_events(training)
    residuals = events.value - by_biases(events)
    generator = np.random.default_rng(0)
    users = np.zeros((training.num_users, rank))
    items = generator.normal(0, 0.1, (training.num_items, rank))
    by_user = _group(events.user, events.item, residuals, training.num_users)
    by_item = _group(events.item, events.user, residuals, training.num_items)
    for _ in range(_FACTOR_ROUNDS):
        _solve(users, items, by_user, strength)
        _solve(items, users, by_item, strength)
    return lambda e: by_biases(e) + np.einsum("ij,ij->i", users[e.user], items[e.item])


def _group(
    keys: np.ndarray, others: np.ndarray, values: np.ndarray, count: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    order = np.argsort(keys, kind="stable")
    edges = np.searchsorted(keys[order], np.arange(count + 1))
    return [
        (others[order[start:stop]], values[order[start:stop]])
        for start, stop in zip(edges[:-1], edges[1:], strict=True)  # noqa: RUF007
    ]


def _solve(
    unknown: np.ndarray,
    known: np.ndarray,
    groups: list[tuple[np.ndarray, np.ndarray]],
    strength: float,
) -> None:
    identity = np.eye(known.shape[1])
    for index, (others, values) in enumerate(groups):
        if len(others):
            rows = known[others]
            gram = rows.T @ rows + strength * len(others) * identity
            unknown[index] = np.linalg.solve(gram, rows.T @ values)
