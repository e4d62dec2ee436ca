"""The simplest models, computed in the same run: a network should predict better.

- *global mean* predicts the mean training rating.
- *biases* adds the bias of the user and that of the item.
- *linear items* adds what a linear model predicts from the user's other ratings: EASE
  (arXiv 1905.03375) on what the biases leave over, which has a closed form.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.config.data import RowKind
from millrace.apps.autoencoder.data import RatingData, RowSource, subtract_biases
from millrace.apps.autoencoder.loss import to_dense_rows
from millrace.apps.autoencoder.model import get_known_ratings
from millrace.data.ratings.matrix import Ratings, fit_biases, transpose
from millrace.data.ratings.source import evaluation_source
from millrace.data.stream import EvaluationBatches
from millrace.program.compiling import jit

GLOBAL_MEAN, BIASES, LINEAR_ITEMS = "global mean", "biases", "linear items"

_MOST_ITEMS = {"cpu": 5_000, "gpu": 20_000}
"""Items for which the closed form takes seconds; its time grows with their third power."""
_BATCH_SIZE = 512
_PENALTIES = (400.0, 1200.0)
"""L2 penalties of the linear model, in units of the mean squared residual. The one with the
lower error on the first targets is used."""

Scores = dict[str, dict[str, float]]
"""The RMSE of each model by name, for the ratings of each role."""


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
    most = _MOST_ITEMS.get(device.platform, 0)
    if with_linear and given and ratings.training.num_items <= most:
        for role, rmse in _score_linear(ratings.training, given, device).items():
            scores[role][LINEAR_ITEMS] = rmse
    return scores


def _score_biases(targets: Ratings) -> dict[str, float]:
    biases = targets.biases
    assert biases is not None
    predicted = biases.lookup(targets.users, targets.items)
    actual = targets.values + predicted
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
        predicted = output.at[row, item].get(mode="fill", fill_value=0) + of_rating
        error = jnp.clip(predicted, biases.smallest, biases.largest) - value - of_rating
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


def find_better(model_rmse: float, baselines: dict[str, float]) -> list[str]:
    """Return the simple models that predict at least as well as the network."""
    return [name for name, rmse in baselines.items() if rmse <= model_rmse]
