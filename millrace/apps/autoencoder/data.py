"""Ratings to train on, to validate with and to test with, from files or made up.

Where rows are to be items, the ratings are turned when they are loaded: from there on
items take the users' part, and the rest of the application need not know. Where biases are
to be subtracted, that is done here too: errors are the same, and only what shows ratings
has to add them again.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.apps.autoencoder.config import TrainingConfig
from millrace.apps.autoencoder.config.data import DataOptions
from millrace.config import option_value
from millrace.data.ratings.biases import ColumnBiases, fit_biases
from millrace.data.ratings.file import load_ratings, paired
from millrace.data.ratings.generated import generated_ratings, random_ratings
from millrace.data.ratings.matrix import Ratings, Unseen, transposed
from millrace.run.run import Run

_RANDOM_SIZES = {"num_users": 480_000, "num_items": 18_000, "num_ratings": 13_000_000}
_VALIDATION_SHARE = 13
"""Of random ratings there are this many times fewer to validate with."""


class RatingData(NamedTuple):
    """Ratings, numbered alike, by user or by item."""

    training: Ratings
    validation: Ratings | None
    test: Ratings | None = None
    """Only where ratings are generated."""
    unseen: Unseen | None = None
    """What was left out of validation."""
    noise: float | None = None
    """Of generated ratings: no model foretells better than this RMSE."""
    column_biases: ColumnBiases | None = None
    """What has been subtracted, where something has."""


def load(config: DataOptions, seed: int) -> RatingData:
    """Load the ratings that the configuration names, or make them up; rows as it says."""
    ratings = _by_user(config, seed)
    ratings = turned(ratings) if config.rows == "items" else ratings
    if not config.subtract_biases:
        return ratings
    return without_biases(ratings, fit_biases(ratings.training))


def without_biases(ratings: RatingData, biases: ColumnBiases) -> RatingData:
    """Subtract the columns' biases, and the rows' as the training ratings tell them."""
    known = ratings.training
    training, *others = (
        None if part is None else biases.subtracted(part, known)
        for part in (known, ratings.validation, ratings.test)
    )
    assert training is not None
    validation, test = others
    return ratings._replace(
        training=training, validation=validation, test=test, column_biases=biases
    )


def turned(ratings: RatingData) -> RatingData:
    """Make ratings by user ratings by item, or the other way round."""
    parts = (ratings.training, ratings.validation, ratings.test)
    training, *others = (None if part is None else transposed(part) for part in parts)
    assert training is not None
    return ratings._replace(training=training, validation=others[0], test=others[1])


def _by_user(config: DataOptions, seed: int) -> RatingData:
    if config.kind == "generated":
        return _generated(config, seed)
    if config.kind == "random":
        return _random(config, seed)
    assert config.training_data_file is not None
    limits = (config.rating_range[0], config.rating_range[1])
    if config.validation_data_file is None:
        return RatingData(load_ratings(config.training_data_file, limits=limits), None)
    training, validation, unseen = paired(
        config.training_data_file, config.validation_data_file, limits=limits
    )
    return RatingData(training, validation, unseen=unseen)


def _generated(config: DataOptions, seed: int) -> RatingData:
    sizes = _given(config, "num_users", "num_items")
    training, validation, test, truth = generated_ratings(**sizes, seed=seed)
    return RatingData(training, validation, test, noise=truth.noise)


def _random(config: DataOptions, seed: int) -> RatingData:
    sizes = _RANDOM_SIZES | _given(config, *_RANDOM_SIZES)
    training = random_ratings(**sizes, seed=seed)
    fewer = {"num_ratings": max(1, sizes["num_ratings"] // _VALIDATION_SHARE)}
    return RatingData(training, random_ratings(**(sizes | fewer), seed=seed + 1))


def _given(config: DataOptions, *names: str) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names if getattr(config, name)}


def describe(ratings: RatingData, config: DataOptions) -> str:
    """Name the ratings and their numbers in a line."""
    training, validation = ratings.training, ratings.validation
    num_users, num_items = training.num_users, training.num_items
    if config.rows == "items":
        num_users, num_items = num_items, num_users
    place = "made up at random"
    if config.kind == "generated":
        place = f"generated, with noise {ratings.noise:g}"
    elif isinstance(config.training_data_file, Path):
        place = str(config.training_data_file)
    line = (
        f"{training.num_ratings:,} by {num_users:,} users of {num_items:,} items ({place})"
    )
    if validation is not None:
        line += f", {validation.num_ratings:,} to validate with"
        if ratings.column_biases is not None:
            alone = np.sqrt(np.mean(np.square(validation.values)))
            line += f" (RMSE of the biases alone: {alone:.4f})"
    return line


def announce(ratings: RatingData, config: TrainingConfig, run: Run) -> None:
    """Say what a user should know of the ratings before training starts."""
    if config.data.kind == "random":
        run.console.warning(
            "No --training-data-file: THE RATINGS ARE RANDOM, and nothing can be learned "
            "from them. They serve to measure speed; --data generated shows learning."
        )
    say_unseen(ratings, run)
    recommended = config.data.reference_settings
    for name in ("size", "batch_size"):
        given = option_value(config, name)
        usual = getattr(recommended, name, None)
        if config.data.kind == "file" and given and usual and given != usual:
            option = name.replace("_", "-")
            run.console.line(
                f"--{option} {given} is used; the reference trains "
                f"{config.data.training_data_file} with {usual}."
            )


def say_unseen(ratings: RatingData, run: Run) -> None:
    """Say what was left out of validation, if anything."""
    unseen = ratings.unseen
    if unseen is not None and unseen.num_ratings:
        run.console.warning(
            f"{unseen.num_ratings:,} of the ratings to validate with are left out: "
            f"{unseen.num_users:,} users and {unseen.num_items:,} items do not occur in "
            "training."
        )
