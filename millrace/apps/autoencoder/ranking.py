"""Rankings by the network and the linear item model together, and how good rankings are.

A model for ranking scores items by two parts. *Linear items* is EASE (arXiv 1905.03375) on
the liked items, which has a closed form and is hard to beat on small data. The network adds
what is not linear. How much the network counts is chosen at every validation, with the
checkpoint, so that a network that learns nothing does no harm.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.data import RowSource
from millrace.apps.autoencoder.loss import to_dense_rows
from millrace.apps.autoencoder.metrics import (
    RankingOptions,
    compute_ranking_metrics,
    find_relevant,
    select_top_items,
)
from millrace.apps.autoencoder.model import Model, find_liked, predict_rows
from millrace.data.ratings.matrix import Ratings
from millrace.data.ratings.source import evaluation_source
from millrace.data.stream import EvaluationBatches
from millrace.program.compiling import jit
from millrace.program.evaluate import MetricFn

LINEAR_ITEMS_FILE = "linear_items.npy"
"""The weights of the linear item model, in the directory of a run."""
CHOSEN_AT = 10
"""The length of the rankings whose NDCG selects checkpoints."""
NDCG = f"validation_ndcg_at_{CHOSEN_AT}"
NETWORK_WEIGHT = "network_weight"

NETWORK_WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""The weights of the network to choose from, next to linear items."""
_DEFAULT_WEIGHT = 0.2
"""The weight of the network without validation."""
_UNIT = 0.015
"""Scores of linear items are about linear below this and become logarithms above. With
0.01 to 0.02, the likelihood of the scores was the highest on MovieLens-1M."""


class Scorer(NamedTuple):
    """A ranking: a function of weights, dense rows and users, and its weights."""

    score: Callable[[Any, jax.Array, jax.Array], jax.Array]
    weights: Any


def score_linear_items(
    model: Model,
    linear: jax.Array,  # (items, items)
    rows: jax.Array,  # (users, items), 0 where there is no rating
) -> jax.Array:  # (users, items)
    """Return what the linear item model makes of the liked items of each row."""
    liked = find_liked(model, rows).astype(jnp.float32)
    return jnp.matmul(liked, linear, precision="highest")


def _as_logits(scores: jax.Array) -> jax.Array:
    """Turn scores of linear items into something like logits, in the same order."""
    scaled = scores / _UNIT
    # The logarithm of softplus, which is the number itself far below 0.
    positive = jnp.log(jax.nn.softplus(jnp.maximum(scaled, -15.0)))
    return jnp.where(scaled < -15.0, scaled, positive)


def score_items(
    model: Model,
    params: Any,
    linear: jax.Array | None,  # (items, items)
    rows: jax.Array,  # (users, items), 0 where there is no rating
    network_weight: Any,
) -> jax.Array:  # (users, items)
    """Return the score of every item; higher is better."""
    logits = predict_rows(model, params, rows).astype(jnp.float32)
    if linear is None:
        return logits
    base = _as_logits(score_linear_items(model, linear, rows))
    return base + network_weight * logits


def build_selection_metrics(model: Model, ranking: RankingOptions) -> MetricFn:
    """Return the metric function by which checkpoints and network weights are chosen.

    The model state is the matrix of linear items, or None.
    """

    def metric_fn(params: Any, linear: Any, batch: Any) -> dict[str, jax.Array]:
        rows = to_dense_rows(batch, model.num_items)
        relevant = find_relevant(rows, batch, ranking.relevant_from, None)
        logits = predict_rows(model, params, rows).astype(jnp.float32)
        metrics = {"is_finite": jnp.isfinite(logits).all(1).astype(jnp.float32)}
        weights, base = (1.0,), jnp.zeros(())
        if linear is not None:
            weights = NETWORK_WEIGHTS
            base = _as_logits(score_linear_items(model, linear, rows))
        for number, weight in enumerate(weights):
            _, best = select_top_items(base + weight * logits, rows, ranking.longest)
            quality = compute_ranking_metrics(best, relevant, ranking.top)
            metrics["has_relevant"] = quality.pop("has_relevant")
            for name in ("ndcg", "recall"):
                metrics[f"{name}_{number}"] = quality[f"{name}_at_{CHOSEN_AT}"]
        return metrics

    return metric_fn


