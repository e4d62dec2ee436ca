"""The simplest models, computed in the same run: a network should predict better.

- *global mean* predicts the mean training rating.
- *biases* adds the bias of the user and that of the item.
- *linear items* adds what a linear model predicts from the user's other ratings: EASE
  (arXiv 1905.03375) on what the biases leave over, which has a closed form.

For the objective ranking, *popularity* ranks items by how many users like them, and *linear
items* is EASE on the liked items.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.config.data import RowKind
from millrace.apps.autoencoder.data import RatingData, RowSource, subtract_biases
from millrace.apps.autoencoder.loss import to_dense_rows
from millrace.apps.autoencoder.metrics import RankingOptions
from millrace.apps.autoencoder.model import get_known_ratings
from millrace.apps.autoencoder.ranking import CHOSEN_AT, Scorer, measure_ranking
from millrace.checkpoint.best import Mode
from millrace.data.ratings.matrix import Ratings, fit_biases, from_events, transpose
from millrace.data.ratings.source import evaluation_source
from millrace.data.stream import EvaluationBatches
from millrace.program.compiling import jit

GLOBAL_MEAN, BIASES, LINEAR_ITEMS = "global mean", "biases", "linear items"
POPULARITY = "popularity"

_MOST_ITEMS = {"cpu": 5_000, "gpu": 20_000}
"""Items for which the closed form takes seconds; its time grows with their third power."""
_DEVICES = {"cpu": "a CPU", "gpu": "a GPU"}
_BATCH_SIZE = 512
_PENALTIES = (400.0, 1200.0)
"""L2 penalties of the linear model, in units of the mean squared residual. The one with the
lower error on the first targets is used."""

_RANKING_PENALTIES = (100.0, 250.0, 500.0, 1000.0)
"""L2 penalties of the linear model that ranks. The one with the highest NDCG@10 on the
validation ratings is used, or the third without them."""

Scores = dict[str, dict[str, float]]
"""The RMSE of each model by name, for the ratings of each role; or by metric."""


def score_baselines(
    ratings: RatingData, rows: RowKind, *, strength: float, with_linear: bool, device: Any
) -> Scores:
    """Return the RMSE of the simple models on the validation and test ratings.

    Args:
        ratings: The ratings of the run, with or without biases.
        rows: What the rows of the ratings are.
        strength: Shrinkage of the biases, where they have not been subtracted.
        with_linear: Whether to fit the linear model, if the number of items allows it.
        device: Where to fit it.
    """
    if ratings.column_biases is None:
        ratings = subtract_biases(ratings, fit_biases(ratings.training, strength))
    if rows == "items":
        ratings = ratings.map(transpose)
    targets = {"validation": ratings.validation, "test": ratings.test}
    given = {role: part for role, part in targets.items() if part is not None}
    scores = {role: _score_biases(part) for role, part in given.items()}
    missing = explain_missing_linear(ratings.training.num_items, device)
    if with_linear and given and missing is None:
        for role, rmse in _score_linear(ratings.training, given, device).items():
            scores[role][LINEAR_ITEMS] = rmse
    return scores


def explain_missing_linear(num_items: int, device: Any) -> str | None:
    """Return why there is no linear item model, or None if there is one."""
    most = _MOST_ITEMS.get(device.platform)
    if most is None:
        return f"not computed on {device.platform}"
    if num_items <= most:
        return None
    return (
        f"not computed: there are {num_items:,} items, and its closed form is for up to "
        f"{most:,} on {_DEVICES[device.platform]}"
    )


def _score_biases(targets: Ratings) -> dict[str, float]:
    biases = targets.biases
    assert biases is not None
    predicted = biases.lookup(targets.users, targets.items)
    actual = biases.restore(targets.values, targets.users, targets.items)
    return {
        GLOBAL_MEAN: _rmse(biases.mean - actual),
        BIASES: _rmse(np.clip(predicted, biases.smallest, biases.largest) - actual),
    }


def _rmse(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(errors, dtype=np.float64))))


def _score_linear(
    training: Ratings, targets: dict[str, Ratings], device: Any
) -> dict[str, float]:
    """Return the RMSE of the linear model, with the penalty that suits the first part."""
    gram = _compute_gram(training, device)
    unit = float(np.mean(np.square(training.values, dtype=np.float64)))
    best: dict[str, float] = {}
    for penalty in _PENALTIES:
        weights = _solve(gram, penalty * unit)
        found = {
            role: _score_weights(weights, training, part, device)
            for role, part in targets.items()
        }
        first = next(iter(targets))
        if not best or found[first] < best[first]:
            best = found
    return best


def _compute_gram(training: Ratings, device: Any) -> jax.Array:  # (items, items)
    """Sum up the products of all pairs of columns, a batch of users at a time."""

    @functools.partial(jit, donate_argnums=0)
    def add(gram: jax.Array, batch: Any) -> jax.Array:
        rows = to_dense_rows(batch, training.num_items)
        return gram + _multiply(rows.T, rows)

    gram = jnp.zeros((training.num_items, training.num_items), jnp.float32, device=device)
    for element in _batches(training, None):
        batch = element["batch"]
        # The last batch is filled up with repeated users, who must not count again.
        row = np.where(np.append(element["valid"], False)[batch["row"]], batch["row"], -1)
        batch["row"] = np.where(row < 0, len(element["valid"]), row).astype(np.int32)
        gram = add(gram, jax.device_put(batch, device))
    return gram


@jit
def _solve(gram: jax.Array, penalty: jax.Array) -> jax.Array:  # (items, items)
    """Return the weights: the optimum with a diagonal of 0, as no item predicts itself."""
    inverse = jnp.linalg.inv(gram + penalty * jnp.eye(len(gram)))
    return jnp.fill_diagonal(-inverse / jnp.diag(inverse), 0, inplace=False)


def _score_weights(
    weights: jax.Array,  # (items, items)
    training: Ratings,
    targets: Ratings,
    device: Any,
) -> float:
    biases = targets.biases
    assert biases is not None
    of_item = jnp.asarray(biases.mean + biases.of_item)

    @jit
    def sum_squares(weights: jax.Array, batch: Any, of_user: Any, valid: Any) -> jax.Array:
        rows = to_dense_rows(batch, training.num_items)
        output = _multiply(rows, weights)
        row, item, value = get_known_ratings(batch, "target_")
        of_rating = jnp.append(of_user, 0)[row] + of_item[item]
        left = output.at[row, item].get(mode="fill", fill_value=0)
        predicted = left * biases.unit + of_rating
        predicted = jnp.clip(predicted, biases.smallest, biases.largest)
        error = predicted - (value * biases.unit + of_rating)
        return jnp.where(jnp.append(valid, False)[row], jnp.square(error), 0).sum()

    total = 0.0
    for element in _batches(training, targets):
        batch = element["batch"]
        parts = (batch, biases.of_user[batch["user"]], element["valid"])
        total += float(sum_squares(weights, *jax.device_put(parts, device)))
    return float(np.sqrt(total / targets.num_ratings))


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def _batches(ratings: Ratings, targets: Ratings | None) -> EvaluationBatches:
    source = evaluation_source(ratings, targets, _BATCH_SIZE)
    return EvaluationBatches(RowSource(source), _BATCH_SIZE)


def fit_linear_items(
    training: Ratings,
    validation: Ratings | None,
    positive_from: float,
    device: Any,
) -> jax.Array | None:  # (items, items)
    """Fit the linear model that ranks items, if their number allows it."""
    if explain_missing_linear(training.num_items, device) is not None:
        return None
    liked = binarize(training, positive_from)
    gram = _compute_gram(liked, device)
    if validation is None:
        return _solve(gram, _RANKING_PENALTIES[2])
    options = RankingOptions((CHOSEN_AT,), positive_from)
    best, best_ndcg = None, -1.0
    for penalty in _RANKING_PENALTIES:
        weights = _solve(gram, penalty)
        scorer = _rank_linearly(weights, positive_from)
        found = measure_ranking(scorer, training, validation, options, _BATCH_SIZE, device)
        if not found[f"ndcg_at_{CHOSEN_AT}"] <= best_ndcg:  # NaN: nothing is relevant
            best, best_ndcg = weights, found[f"ndcg_at_{CHOSEN_AT}"]
    return best


def score_ranking_baselines(
    ratings: RatingData,
    linear: jax.Array | None,  # (items, items)
    ranking: RankingOptions,
    device: Any,
) -> Scores:
    """Return the metrics of the simple rankings, by metric and then by model.

    Args:
        ratings: The ratings of the run.
        linear: The fitted linear model, if there is one.
        ranking: The lengths of the rankings, and what is relevant.
        device: Where to compute.
    """
    training = ratings.training
    count = binarize(training, ranking.relevant_from)
    counts = np.bincount(count.items, minlength=training.num_items).astype(np.float32)
    scorers = {
        POPULARITY: Scorer(lambda w, rows, _: jnp.broadcast_to(w, rows.shape), counts)
    }
    if linear is not None:
        scorers[LINEAR_ITEMS] = _rank_linearly(linear, ranking.relevant_from)
    targets = {"validation": ratings.validation, "test": ratings.test}
    scores: Scores = {}
    for role, part in targets.items():
        if part is None:
            continue
        for name, scorer in scorers.items():
            found = measure_ranking(scorer, training, part, ranking, _BATCH_SIZE, device)
            for metric, value in found.items():
                scores.setdefault(f"{role}_{metric}", {})[name] = value
    return scores


def _rank_linearly(linear: jax.Array, positive_from: float) -> Scorer:
    def score(weights: jax.Array, rows: jax.Array, users: jax.Array) -> jax.Array:
        del users
        liked = (rows >= positive_from) & (rows != 0)
        return _multiply(liked.astype(jnp.float32), weights)

    return Scorer(score, linear)


def binarize(ratings: Ratings, positive_from: float) -> Ratings:
    """Return the liked items of each user, with the value 1."""
    is_liked = np.asarray(ratings.values) >= positive_from
    return from_events(
        ratings.users[is_liked],
        np.asarray(ratings.items)[is_liked],
        np.ones(int(is_liked.sum()), np.float32),
        user_ids=ratings.user_ids,
        item_ids=ratings.item_ids,
    )


def find_better(
    reached: float, baselines: dict[str, float], mode: Mode = "min"
) -> list[str]:
    """Return the simple models that are at least as good as the network."""
    sign = 1 if mode == "min" else -1
    return [name for name, value in baselines.items() if sign * value <= sign * reached]
