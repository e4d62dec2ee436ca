"""Validation of weights during training, and of a trained recommender."""

import dataclasses
import math
import time
from collections.abc import Callable
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
from millrace.apps.autoencoder.item_rows import EncodedItems, predict_for_users
from millrace.apps.autoencoder.metrics import (
    RankingOptions,
    build_error_metrics,
    build_metrics,
    compute_scores,
)
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.new_users import load_new_users
from millrace.apps.autoencoder.predictor import (
    Recommender,
    build_predict,
    load_recommender,
)
from millrace.apps.autoencoder.ranking import (
    CHOSEN_AT,
    Scorer,
    build_selection_metrics,
    choose_network_weight,
    measure_ranking,
)
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
from millrace.run.options import ShortRunOptions
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
        model_state: What the metric function gets besides the weights.
        compute_scores: Turns means over rows into metrics.
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
        model_state: Any = None,
        compute_scores: Callable[[dict[str, float]], dict[str, float]] = compute_scores,
    ) -> None:
        single = dataclasses.replace(plan, num_replicas=1)
        self._program = EvaluationProgram(metric_fn, single, [device])
        self._source = source
        self._batch_size = batch_size
        self._local = local
        self._model_state = self._program.place_state(model_state)
        self._compute_scores = compute_scores

    def __call__(self, state: Any) -> dict[str, float]:
        """Return the metrics of a training state; raise if it has diverged."""
        return _check_finite(self.score(state.params), int(state.update))

    def score(self, params: Any) -> dict[str, float]:
        """Return the metrics of weights."""
        return self._compute_scores(self.compute_means(params))

    def compute_means(self, params: Any) -> dict[str, float]:
        """Return the mean over rows of every result of the metric function."""
        placed = self._program.place_state(params)
        return self._evaluate(Weights(placed, self._model_state))

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
            placed = self._program.place_state(copied)
            return Weights(placed, self._model_state), int(state.update)

        def validate(kept: tuple[Any, int]) -> dict[str, float]:
            placed, update = kept
            return _check_finite(self._compute_scores(self._evaluate(placed)), update)

        return AsyncValidation(snapshot, validate)


def _check_finite(scores: dict[str, float], update: int) -> dict[str, float]:
    name, title = "rmse", "RMSE"
    if name not in scores:
        name, title = f"ndcg_at_{CHOSEN_AT}", f"NDCG@{CHOSEN_AT}"
    if not math.isfinite(scores[name]):
        raise NonFiniteError(
            f"The validation {title} is {scores[name]:g} after update {update}: training "
            "has diverged. Start again with a smaller learning rate."
        )
    return scores


def build_validator(
    config: TrainingConfig,
    model: Model,
    known: Ratings,
    targets: Ratings | None,
    device: Any,
    linear: Any = None,
) -> Validator | None:
    """Return the validator of a run, or None without ratings to predict.

    `linear` is the matrix of the linear item model, for the objective ranking.
    """
    if targets is None:
        return None
    batch_size = config.resolved_validation_batch_size
    source = open_evaluation_source(known, targets, batch_size)
    if model.positive_from is not None:
        ranking = RankingOptions((CHOSEN_AT,), model.positive_from)
        return Validator(
            build_selection_metrics(model, ranking),
            config.plan,
            source,
            batch_size,
            device,
            model_state=linear,
            compute_scores=choose_network_weight,
        )
    clip = config.data.clip_predictions
    metric_fn = build_metrics(model, known.biases, clip=clip)
    return Validator(metric_fn, config.plan, source, batch_size, device)


def validate(config: ValidateConfig, run: Run) -> None:
    """Report the metrics of a checkpoint on ratings that it was not trained on."""
    started = time.perf_counter()
    recommender = load_recommender(
        config.checkpoint, config.which, announce=run.console.line
    )
    trained = recommender.config
    files = (config.training_data_file, config.validation_data_file)
    folded = load_new_users(recommender, *files)
    if folded is None:
        ratings, unknown = load_ratings_for(
            trained, recommender.files, training=files[0], validation=files[1]
        )
    else:
        ratings, unknown = folded.ratings, folded.unknown
    _describe(run, recommender, ratings)
    if folded is not None:
        run.console.line(
            f"The model was not trained on some users of {files[0]}: all of them are "
            "folded in from their ratings in it."
        )
    if unknown.num_ratings:
        rows = trained.data.rows if folded is None else "users"
        run.console.warning(format_unknown(unknown, rows))
    relevant = config.relevant_rating
    if relevant is None:
        relevant = trained.data.positive_from
    ranking = RankingOptions(tuple(config.top), relevant)
    batch_size = config.validation_batch_size or trained.resolved_validation_batch_size
    known, metrics = ratings.training, run.summary["metrics"]
    for kind, targets in (("validation", ratings.validation), ("test", ratings.test)):
        if targets is None:
            continue
        run.console.status("validating" if kind == "validation" else "testing")
        scores = _compute_scores(
            recommender, known, targets, ranking, batch_size, folded and folded.encoded
        )
        if math.isnan(scores[f"ndcg_at_{ranking.longest}"]):
            run.console.warning(
                f"No {kind} rating is {relevant:g} or more for an item that its user has "
                "not rated before, so there are no metrics of rankings. Give a smaller "
                "--relevant-rating."
            )
            scores = {name: x for name, x in scores.items() if "_at_" not in name}
        for name, value in scores.items():
            metrics[f"{kind}_{name}"] = value
        if recommender.ranks or folded is not None:
            continue
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
    encoded: EncodedItems | None = None,
) -> dict[str, float]:
    """Return all metrics; items are ranked for users, whatever the rows of the model.

    `encoded` has columns for users who are folded in; the ratings are then by user.
    """
    device, scores = jax.local_devices()[0], {}
    if not recommender.ranks:
        source = open_evaluation_source(known, targets, batch_size)
        metric_fn, weights = _build_error_metrics(recommender, known, encoded)
        plan = recommender.config.plan
        validator = Validator(metric_fn, plan, source, batch_size, device)
        scores = validator.score(weights)
    if recommender.config.data.rows == "items" and encoded is None:
        known, targets = transpose(known), transpose(targets)
    scorer = Scorer(*build_predict(recommender, known, encoded))
    return scores | measure_ranking(scorer, known, targets, ranking, batch_size, device)


def _build_error_metrics(
    recommender: Recommender, known: Ratings, encoded: EncodedItems | None
) -> tuple[MetricFn, Any]:
    """Return the metric function of rating errors, and its weights."""
    model, clip = recommender.model, recommender.config.data.clip_predictions
    if encoded is None:
        return build_metrics(model, known.biases, clip=clip), recommender.params

    def predict(weights: Any, rows: jax.Array, users: jax.Array) -> jax.Array:
        del rows
        return predict_for_users(model, weights, users)

    metric_fn = build_error_metrics(predict, known.num_items, known.biases, clip=clip)
    return metric_fn, encoded


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
            run=ShortRunOptions(resume=config.run.resume),
        ),
        run,
    )
    metrics = run.summary["metrics"]
    if "validation_rmse" not in metrics:  # a model that ranks items has no ratings
        return
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
    if ratings.unseen is not None and ratings.unseen.num_users:
        run.console.line(
            "Ratings of users are predicted from others of theirs: give these users known "
            "ratings in --training-data-file to count them as well."
        )
