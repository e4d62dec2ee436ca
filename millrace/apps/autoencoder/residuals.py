"""The prediction error of every rating, for the report."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.data import open_evaluation_source
from millrace.apps.autoencoder.loss import to_dense_rows
from millrace.apps.autoencoder.model import Model, get_known_ratings, predict_rows
from millrace.data.ratings.matrix import Ratings
from millrace.data.stream import EvaluationBatches
from millrace.program.compiling import jit
from millrace.program.mixed_precision import narrow
from millrace.report.sections import Histogram, save_section

_MOST_RATINGS = 1_000_000
"""Ratings to use at most; the shape of their distribution is clear long before."""
_NUM_BINS = 41
_QUANTILES = (5, 25, 50, 75, 95)
_MOST_GROUPS = 10


def save_residuals(
    folder: Path,
    model: Model,
    params: Any,
    known: Ratings,
    targets: Ratings,
    batch_size: int,
    compute_dtype: str,
    *,
    clip: bool,
) -> None:
    """Add the distribution of the errors on `targets` to the report of a run."""
    errors, ratings = _compute_residuals(
        model, params, known, targets, batch_size, compute_dtype, clip=clip
    )
    is_finite = np.isfinite(errors)
    if not is_finite.any():
        return  # a diverged model has no distribution
    errors, ratings = errors[is_finite], ratings[is_finite]
    limit = max(float(np.quantile(np.abs(errors), 0.995)), 1e-3)
    counts, edges = np.histogram(np.clip(errors, -limit, limit), _NUM_BINS, (-limit, limit))
    part = Histogram(
        title="Rating residuals",
        note=f"Predicted minus actual rating, over {len(errors):,} ratings that were not "
        f"used for training: mean {errors.mean():.3f}, RMSE "
        f"{np.sqrt(np.square(errors).mean()):.4f}.",
        x_name="predicted minus actual rating",
        edges=edges.round(5).tolist(),
        counts=counts.tolist(),
        by_name="rating",
        quantiles=_quantiles_by_rating(errors, ratings),
    )
    save_section(folder, "residuals", part)


def _compute_residuals(
    model: Model,
    params: Any,
    known: Ratings,
    targets: Ratings,
    batch_size: int,
    compute_dtype: str,
    *,
    clip: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the errors (predicted minus actual) and the actual ratings."""

    @jit
    def compute_errors(params: Any, batch: Any) -> jax.Array:
        batch = narrow(batch, compute_dtype)  # as in validation
        rows = to_dense_rows(batch, model.num_items)
        output = predict_rows(model, narrow(params, compute_dtype), rows)
        row, item, value = get_known_ratings(batch, "target_")
        predicted = output.astype(jnp.float32).at[row, item].get(mode="fill", fill_value=0)
        return predicted - value.astype(jnp.float32)

    device = jax.local_devices()[0]
    params = jax.device_put(params, device)
    source = open_evaluation_source(known, targets, batch_size)
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    num_seen = 0
    for element in EvaluationBatches(source, batch_size):
        if num_seen >= _MOST_RATINGS:
            break
        batch = element["batch"]
        error = jax.device_get(compute_errors(params, jax.device_put(batch, device)))
        row, item, value = (
            batch[f"target_{name}"].reshape(-1) for name in ("row", "item", "value")
        )
        # Padding has a row past the end; rows that only fill up the last batch are invalid.
        is_real = np.append(element["valid"], False)[row]
        error, row, item, value = (x[is_real] for x in (error, row, item, value))
        if targets.biases is not None:
            # Rounded to float32 twice; this restores whole and half stars.
            base = targets.biases.lookup(batch["user"][row], item)
            error, value = error * targets.biases.unit, value * targets.biases.unit
            predicted = error + value + base
            value = np.round(value + base, 3)
            if clip:
                limits = (targets.biases.smallest, targets.biases.largest)
                error = np.clip(predicted, *limits) - value
        parts.append((error, value))
        num_seen += int(is_real.sum())
    errors, ratings = map(np.concatenate, zip(*parts, strict=True))
    return errors, ratings


def _quantiles_by_rating(errors: np.ndarray, ratings: np.ndarray) -> list[list[Any]]:
    """Return quantiles of the errors per rating, rounded if there are many ratings."""
    groups = ratings if len(np.unique(ratings)) <= _MOST_GROUPS else ratings.round()
    return [
        [float(group), np.percentile(errors[groups == group], _QUANTILES).tolist()]
        for group in np.unique(groups)
    ]
