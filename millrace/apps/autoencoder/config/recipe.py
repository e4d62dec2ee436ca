"""The recipe of a run: what options that are not given stand for. Imports nothing heavy.

Two recipes exist. *modern* predicts your own ratings well, whatever their number.
*graphcore* has the defaults of Graphcore's application, which its commands and the named
configurations rely on.
"""

import math
from pathlib import Path
from typing import Any

from millrace.apps.autoencoder.config.data import REFERENCE_SETTINGS, DataOptions
from millrace.config import ConfigurationError, flag
from millrace.data.ratings.counts import Counts, count_arrays, count_file

Values = dict[str, Any]

_GRAPHCORE_ONLY = (
    *("base_learning_rate", "learning_rate_decay", "loss_scaling", "gradient_clipping"),
    *("no_selu", "no_dropout", "no_prng", "detached_refeeding", "batches_per_step"),
    *("select_devices", "multiprocessing", "build_init", "logdir", "testing_on_checkpoint"),
)
"""Options that nobody gives who does not know Graphcore's application."""

_MANY_USERS = 50_000
"""Above this many users, rows are users: a column for each would make the network large."""
_BATCHES_PER_EPOCH = 10
"""Batches that small data are divided into at least."""
_FEW_RATINGS, _FEW_RATINGS_DECAY = 100_000, 3e-3
"""The weight decay for this many ratings; it falls with the root of their number."""
_DECAY_RANGE = (3e-4, 1e-2)
_HELD_OUT, _MOST_HELD_OUT = 0.1, 100_000
"""Fraction and largest number of the ratings that validate the model without a file."""

_MODERN: Values = {
    **{"subtract_biases": True, "bias_strength": 5.0, "clip_predictions": True},
    **{"size": 128, "untied_decoder": True, "no_dense_refeeding": True},
    **{"zero_output_layer": True, "dropout_rate": 0.5, "learning_rate": 0.02},
    **{"precision": "32.32", "loss_scaling": 1.0, "steps_per_log": 5},
}
_BY_ROWS: dict[str, Values] = {
    "items": {
        **{"batch_size": 64, "epochs": 60.0, "learning_rate_schedule": "cosine"},
        **{"input_dropout_rate": 0.5, "input_offset": 2.0, "early_stopping": 10},
    },
    "users": {
        **{"batch_size": 256, "epochs": 8.0, "learning_rate_decay": "1,0.316,0.1"},
        **{"input_dropout_rate": 0.7, "weight_decay": 1e-4, "early_stopping": 3},
    },
}


def expand_training_options(values: Values) -> Values:
    """Choose the recipe, and complete the options with it."""
    recipe = values.get("recipe") or "auto"
    if recipe == "auto":
        recipe = "modern" if _is_modern(values) else "graphcore"
    values = values | {"recipe": recipe}
    return _complete(values) if recipe == "modern" else values


def _is_modern(values: Values) -> bool:
    """Whether these are the user's own ratings, without options of the reference."""
    if values.get("data") not in (None, "file"):
        return False
    if any(values.get(name) is not None for name in _GRAPHCORE_ONLY):
        return False
    if values.get("arrays") is not None:
        return True
    file = values.get("training_data_file")
    return (
        file is not None and Path(file).name.removesuffix(".gz") not in REFERENCE_SETTINGS
    )


def _complete(values: Values) -> Values:
    """Return the options with those that are not given from the modern recipe."""
    counts = _count(values)
    rows = values.get("rows") or ("users" if counts.users > _MANY_USERS else "items")
    settings: Values = _MODERN | _BY_ROWS[rows] | {"rows": rows}
    settings["batch_size"] = _fitting_batch(settings["batch_size"], counts, rows)
    settings.setdefault("weight_decay", _choose_weight_decay(counts.ratings))
    if values.get("no_validation"):
        del settings["early_stopping"]
    elif not _has_validation(values):
        fraction = min(_HELD_OUT, _MOST_HELD_OUT / max(1, counts.ratings))
        settings["validation_fraction"] = float(f"{fraction:.3g}")
    if values.get("learning_rate_schedule", "cosine") != "cosine":
        settings.pop("learning_rate_schedule", None)
    return settings | {name: value for name, value in values.items() if value is not None}


def _has_validation(values: Values) -> bool:
    arrays = values.get("arrays")
    if arrays is not None:
        return "validation_user" in arrays["shapes"]
    return values.get("validation_data_file") is not None or values.get("data") is not None


def _fitting_batch(batch: int, counts: Counts, rows: str) -> int:
    """Return a batch of which small data have several in an epoch."""
    num_rows = counts.items if rows == "items" else counts.users
    while batch > 1 and batch * _BATCHES_PER_EPOCH > num_rows:
        batch //= 2
    return batch


def _choose_weight_decay(num_ratings: int) -> float:
    decay = _FEW_RATINGS_DECAY * math.sqrt(_FEW_RATINGS / max(1, num_ratings))
    low, high = _DECAY_RANGE
    return float(f"{min(max(decay, low), high):.2g}")


def _count(values: Values) -> Counts:
    """Count the ratings to train on. Files are parsed, and cached for the run."""
    if values.get("data") == "random":
        raise ConfigurationError(
            "The modern recipe is for ratings to learn from, and random ones have nothing "
            f"to learn. Give {flag('training_data_file')}, or --data generated."
        )
    if values.get("data") == "generated":
        users, items = values.get("num_users") or 4000, values.get("num_items") or 400
        return Counts(users, items, users * items * 3 // 10)
    if (record := values.get("arrays")) is not None:
        return count_arrays(record, "mr.autoencoder.train")
    if (file := values.get("training_data_file")) is None:
        raise ConfigurationError(f"{flag('training_data_file')} is required.")
    low, high = values.get("rating_range") or DataOptions().rating_range
    return count_file(file, (low, high))
