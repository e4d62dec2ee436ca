"""Validate a trained recommender: its ratings and its ranking."""

import logging
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from millrace.apps.autoencoder import data
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.commands import ValidateConfig
from millrace.apps.autoencoder.config.data import RowKind
from millrace.apps.autoencoder.data import RatingData
from millrace.apps.autoencoder.feeding import validation_users
from millrace.apps.autoencoder.item_rows import columns_of
from millrace.apps.autoencoder.residuals import keep_residuals, residuals
from millrace.apps.autoencoder.scoring import Ranking, Validator, errors_of, rankings_of
from millrace.apps.autoencoder.trained import (
    ROLES,
    Trained,
    find_trained,
    with_columns_of_model,
)
from millrace.config import ConfigurationError, replace_options
from millrace.data.ratings.cache import file_hash
from millrace.data.ratings.matrix import Ratings, Unseen, align, transposed
from millrace.nn.layers import num_parameters
from millrace.run.run import Run

_NOTHING = Unseen(0, 0, 0)
_log = logging.getLogger("millrace")


def validate(config: ValidateConfig, run: Run) -> None:
    """Report the metrics of a checkpoint on ratings that it was not trained on."""
    started = time.perf_counter()
    trained = find_trained(config.checkpoint, newest=config.which == "newest")
    ratings, unknown = ratings_for(
        trained, config.training_data_file, config.validation_data_file
    )
    params, manifest = trained.weights()
    _describe(run, trained, ratings, num_parameters(params))
    if unknown.num_ratings:
        run.console.warning(said_of_unknown(unknown, trained.config.data.rows))
    ranking = Ranking(config.top, config.relevant_rating)
    batch_size = (
        config.validation_batch_size or trained.config.resolved_validation_batch_size
    )
    event = {"update": manifest["update"], "epoch": manifest["epoch"]}
    for kind, targets in (("validation", ratings.validation), ("test", ratings.test)):
        if targets is None:
            continue
        rows = validation_users(ratings.training, targets, batch_size)
        found = _scores(trained, params, ratings.training, targets, ranking, batch_size)
        for name, value in found.items():
            at = f"_at_{config.top}" if name in ("recall", "ndcg") else ""
            run.summary["metrics"][f"{kind}_{name}{at}"] = value
        compute = trained.config.plan.types.compute
        biases = targets.biases
        missed = residuals(trained.model, params, rows, batch_size, compute, biases)
        keep_residuals(run.directory.path, *missed)
    event |= {"time": round(time.perf_counter() - started, 3), **run.summary["metrics"]}
    for writer in run.writers:
        writer.write(event)
    run.summary["status"] = "completed"


def _scores(
    trained: Trained,
    params: Any,
    known: Ratings,
    targets: Ratings,
    ranking: Ranking,
    batch_size: int,
) -> dict[str, float]:
    """Return the metrics of weights; whatever the rows are, it is users who rank items."""
    model, plan, device = trained.model, trained.config.plan, jax.devices()[0]
    rows_are_users = trained.config.data.rows == "users"
    rows = validation_users(known, targets, batch_size)
    errors = errors_of(model, ranking if rows_are_users else None, known.biases)
    found = Validator(errors, plan, rows, batch_size, device).of_weights(params)
    if rows_are_users:
        return found
    columns = columns_of(model, params, known, batch_size, plan.types.compute)
    by_user = transposed(known)
    users = validation_users(by_user, transposed(targets), batch_size)
    rankings = rankings_of(model, ranking, by_user.biases)
    ranked = Validator(rankings, plan, users, batch_size, device)
    return found | ranked.of_weights(columns)


def test_checkpoint(config: AutoencoderConfig, run: Run) -> None:
    """Validate the newest checkpoint of another run, as the reference's option does."""
    assert config.testing_on_checkpoint is not None
    asked = ValidateConfig(
        checkpoint=config.testing_on_checkpoint,
        which="newest",
        training_data_file=config.data.training_data_file,
        validation_data_file=config.data.validation_data_file,
        validation_batch_size=config.training.validation_batch_size,
        run=config.run,
    )
    validate(asked, run)
    metrics = run.summary["metrics"]
    run.console.line(
        f"Testing RMSE: {metrics['validation_rmse']:.4f} over all ratings, "
        f"{metrics['validation_mean_batch_rmse']:.4f} as the mean of batches, which the "
        "reference prints"
    )


