"""By how much a trained model misses, rating by rating: for the report."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.feeding import ForEvaluation
from millrace.apps.autoencoder.loss import dense_rows, known_ratings
from millrace.apps.autoencoder.model import Model, reconstruct
from millrace.data.ratings.matrix import Biases
from millrace.data.stream import EvaluationBatches
from millrace.program.compiling import jit
from millrace.program.mixed_precision import narrow
from millrace.report.sections import Histogram, save_part

_MOST_RATINGS = 1_000_000
"""Ratings that are looked at; the shape of their distribution is known long before."""
_NUM_BINS = 41
_QUANTILES = (5, 25, 50, 75, 95)
_MOST_PLACES = 10


def residuals(
    model: Model,
    params: Any,
    users: ForEvaluation,
    batch_size: int,
    compute: str,
    biases: Biases | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the errors (foretold less rated) and the ratings that were to be foretold.

    Args:
        model: The choices.
        params: The weights.
        users: With what they have rated, and what is to be foretold.
        batch_size: Users at a time.
        compute: The type to compute in.
        biases: What the ratings are without.
    """

    @jit
    def errors_of(params: Any, batch: Any) -> jax.Array:
        # As in validation, ratings travel and are put in in the type of computation.
        batch = narrow(batch, compute)
        rows = dense_rows(batch, model.num_items)
        output = reconstruct(model, narrow(params, compute), rows).astype(jnp.float32)
        row, item, value = known_ratings(batch, "target_")
        foretold = output.at[row, item].get(mode="fill", fill_value=0)
        return foretold - value.astype(jnp.float32)

    device = jax.local_devices()[0]
    params = jax.device_put(params, device)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    seen = 0
    for element in EvaluationBatches(users, batch_size):
        if seen >= _MOST_RATINGS:
            break
        batch = element["batch"]
        error = jax.device_get(errors_of(params, jax.device_put(batch, device)))
        # Filling has a row past the end, and what fills up the last batch is not valid.
        row, item, value = (
            batch[f"target_{name}"].reshape(-1) for name in ("row", "item", "value")
        )
        counts = np.append(element["valid"], False)[row]
        error, row, item, value = (x[counts] for x in (error, row, item, value))
        if biases is not None:
            # Twice rounded to float32, they are whole or half stars all the same.
            value = np.round(value + biases.of(batch["user"][row], item), 3)
        found.append((error, value))
        seen += int(counts.sum())
    errors, ratings = map(np.concatenate, zip(*found, strict=True))
    return errors, ratings


def keep_residuals(run: Path, errors: np.ndarray, ratings: np.ndarray) -> None:
    """Add the distribution of the errors to a run's report; a diverged model has none."""
    is_finite = np.isfinite(errors)
    if not is_finite.any():
        return
    errors, ratings = errors[is_finite], ratings[is_finite]
    reach = max(float(np.quantile(np.abs(errors), 0.995)), 1e-3)
    counts, edges = np.histogram(np.clip(errors, -reach, reach), _NUM_BINS, (-reach, reach))
    part = Histogram(
        title="Rating residuals",
        note=f"Foretold less rated, over {len(errors):,} ratings that were not trained "
        f"on: mean {errors.mean():.3f}, RMSE {np.sqrt(np.square(errors).mean()):.4f}.",
        x_name="foretold less rated",
        edges=edges.round(5).tolist(),
        counts=counts.tolist(),
        by_name="rating",
        quantiles=_by_rating(errors, ratings),
    )
    save_part(run, "residuals", part)


def _by_rating(errors: np.ndarray, ratings: np.ndarray) -> list[list[Any]]:
    """Return quantiles of the errors at each rating; of many, ratings are rounded."""
    places = ratings if len(np.unique(ratings)) <= _MOST_PLACES else ratings.round()
    return [
        [float(place), np.percentile(errors[places == place], _QUANTILES).tolist()]
        for place in np.unique(places)
    ]
