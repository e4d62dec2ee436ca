"""How well a model foretells ratings, and how well it ranks items."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from millrace.apps.autoencoder.feeding import ForEvaluation
from millrace.apps.autoencoder.item_rows import Columns, foretold
from millrace.apps.autoencoder.loss import dense_rows, known_ratings
from millrace.apps.autoencoder.model import Model, reconstruct
from millrace.data.ratings.matrix import Biases
from millrace.loop.async_validation import AsyncValidation
from millrace.loop.evaluate import evaluate
from millrace.loop.nan_guard import NonFiniteError
from millrace.plan import Plan
from millrace.program.evaluate import EvaluationProgram, MetricFn
from millrace.program.step import Weights


class Ranking(NamedTuple):
    """How a ranking is judged."""

    top: int
    """Items that are looked at."""
    relevant_from: float
    """The rating from which an item was worth recommending."""


class Validator:
    """Validates weights on a device of its own choice, every row counted once.

    Args:
        metric_fn: From `errors_of`, or several models' of them, or from `rankings_of`.
        plan: Gives the precision.
        source: Rows with what has been rated, and what is to be foretold.
        batch_size: Rows at a time.
        device: Where.
        by_itself: Whether this process validates what no other does; otherwise several
            share the rows, and each returns the result of all.
    """

    def __init__(
        self,
        metric_fn: MetricFn,
        plan: Plan,
        source: ForEvaluation,
        batch_size: int,
        device: Any,
        *,
        by_itself: bool = False,
    ) -> None:
        self._by_itself = by_itself
        alone = dataclasses.replace(plan, num_replicas=1)
        self._program = EvaluationProgram(metric_fn, alone, [device])
        self._source = source
        self._batch_size = batch_size

    def means(self, params: Any) -> dict[str, float]:
        """Return the mean over rows of what the metric function returns."""
        return self._means(self._program.place_state(Weights(params)))

    def _means(self, placed: Any) -> dict[str, float]:
        return evaluate(
            self._program,
            placed,
            self._source,
            self._batch_size,
            by_itself=self._by_itself,
        )

    def __call__(self, state: Any) -> dict[str, float]:
        """Return the metrics of a training state's weights, which must not be lost."""
        return _finite(self.of_weights(state.params), int(state.update))

    def beside_training(self) -> AsyncValidation:
        """Return the same, to be done while training goes on."""

        def snapshot(state: Any) -> tuple[Any, int]:
            copied = jax.tree.map(jnp.copy, state.params)
            return self._program.place_state(Weights(copied)), int(state.update)

        def validate(kept: tuple[Any, int]) -> dict[str, float]:
            placed, update = kept
            return _finite(scores(self._means(placed)), update)

        return AsyncValidation(snapshot, validate)

    def of_weights(self, params: Any) -> dict[str, float]:
        """Return the metrics of weights."""
        return scores(self.means(params))


def _finite(found: dict[str, float], update: int) -> dict[str, float]:
    if not math.isfinite(found["rmse"]):
        raise NonFiniteError(
            f"The validation RMSE is {found['rmse']:g} after update {update}: training has "
            "diverged. Start again with a smaller learning rate."
        )
    return found


