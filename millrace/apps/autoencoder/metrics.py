"""Metrics of predicted ratings and of rankings.

The metric function of ratings returns sums and counts per row. The evaluation averages
them over all rows, and `compute_scores` turns these means into metrics.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from millrace.apps.autoencoder.loss import to_dense_rows
from millrace.apps.autoencoder.model import Model, get_known_ratings, predict_rows
from millrace.data.ratings.matrix import Biases
from millrace.program.evaluate import MetricFn


class RankingOptions(NamedTuple):
    """How to score a ranking."""

    top: tuple[int, ...]
    """Lengths of the rankings."""
    relevant_from: float
    """Smallest rating that makes an item relevant."""

    @property
    def longest(self) -> int:
        """The length of the longest ranking."""
        return max(self.top)


def build_metrics(
    model: Model, biases: Biases | None = None, *, clip: bool = False
) -> MetricFn:
    """Return the metric function of the rating errors of a model; see below."""

    def predict(params: Any, rows: jax.Array, users: jax.Array) -> jax.Array:
        del users
        return predict_rows(model, params, rows)

    return build_error_metrics(predict, model.num_items, biases, clip=clip)


def build_error_metrics(
    predict: Callable[[Any, jax.Array, jax.Array], jax.Array],
    num_columns: int,
    biases: Biases | None = None,
    *,
    clip: bool = False,
) -> MetricFn:
    """Return the metric function of rating errors.

    Args:
        predict: ``(weights, rows, users) -> predictions`` without biases.
        num_columns: The columns of a row.
        biases: Those subtracted from the ratings, if any; clipping needs them.
        clip: Whether predictions are limited to the scale of the ratings.
    """

    def metric_fn(weights: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
        del model_state
        rows = to_dense_rows(batch, num_columns)
        output = predict(weights, rows, batch["user"]).astype(jnp.float32)
        return _compute_rating_errors(output, batch, biases, clip=clip)

    return metric_fn


AddBiases = Callable[[jax.Array, jax.Array], jax.Array]
"""``(values, users) -> ratings``; values and ratings are (users, items)."""


def build_add_biases(biases: Biases | None) -> AddBiases:
    """Return a function that adds subtracted biases back to values."""
    if biases is None:
        return lambda values, users: values
    of_item = biases.mean + biases.of_item

    def add_biases(values: jax.Array, users: jax.Array) -> jax.Array:
        of_user = jnp.asarray(biases.of_user)[users][:, None]
        return values * biases.unit + of_user + of_item

    return add_biases


def _compute_rating_errors(
    output: jax.Array,  # (users, items)
    batch: Any,
    biases: Biases | None,
    *,
    clip: bool,
) -> dict[str, jax.Array]:  # (users,) each
    """Return the summed errors of each row on its target ratings."""
    row, item, value = get_known_ratings(batch, "target_")
    # Padding has a row past the end: it reads 0, and the sums drop it.
    predicted = output.at[row, item].get(mode="fill", fill_value=0)
    value = value.astype(jnp.float32)
    if biases is not None:
        predicted, value = predicted * biases.unit, value * biases.unit
    if biases is not None and clip:
        of_user = jnp.asarray(biases.of_user)[batch["user"]].at[row].get(mode="clip")
        base = biases.mean + of_user + jnp.asarray(biases.of_item)[item]
        predicted = jnp.clip(predicted + base, biases.smallest, biases.largest) - base
    error = predicted - value
    zeros = jnp.zeros(output.shape[0])

    def sum_by_row(values: jax.Array) -> jax.Array:
        return zeros.at[row].add(values, mode="drop")

    squared, count = sum_by_row(jnp.square(error)), sum_by_row(jnp.ones_like(error))
    whole = batch["is_whole"].astype(jnp.float32)
    batch_rmse = jnp.sqrt(squared.sum() / jnp.maximum(count.sum(), 1))
    return {
        "squared_error": squared,
        "absolute_error": sum_by_row(jnp.abs(error)),
        "num_ratings": count,
        "is_whole": whole,
        "batch_rmse": batch_rmse * whole,
    }


def find_relevant(
    rows: jax.Array,  # (users, items), 0 where there is no rating
    batch: Any,
    relevant_from: float,
    biases: Biases | None,
) -> jax.Array:  # bool (users, items)
    """Return which items are relevant for each user of a batch.

    `biases` are those subtracted from the target ratings. An item that was rated before
    cannot be recommended, and is not relevant.
    """
    targets = to_dense_rows(batch, rows.shape[1], "target_")
    ratings = build_add_biases(biases)(targets, batch["user"])
    if biases is not None:
        # Subtracting and adding biases rounds: a target of exactly relevant_from must not
        # end up below it.
        ratings += jnp.abs(targets) * biases.unit * jnp.finfo(targets.dtype).eps
        ratings += relevant_from * 1e-6
    relevant = ratings >= jnp.asarray(relevant_from, ratings.dtype)
    return relevant & (targets != 0) & (rows == 0)


def compute_ranking_metrics(
    best: jax.Array,  # (users, longest), items, best first
    relevant: jax.Array,  # bool (users, items)
    top: Sequence[int],
) -> dict[str, jax.Array]:  # (users,) each
    """Return the metrics of each user's ranking, as RecBole defines them, at each length.

    All are 0 for a user without relevant items, who does not count. The gain of an item in
    NDCG is 1 if it is relevant, else 0; the recall is relative to all relevant items, and
    MAP to as many of them as the list is long.
    """
    hit = jnp.take_along_axis(relevant, best, axis=1).astype(jnp.float32)
    count = relevant.sum(1)
    place = jnp.arange(1, best.shape[1] + 1)
    discount = 1 / jnp.log2(place + 1)
    num_hits, gain = jnp.cumsum(hit, axis=1), jnp.cumsum(hit * discount, axis=1)
    precision = jnp.cumsum(hit * num_hits / place, axis=1)
    first = jax.lax.cummax(hit / place, axis=1)
    metrics = {"has_relevant": (count > 0).astype(jnp.float32)}
    for k in top:
        last = min(k, best.shape[1]) - 1
        most = jnp.clip(count, 1, k)  # relevant items that a list can have
        ideal = jnp.cumsum(1 / jnp.log2(jnp.arange(2, k + 2)))[most - 1]
        metrics |= {
            f"recall_at_{k}": num_hits[:, last] / jnp.maximum(count, 1),
            f"ndcg_at_{k}": gain[:, last] / ideal,
            f"precision_at_{k}": num_hits[:, last] / k,
            f"hit_rate_at_{k}": (num_hits[:, last] > 0).astype(jnp.float32),
            f"mrr_at_{k}": first[:, last],
            f"map_at_{k}": precision[:, last] / most,
        }
    return metrics


def select_top_items(
    output: jax.Array,  # (users, items)
    rows: jax.Array,  # (users, items), 0 where there is no rating
    top: int,
) -> tuple[jax.Array, jax.Array]:  # (users, top) each
    """Return the ratings and the items of the best unrated items, best first.

    If a user has too few unrated items, the remaining ratings are minus infinity.
    """
    unrated = jnp.where(rows == 0, output, -jnp.inf)
    return jax.lax.top_k(unrated, min(top, output.shape[1]))


def compute_scores(means: dict[str, float]) -> dict[str, float]:
    """Turn means over rows into the metrics that they contain.

    ``rmse`` and ``mae`` pool all ratings. ``mean_batch_rmse`` is what the reference calls
    RMSE: the mean of the RMSE of each full batch.
    """
    scores = {}
    if per_row := means.get("num_ratings"):
        scores["rmse"] = math.sqrt(means["squared_error"] / per_row)
        scores["mae"] = means["absolute_error"] / per_row
        whole = means["is_whole"]
        scores["mean_batch_rmse"] = means["batch_rmse"] / whole if whole else scores["rmse"]
    return scores
