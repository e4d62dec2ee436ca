"""Validation of weights during training, and of a trained recommender."""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from millrace.apps.autoencoder import data
from millrace.apps.autoencoder.config import AutoencoderConfig, TrainingConfig
from millrace.apps.autoencoder.config.commands import ValidateConfig
from millrace.apps.autoencoder.data import (
    EvaluationRowSource,
    RatingData,
    open_evaluation_source,
)
from millrace.apps.autoencoder.item_rows import encode_items
from millrace.apps.autoencoder.metrics import (
    RankingOptions,
    build_metrics,
    build_ranking_metrics,
    compute_scores,
)
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.predictor import Recommender, load_recommender
from millrace.apps.autoencoder.residuals import save_residuals
from millrace.apps.autoencoder.run_ratings import format_unknown, load_ratings_for
from millrace.config import ConfigurationError
from millrace.data.ratings.matrix import Ratings, transpose
from millrace.loop.evaluate import AsyncValidation, evaluate
from millrace.loop.nan_guard import NonFiniteError
from millrace.nn.layers import num_parameters
from millrace.plan import Plan
from millrace.program.evaluate import EvaluationProgram, MetricFn
from millrace.program.step import Weights
from millrace.run.run import Run


class Validator:
    """Validates weights on one device; every row counts once.

    Args:
        metric_fn: The metric function, such as the one of `build_metrics`.
        plan: Gives the precision.
        source: Rows with their known ratings, and the ratings to predict.
        batch_size: Rows per batch.
        device: The device to use.
        local: Whether this process validates alone. Otherwise the processes of a run share
            the rows, and each returns the result for all of them.
    """

    def __init__(
        self,
        metric_fn: MetricFn,
        plan: Plan,
        source: EvaluationRowSource,
        batch_size: int,
        device: Any,
        *,
        local: bool = False,
    ) -> None:
        single = dataclasses.replace(plan, num_replicas=1)
        self._program = EvaluationProgram(metric_fn, single, [device])
        self._source = source
        self._batch_size = batch_size
        self._local = local

    def __call__(self, state: Any) -> dict[str, float]:
        """Return the metrics of a training state; raise if it has diverged."""
        return _check_finite(self.score(state.params), int(state.update))

    def score(self, params: Any) -> dict[str, float]:
        """Return the metrics of weights."""
        return compute_scores(self.compute_means(params))

    def compute_means(self, params: Any) -> dict[str, float]:
        """Return the mean over rows of every result of the metric function."""
        return self._evaluate(self._program.place_state(Weights(params)))

    def _evaluate(self, placed: Any) -> dict[str, float]:
        return evaluate(
            self._program,
            placed,
            self._source,
            self._batch_size,
            single_process=self._local,
        )

    def run_async(self) -> AsyncValidation:
        """Return the same validation, for use while training continues."""

        def snapshot(state: Any) -> tuple[Any, int]:
            # A copy, because the next update donates the buffers of the state.
            copied = jax.tree.map(jnp.copy, state.params)
            return self._program.place_state(Weights(copied)), int(state.update)

        def validate(kept: tuple[Any, int]) -> dict[str, float]:
            placed, update = kept
            return _check_finite(compute_scores(self._evaluate(placed)), update)

        return AsyncValidation(snapshot, validate)


def _check_finite(scores: dict[str, float], update: int) -> dict[str, float]:
    if not math.isfinite(scores["rmse"]):
        raise NonFiniteError(
            f"The validation RMSE is {scores['rmse']:g} after update {update}: training "
            "has diverged. Start again with a smaller learning rate."
        )
    return scores


def build_validator(
    config: TrainingConfig,
    model: Model,
    known: Ratings,
    targets: Ratings | None,
    device: Any,
) -> Validator | None:
    """Return the validator of a run, or None without ratings to predict."""
    if targets is None or config.training.no_validation:
        return None
    batch_size = config.resolved_validation_batch_size
    source = open_evaluation_source(known, targets, batch_size)
    clip = config.data.clip_predictions
    metric_fn = build_metrics(model, None, known.biases, clip=clip)
    return Validator(metric_fn, config.plan, source, batch_size, device)