class Fitting(NamedTuple):
    """Ratings as a model knows them."""

    ratings: RatingData
    unknown: Unseen
    """What was left out of the training ratings, and the users or items, whichever are
    rows, of whom nothing is left."""


def ratings_for(
    trained: Trained, training: Path | None, validation: Path | None
) -> Fitting:
    """Return what a model was trained and validated with, or the files given instead.

    Args:
        trained: The model.
        training: What users have rated; None for what it was trained on.
        validation: What is to be foretold; None for what it was validated with.
    """
    asked = _asked(trained, training, validation)
    loaded = data.load(asked.data, asked.run.seed)
    known, unknown = with_columns_of_model(loaded.training, trained)
    validated, unseen = _aligned(loaded.validation, known)
    if trained.config.data.rows == "items":
        unknown, unseen = unknown.turned(), unseen.turned()
    aligned = loaded._replace(
        training=known,
        validation=validated,
        test=_aligned(loaded.test, known)[0],
        unseen=unseen.plus(loaded.unseen or _NOTHING),
    )
    if trained.column_biases is not None:
        aligned = data.without_biases(aligned, trained.column_biases)
    return Fitting(aligned, unknown)


def _asked(
    trained: Trained, training: Path | None, validation: Path | None
) -> AutoencoderConfig:
    """Return what a model was trained with, but for the files."""
    config = trained.config
    given = {"training_data_file": training, "validation_data_file": validation}
    given = {name: path for name, path in given.items() if path is not None}
    for name in ROLES:
        if f"{name}_data_file" not in given:
            _check_file(trained, name)
    if given and config.data.kind != "file":
        if training is None:
            raise ConfigurationError(
                f"The model was trained on {config.data.kind} ratings, so a "
                "validation_data_file needs a training_data_file beside it."
            )
        given |= dict.fromkeys(("data", "num_users", "num_items", "num_ratings"))
    # A file of another name says nothing about the size of this model.
    sizes = {"size": config.resolved_size, "batch_size": config.resolved_batch_size}
    # The model's own biases are subtracted once the columns are the model's.
    return replace_options(config, subtract_biases=False, **sizes, **given)


def _check_file(trained: Trained, name: str) -> None:
    """Raise where a file of the run is gone, and warn where it is another by now."""
    path: Path | None = getattr(trained.config.data, f"{name}_data_file")
    if path is None:
        return
    if not path.exists():
        raise ConfigurationError(
            f"There is no file {path}, which the run was {ROLES[name]}. Say where it is "
            f"with --{name}-data-file."
        )
    if name in trained.hashes and file_hash(path) != trained.hashes[name]:
        _log.warning("%s has changed since the run was %s it.", path, ROLES[name])


def _aligned(targets: Ratings | None, known: Ratings) -> tuple[Ratings | None, Unseen]:
    if targets is None:
        return None, _NOTHING
    aligned, unseen = align(targets, known)
    if not aligned.num_ratings:
        raise ConfigurationError(
            "None of the ratings to validate with is one that the model can foretell. Are "
            "they of the same data set?"
        )
    return aligned, unseen


def said_of_unknown(unknown: Unseen, rows: RowKind) -> str:
    """Say what users have rated that a model does not know, and whom that concerns."""
    columns, left = f"{unknown.num_items:,} items", "users have rated nothing else"
    count = unknown.num_users
    if rows == "items":
        columns, left = f"{unknown.num_users:,} users", "items were rated by nobody else"
        count = unknown.num_items
    return (
        f"{unknown.num_ratings:,} of the ratings to foretell from are left out: the model "
        f"does not know {columns}{f', and {count:,} {left}' if count else ''}."
    )


def _describe(run: Run, trained: Trained, ratings: RatingData, num_parameters: int) -> None:
    if ratings.validation is None:
        raise ConfigurationError(
            "There is nothing to validate with: give --validation-data-file."
        )
    config = trained.config
    run.describe(
        jax.devices()[:1],
        config.plan,
        None,
        model=f"size {config.resolved_size}, {num_parameters:,} parameters, rows of "
        f"{config.data.rows}",
        checkpoint=str(trained.checkpoint),
        ratings=f"{ratings.validation.num_ratings:,} to foretell from "
        f"{ratings.training.num_ratings:,}",
    )
    data.say_unseen(ratings, run)