def choose_network_weight(means: dict[str, float]) -> dict[str, float]:
    """Turn means of selection metrics into those of the best weight of the network."""
    ranked = means["has_relevant"]
    numbers = [int(name[5:]) for name in means if name.startswith("ndcg_")]
    best = max(numbers, key=lambda number: means[f"ndcg_{number}"])
    scores = {
        f"{name}_at_{CHOSEN_AT}": means[f"{name}_{best}"] / ranked if ranked else math.nan
        for name in ("ndcg", "recall")
    }
    if len(numbers) > 1:
        scores[NETWORK_WEIGHT] = NETWORK_WEIGHTS[best]
    if means["is_finite"] < 1:
        # A network that has diverged could still look good next to linear items.
        scores[f"ndcg_at_{CHOSEN_AT}"] = math.nan
    return scores


def read_network_weight(manifest: dict[str, Any]) -> float:
    """Return the weight of the network that was chosen for a checkpoint."""
    scores = manifest.get("scores") or {}
    return float(scores.get(f"validation_{NETWORK_WEIGHT}", _DEFAULT_WEIGHT))


def measure_ranking(
    scorer: Scorer,
    known: Ratings,
    targets: Ratings,
    ranking: RankingOptions,
    batch_size: int,
    device: Any,
) -> dict[str, float]:
    """Return the quality of rankings of all items that a user has not rated.

    Args:
        scorer: The ranking.
        known: Known ratings by user, whose items are not ranked.
        targets: Later ratings, some of which are relevant.
        ranking: The lengths of the rankings, and what is relevant.
        batch_size: Users per batch.
        device: Where to compute.
    """
    counts = np.bincount(known.items, minlength=known.num_items)
    popularity = jax.device_put(counts.astype(np.float32), device)
    dtype = jax.tree.leaves(scorer.weights)[0].dtype
    count_novelty = known.num_users

    @jit
    def add(weights: Any, appeared: jax.Array, element: Any, popularity: jax.Array) -> Any:
        batch, valid = element["batch"], element["valid"]
        rows = to_dense_rows(batch, known.num_items)
        output = scorer.score(weights, rows.astype(dtype), batch["user"])
        relevant = find_relevant(rows, batch, ranking.relevant_from, known.biases)
        values, best = select_top_items(output, rows, ranking.longest)
        is_listed = jnp.isfinite(values) & (relevant.any(1) & valid)[:, None]
        quality = compute_ranking_metrics(best, relevant, ranking.top)
        popular = jnp.where(is_listed, popularity[best], 0)
        novel = jnp.log2(count_novelty / jnp.maximum(popularity[best], 1))
        for k in ranking.top:
            listed = jnp.maximum(is_listed[:, :k].sum(1), 1)
            quality[f"popularity_at_{k}"] = popular[:, :k].sum(1) / listed
            novelty = jnp.where(is_listed, novel, 0)[:, :k].sum(1) / listed
            quality[f"novelty_at_{k}"] = novelty
        # For each item, the best place where it has appeared.
        place = jnp.where(is_listed, jnp.arange(best.shape[1]), ranking.longest)
        appeared = appeared.at[best].min(place)
        sums = {n: jnp.where(valid, v, 0).sum() for n, v in quality.items()}
        return appeared, sums

    appeared = jnp.full(known.num_items, ranking.longest, jnp.int32, device=device)
    weights = jax.device_put(scorer.weights, device)
    source = RowSource(evaluation_source(known, targets, batch_size))
    parts = []
    for element in EvaluationBatches(source, batch_size):
        element = jax.device_put(element, device)
        appeared, sums = add(weights, appeared, element, popularity)
        parts.append(sums)
    fetched, places = jax.device_get((parts, appeared))
    # Added on the host in float64, so that the result does not depend on the batch size.
    totals = {name: sum(float(part[name]) for part in fetched) for name in fetched[0]}
    ranked = totals.pop("has_relevant")
    scores = {n: total / ranked if ranked else math.nan for n, total in totals.items()}
    for k in ranking.top:
        scores[f"coverage_at_{k}"] = float((places < k).mean()) if ranked else math.nan
    return scores


def load_linear_items(folder: Path) -> np.ndarray | None:
    """Return the matrix of the linear item model that a run has kept, if it has one."""
    path = folder / LINEAR_ITEMS_FILE
    return np.load(path) if path.is_file() else None
