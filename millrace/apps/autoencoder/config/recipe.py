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
    *("base_learning_rate", "base_learning_rates", "num_ipus", "detached_refeeding"),
)
"""Options that choose the graphcore recipe: the modern one does without them."""
_REPLACES = {
    "base_learning_rate": "learning_rate",
    "learning_rate_decay": "learning_rate_schedule",
    "no_dropout": "dropout_rate",
    "multiprocessing": "early_stopping",
}
"""Options that take the place of one of the modern recipe."""
_FULL_PRECISION = "32.32"

_MANY_USERS = 50_000
"""Above this many users, rows are users: a column for each would make the network large."""
_BATCHES_PER_EPOCH = 10
"""Batches that small data are divided into at least."""
_RATINGS_PER_BATCH = 100
"""With fewer in a batch, training would diverge at the learning rate of the recipe."""
_FEW_RATINGS, _FEW_RATINGS_DECAY = 100_000, 3e-3
"""The weight decay for this many ratings; it falls with the root of their number."""
_DECAY_RANGE = (3e-4, 1e-2)
_MANY_RATINGS, _WIDE = 300_000, 256
"""Above this many ratings, rows of items train a wider network: the test RMSE is lower by
0.004 on MovieLens-1M and by 0.002 on half of its users, for twice the time. On a sixth
of them, it would be higher by 0.001."""
_HELD_OUT, _MOST_HELD_OUT = 0.1, 30_000
"""Fraction and largest number of the ratings that validate the model without a file. 90,000
of MovieLens-1M, which are then not trained on, cost 0.002 of test RMSE."""

_LIKED_FROM = 0.8
"""The fraction of the largest valid rating from which items are liked: 4 of 5 stars."""

_MODERN: Values = {
    **{"subtract_biases": True, "bias_strength": 5.0, "normalize_ratings": True},
    **{"clip_predictions": True},
    **{"size": 128, "untied_decoder": True, "no_dense_refeeding": True},
    **{"zero_output_layer": True, "dropout_rate": 0.5, "learning_rate": 0.02},
    **{"precision": _FULL_PRECISION, "loss_scaling": 1.0, "steps_per_log": 5},
}
_RANKING: Values = {
    **{"rows": "users", "size": 256, "untied_decoder": True, "dropout_rate": 0.0},
    **{"input_dropout_rate": 0.5, "optimizer": "Adam"},
    **{"learning_rate": 1e-3, "learning_rate_schedule": "cosine", "weight_decay": 0.0},
    **{"batch_size": 64, "epochs": 20.0, "early_stopping": 6},
    **{"precision": _FULL_PRECISION, "loss_scaling": 1.0, "steps_per_log": 5},
}
"""Chosen on MovieLens-1M, 500 and 1,000 of its users, and 7,900 users of Netflix."""
_MANY_RANKED: Values = {"batch_size": 256, "epochs": 10.0, "early_stopping": 3}
"""For more than 50,000 users, who are many updates in an epoch."""
_BY_ROWS: dict[str, Values] = {
    "items": {
        **{"batch_size": 64, "epochs": 60.0, "learning_rate_schedule": "cosine"},
        **{"input_dropout_rate": 0.5, "input_offset": 2.0, "early_stopping": 10},
    },
    "users": {
        **{"batch_size": 64, "epochs": 40.0, "learning_rate_schedule": "cosine"},
        **{"input_dropout_rate": 0.7, "input_offset": 1.0, "early_stopping": 10},
        **{"bias_strength": 10.0, "learning_rate": 0.03},
    },
}
_FOR_MANY_USERS: Values = {
    **{"batch_size": 256, "epochs": 14.0, "weight_decay": 1e-4, "early_stopping": 4},
}
"""What differs for rows of many users."""


def expand_training_options(values: Values) -> Values:
    """Choose the recipe, and complete the options with it."""
    if (recipe := values.get("recipe") or "auto") == "auto":
        reasons = _find_reasons(values)
        values = values | {"recipe_reason": " and ".join(reasons) or None}
        is_modern = _has_own_ratings(values) and not reasons
        recipe = "modern" if is_modern else "graphcore"
    values = values | {"recipe": recipe}
    return _complete(values) if recipe == "modern" else values


def _has_own_ratings(values: Values) -> bool:
    """Whether there are ratings to learn from, for which the modern recipe is made."""
    if values.get("testing_on_checkpoint") is not None:
        return False  # the checkpoint has its own options
    if values.get("data") == "generated":
        return values.get("objective") == "ranking"
    if values.get("data") not in (None, "file"):
        return False
    return any(values.get(name) is not None for name in ("arrays", "training_data_file"))