def validate(config: ValidateConfig, run: Run) -> None:
    """Report the metrics of a checkpoint on ratings that it was not trained on."""
    started = time.perf_counter()
    recommender = load_recommender(
        config.checkpoint, config.which, announce=run.console.line
    )
    trained = recommender.config
    ratings, unknown = load_ratings_for(
        trained,
        recommender.files,
        training=config.training_data_file,
        validation=config.validation_data_file,
    )
    _describe(run, recommender, ratings)
    if unknown.num_ratings:
        run.console.warning(format_unknown(unknown, trained.data.rows))
    ranking = RankingOptions(config.top, config.relevant_rating)
    batch_size = config.validation_batch_size or trained.resolved_validation_batch_size
    known, metrics = ratings.training, run.summary["metrics"]
    for kind, targets in (("validation", ratings.validation), ("test", ratings.test)):
        if targets is None:
            continue
        scores = _compute_scores(recommender, known, targets, ranking, batch_size)
        for name, value in scores.items():
            suffix = f"_at_{config.top}" if name in ("recall", "ndcg") else ""
            metrics[f"{kind}_{name}{suffix}"] = value
        save_residuals(
            run.directory.path,
            recommender.model,
            recommender.params,
            known,
            targets,
            batch_size,
            trained.plan.types.compute,
            clip=trained.data.clip_predictions,
        )
    event = {name: recommender.manifest[name] for name in ("update", "epoch")}
    event |= {"time": round(time.perf_counter() - started, 3), **metrics}
    for writer in run.writers:
        writer.write(event)
    run.summary["status"] = "completed"


def _compute_scores(
    recommender: Recommender,
    known: Ratings,
    targets: Ratings,
    ranking: RankingOptions,
    batch_size: int,
) -> dict[str, float]:
    """Return all metrics; items are ranked for users, whatever the rows of the model."""
    model, params = recommender.model, recommender.params
    plan, device = recommender.config.plan, jax.devices()[0]
    rows_are_users = recommender.config.data.rows == "users"
    source = open_evaluation_source(known, targets, batch_size)
    clip = recommender.config.data.clip_predictions
    metric_fn = build_metrics(
        model, ranking if rows_are_users else None, known.biases, clip=clip
    )
    scores = Validator(metric_fn, plan, source, batch_size, device).score(params)
    if rows_are_users:
        return scores
    encoded = encode_items(model, params, known, batch_size, plan.types.compute)
    by_user = transpose(known)
    source = open_evaluation_source(by_user, transpose(targets), batch_size)
    metric_fn = build_ranking_metrics(model, ranking, by_user.biases)
    return scores | Validator(metric_fn, plan, source, batch_size, device).score(encoded)


def test_checkpoint(config: AutoencoderConfig, run: Run) -> None:
    """Validate the newest checkpoint of another run, as the reference's option does."""
    assert config.testing_on_checkpoint is not None
    validate(
        ValidateConfig(
            checkpoint=config.testing_on_checkpoint,
            which="last",
            training_data_file=config.data.training_data_file,
            validation_data_file=config.data.validation_data_file,
            validation_batch_size=config.training.validation_batch_size,
            run=config.run,
        ),
        run,
    )
    metrics = run.summary["metrics"]
    run.console.line(
        f"Testing RMSE: {metrics['validation_rmse']:.4f} over all ratings, "
        f"{metrics['validation_mean_batch_rmse']:.4f} as the mean over batches, which is "
        "what the reference prints"
    )


def _describe(run: Run, recommender: Recommender, ratings: RatingData) -> None:
    if ratings.validation is None:
        raise ConfigurationError(
            "There are no ratings to predict. Give --validation-data-file."
        )
    config = recommender.config
    run.describe(
        jax.devices()[:1],
        config.plan,
        None,
        model=f"size {config.resolved_size}, {num_parameters(recommender.params):,} "
        f"parameters, rows of {config.data.rows}",
        checkpoint=str(recommender.checkpoint),
        ratings=f"{ratings.validation.num_ratings:,} to predict from "
        f"{ratings.training.num_ratings:,}",
    )
    data.warn_unseen(ratings, run)