def errors_of(
    model: Model, ranking: Ranking | None = None, biases: Biases | None = None
) -> MetricFn:
    """Return what is measured of each row; `scores` makes metrics of the means.

    Args:
        model: Whose weights will be given.
        ranking: How to judge rankings, where rows are users.
        biases: What the ratings are without; only rankings depend on it.
    """

    def metric_fn(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
        del model_state
        rows = dense_rows(batch, model.num_items)
        output = reconstruct(model, params, rows).astype(jnp.float32)
        found = rating_errors(output, batch)
        if ranking is not None:
            found |= ranking_quality(output, rows, batch, ranking, biases)
        return found

    return metric_fn


def rankings_of(model: Model, ranking: Ranking, biases: Biases | None = None) -> MetricFn:
    """Return what is measured of each user's ranking where rows are items.

    It is given `Columns` in place of weights. `biases` are what the ratings, by user, are
    without.
    """

    def metric_fn(columns: Columns, model_state: Any, batch: Any) -> dict[str, jax.Array]:
        del model_state
        output = foretold(model, columns, batch["user"]).astype(jnp.float32)
        rows = dense_rows(batch, output.shape[1])
        return ranking_quality(output, rows, batch, ranking, biases)

    return metric_fn


AddBiases = Callable[[jax.Array, jax.Array], jax.Array]
"""``(values, users) -> ratings``, both (users, items)."""


def adding(biases: Biases | None) -> AddBiases:
    """Return what adds to values what had been subtracted from ratings."""
    if biases is None:
        return lambda values, users: values
    of_item = biases.mean + biases.of_item

    def add(values: jax.Array, users: jax.Array) -> jax.Array:
        return values + jnp.asarray(biases.of_user)[users][:, None] + of_item

    return add


def rating_errors(output: jax.Array, batch: Any) -> dict[str, jax.Array]:
    """Return each row's errors on the ratings to foretell, added up."""
    row, item, value = known_ratings(batch, "target_")
    # Filling has a row past the end: it reads 0, and what it adds is dropped.
    error = output.at[row, item].get(mode="fill", fill_value=0) - value.astype(jnp.float32)
    nothing = jnp.zeros(output.shape[0])

    def by_row(values: jax.Array) -> jax.Array:
        return nothing.at[row].add(values, mode="drop")

    squared, count = by_row(jnp.square(error)), by_row(jnp.ones_like(error))
    whole = batch["is_whole"].astype(jnp.float32)
    batch_rmse = jnp.sqrt(squared.sum() / jnp.maximum(count.sum(), 1))
    return {
        "squared_error": squared,
        "absolute_error": by_row(jnp.abs(error)),
        "num_ratings": count,
        "is_whole": whole,
        "batch_rmse": batch_rmse * whole,
    }


def ranking_quality(
    output: jax.Array,
    rows: jax.Array,
    batch: Any,
    ranking: Ranking,
    biases: Biases | None = None,
) -> dict[str, jax.Array]:
    """Return each user's recall and NDCG over the items that they had not rated.

    Both are 0 for a user without relevant items, who does not count. NDCG's gain is 1
    for a relevant item and 0 for another.
    """
    users, add_biases = batch["user"], adding(biases)
    _, best = top_items(add_biases(output, users), rows, ranking.top)
    targets = dense_rows(batch, output.shape[1], "target_")
    ratings = add_biases(targets, users)
    if biases is not None:
        # What rounding may have taken of them.
        ratings += jnp.abs(targets) * jnp.finfo(targets.dtype).eps
        ratings += ranking.relevant_from * 1e-6
    relevant = ratings >= jnp.asarray(ranking.relevant_from, ratings.dtype)
    # What is rated again cannot be recommended.
    relevant &= (targets != 0) & (rows == 0)
    hit = jnp.take_along_axis(relevant, best, axis=1).astype(jnp.float32)
    count = relevant.sum(1)
    discount = 1 / jnp.log2(jnp.arange(2, best.shape[1] + 2))
    most = jnp.cumsum(discount)[jnp.clip(count, 1, best.shape[1]) - 1]
    return {
        "recall": hit.sum(1) / jnp.maximum(count, 1),
        "ndcg": (hit * discount).sum(1) / most,
        "has_relevant": (count > 0).astype(jnp.float32),
    }


def top_items(output: jax.Array, rows: jax.Array, top: int) -> tuple[jax.Array, jax.Array]:
    """Return the predicted ratings, and the items, of the best not rated before.

    Where a user has rated so much that there are too few, the rest is minus infinity.
    """
    unrated = jnp.where(rows == 0, output, -jnp.inf)
    return jax.lax.top_k(unrated, min(top, output.shape[1]))


def scores(means: dict[str, float]) -> dict[str, float]:
    """Turn means over rows into metrics, of ratings and rankings as far as measured.

    ``rmse`` and ``mae`` pool all ratings. ``mean_batch_rmse`` is what the reference calls
    RMSE: the mean over whole batches of each batch's own.
    """
    found = {}
    if per_row := means.get("num_ratings"):
        found["rmse"] = math.sqrt(means["squared_error"] / per_row)
        found["mae"] = means["absolute_error"] / per_row
        whole = means["is_whole"]
        found["mean_batch_rmse"] = means["batch_rmse"] / whole if whole else found["rmse"]
    if "recall" in means:
        ranked = means["has_relevant"]
        for name in ("recall", "ndcg"):
            found[name] = means[name] / ranked if ranked else math.nan
    return found