def _find_reasons(values: Values) -> list[str]:
    """Return what asks for Graphcore's recipe: options and the name of a file."""
    if not _has_own_ratings(values) or values.get("data") == "generated":
        return []
    reasons = [flag(name) for name in _GRAPHCORE_ONLY if _is_given(values, name)]
    file = values.get("training_data_file")
    if file is not None and Path(file).name.removesuffix(".gz") in REFERENCE_SETTINGS:
        reasons.append(f"the file name {Path(file).name}")
    return reasons


def _is_given(values: Values, name: str) -> bool:
    # An exponent of 0 is given; only options that are off are not.
    return values.get(name) is not None and values[name] is not False


def _complete(values: Values) -> Values:
    """Return the options with those that are not given from the modern recipe."""
    counts = _count(values)
    settings = _choose_settings(values, counts)
    if _is_given(values, "detached_refeeding") and "no_dense_refeeding" in settings:
        raise ConfigurationError(
            "The modern recipe trains without re-feeding. Leave out "
            f"{flag('detached_refeeding')}, or give --recipe graphcore."
        )
    settings["batch_size"] = _fitting_batch(
        settings["batch_size"], counts, settings["rows"]
    )
    if "subtract_biases" in settings:  # it predicts ratings
        batch = values.get("batch_size") or settings["batch_size"]
        rate = settings["learning_rate"]
        settings["learning_rate"] = _fitting_rate(rate, batch, counts, settings["rows"])
    settings.setdefault("weight_decay", _choose_weight_decay(counts.ratings))
    _, largest = values.get("rating_range") or DataOptions().rating_range
    settings.setdefault("positive_from", float(f"{_LIKED_FROM * largest:.6g}"))
    if values.get("precision", _FULL_PRECISION) != _FULL_PRECISION:
        del settings["loss_scaling"]  # dynamic, as 16 bits need it
    holds_out = not (values.get("no_validation") or _has_validation(values))
    if holds_out:
        fraction = min(_HELD_OUT, _MOST_HELD_OUT / max(1, counts.ratings))
        settings["validation_fraction"] = float(f"{fraction:.3g}")
    holds_none = holds_out and values.get("validation_fraction") == 0
    if values.get("no_validation") or holds_none:
        del settings["early_stopping"]
    if values.get("learning_rate_schedule", "cosine") != "cosine":
        settings.pop("learning_rate_schedule", None)
    replaced = {other for name, other in _REPLACES.items() if _is_given(values, name)}
    kept = {name: value for name, value in settings.items() if name not in replaced}
    return kept | {name: value for name, value in values.items() if value is not None}


def _choose_settings(values: Values, counts: Counts) -> Values:
    """Return the settings for the objective and the number of users."""
    many_users = counts.users > _MANY_USERS
    # Without ratings there is nothing to predict, and every item is liked.
    choices = {"objective": "ranking", "positive_from": 1.0} if counts.implicit else {}
    if (values.get("objective") or choices.get("objective")) == "ranking":
        return _RANKING | (_MANY_RANKED if many_users else {}) | choices
    rows = values.get("rows") or ("users" if many_users else "items")
    settings = _MODERN | _BY_ROWS[rows] | {"rows": rows}
    if rows == "items" and counts.ratings > _MANY_RATINGS:
        settings["size"] = _WIDE
    return settings | (_FOR_MANY_USERS if rows == "users" and many_users else {})


def _has_validation(values: Values) -> bool:
    arrays = values.get("arrays")
    if arrays is not None:
        return "validation_user" in arrays["shapes"]
    is_generated = values.get("data") == "generated"
    return values.get("validation_data_file") is not None or is_generated


def _fitting_batch(batch: int, counts: Counts, rows: str) -> int:
    """Return a batch of which small data have several in an epoch."""
    while batch > 1 and batch * _BATCHES_PER_EPOCH > _count_rows(counts, rows):
        batch //= 2
    return batch


def _fitting_rate(rate: float, batch: int, counts: Counts, rows: str) -> float:
    """Return a learning rate that is smaller for batches of few ratings."""
    in_batch = batch * counts.ratings / max(1, _count_rows(counts, rows))
    return float(f"{rate * min(1, in_batch / _RATINGS_PER_BATCH):.2g}")


def _count_rows(counts: Counts, rows: str) -> int:
    return counts.items if rows == "items" else counts.users


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
    no_ratings = bool(values.get("no_ratings"))
    return count_file(file, (low, high), no_ratings=no_ratings)
