"""The trained model next to the simple models of the same run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.apps.autoencoder.baselines import (
    explain_missing_linear,
    find_better,
    fit_linear_items,
    score_baselines,
    score_ranking_baselines,
)
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.data import RatingData
from millrace.apps.autoencoder.metrics import RankingOptions
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.ranking import (
    CHOSEN_AT,
    LINEAR_ITEMS_FILE,
    NDCG,
    Scorer,
    load_linear_items,
    measure_ranking,
    score_items,
)
from millrace.checkpoint.best import BestMetric
from millrace.data.ratings.matrix import Ratings
from millrace.data.source import DatasetError
from millrace.durable import replacing
from millrace.numbers import format_number
from millrace.program.mixed_precision import narrow
from millrace.report.metrics import readable_name
from millrace.report.sections import Table, save_section
from millrace.run.run import Run

_TITLES = {
    "rmse": "RMSE",
    f"ndcg_at_{CHOSEN_AT}": f"NDCG@{CHOSEN_AT}",
    f"recall_at_{CHOSEN_AT}": f"Recall@{CHOSEN_AT}",
}
"""The metrics by which a model wins or loses, and what they are called."""


class TrainedRanking(NamedTuple):
    """A trained model that ranks items."""

    model: Model
    params: Any
    linear: jax.Array | None  # (items, items)
    network_weight: float


def check_positives(config: AutoencoderConfig, ratings: RatingData) -> None:
    """Raise an error if a model that ranks items has none to learn from or to find."""
    if config.training.objective == "rating":
        return
    least, training = config.data.positive_from, ratings.training
    if not (np.asarray(training.values) >= least).any():
        raise DatasetError(
            f"No training rating is {least:g} or more, so no item is liked: the largest is "
            f"{training.largest:g}. Lower --positive-from."
        )
    targets = {"validation": ratings.validation, "test": ratings.test}
    for role, part in targets.items():
        if part is not None and not _has_new_positives(training, part, least):
            raise DatasetError(
                f"No {role} rating is {least:g} or more for an item that its user has not "
                "rated in training, so there is nothing to find. Lower --positive-from, or "
                f"give other --{role}-data-file."
            )


def _has_new_positives(training: Ratings, targets: Ratings, least: float) -> bool:
    is_liked = np.asarray(targets.values) >= least
    pairs = zip(targets.users[is_liked], targets.items[is_liked], strict=True)
    return any(item not in training.get_user(user)[0] for user, item in pairs)


def prepare_linear_items(
    config: AutoencoderConfig, run: Run, ratings: RatingData, device: Any
) -> jax.Array | None:  # (items, items)
    """Fit and save the linear item model of a ranking; a resumed run has it already."""
    if config.training.objective == "rating" or config.recipe != "modern":
        return None
    folder = run.directory.path
    if (saved := load_linear_items(folder)) is not None:
        return jax.device_put(saved, device)
    linear = fit_linear_items(
        ratings.training, ratings.validation, config.data.positive_from, device
    )
    if linear is not None:
        with replacing(folder / LINEAR_ITEMS_FILE, binary=True) as file:
            np.save(file, jax.device_get(linear))
    return linear


def score_simple_models(
    config: AutoencoderConfig,
    run: Run,
    ratings: RatingData,
    linear: jax.Array | None,  # (items, items)
    device: Any,
) -> None:
    """Compute and print how good the simplest models are."""
    if config.data.kind == "random":
        return
    if config.recipe == "modern":
        _say_what_is_missing(config, run, ratings, device)
    if ratings.validation is None:
        return
    if config.training.objective == "ranking":
        scores = score_ranking_baselines(ratings, linear, _build_options(config), device)
        run.summary["baselines"] = scores
        _print_to_beat(run, f"NDCG@{CHOSEN_AT}", scores[NDCG])
        return
    scores = score_baselines(
        ratings,
        config.data.rows,
        strength=config.data.bias_strength,
        with_linear=config.recipe == "modern",
        device=device,
    )
    run.summary["baselines"] = {f"{role}_rmse": of for role, of in scores.items()}
    _print_to_beat(run, "RMSE", scores["validation"])


def _say_what_is_missing(
    config: AutoencoderConfig, run: Run, ratings: RatingData, device: Any
) -> None:
    """Say so if there is no linear item model to compare with, or to rank with."""
    training = ratings.training
    by_item = config.data.rows == "items"
    num_items = training.num_users if by_item else training.num_items
    if (reason := explain_missing_linear(num_items, device)) is None:
        return
    if config.training.objective == "ranking":
        reason += "; the network ranks alone"
    run.summary["linear_items"] = reason
    run.closing_notes["linear items"] = reason
    run.console.line(f"Linear items are {reason}.")


def _print_to_beat(run: Run, title: str, scores: dict[str, float]) -> None:
    shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
    run.console.line(f"Validation {title} to beat: {shown}")


def _build_options(config: AutoencoderConfig) -> RankingOptions:
    top = tuple(sorted({*config.top, CHOSEN_AT}))
    return RankingOptions(top, config.data.positive_from)


def report_ranking(
    config: AutoencoderConfig,
    run: Run,
    trained: TrainedRanking,
    ratings: RatingData,
    device: Any,
) -> None:
    """Measure the rankings of the best model on the validation and test ratings."""
    dtype = config.plan.types.compute

    def score(weights: Any, rows: jax.Array, users: jax.Array) -> jax.Array:
        del users
        params, linear = weights
        return score_items(trained.model, params, linear, rows, trained.network_weight)

    scorer = Scorer(score, (narrow(trained.params, dtype), trained.linear))
    targets = {"validation": ratings.validation, "test": ratings.test}
    for role, part in targets.items():
        if part is None:
            continue
        found = measure_ranking(
            scorer,
            ratings.training,
            part,
            _build_options(config),
            config.resolved_validation_batch_size,
            device,
        )
        named = {f"{role}_{name}": value for name, value in found.items()}
        run.summary["ranking"] = run.summary.get("ranking", {}) | named
        if role == "test":
            run.summary["metrics"] |= named
    if trained.linear is not None:
        weight = f"{trained.network_weight:g} of the network's logits"
        run.closing_notes["score of an item"] = f"linear items + {weight}"


def compare_with_simple_models(
    run: Run, metric: BestMetric, scores: Mapping[str, float]
) -> None:
    """Compare the best saved model with the simple ones; say if it loses to one of them.

    Args:
        run: Has the errors on the test ratings.
        metric: The error on the validation ratings.
        scores: The validation metrics of the model.
    """
    reached = run.summary.get("ranking")
    if reached is None:
        reached = {metric.name: scores[metric.name]}
        if "test_rmse" in run.summary["metrics"]:
            reached["test_rmse"] = run.summary["metrics"]["test_rmse"]
    measured = {n: of for n, of in run.summary["baselines"].items() if n in reached}
    models = list(dict.fromkeys(model for of in measured.values() for model in of))
    rows, better = [], {}
    for name, simple in measured.items():
        values = [*(simple.get(model) for model in models), reached[name]]
        cells = ["" if value is None else format_number(value) for value in values]
        rows.append([readable_name(name), *cells])
        role, _, what = name.partition("_")
        if what in _TITLES:
            shown = ", ".join(f"{model} {value:.4f}" for model, value in simple.items())
            run.closing_notes[f"{role} {_TITLES[what]} of simple models"] = shown
            better[name] = find_better(reached[name], simple, metric.mode)
    is_rating = metric.mode == "min"
    save_section(
        run.directory.path,
        "baselines",
        Table(
            title="Simple models on the same ratings",
            note="A network that is not better than these is not worth its time.",
            columns=["", *models, "this model"],
            rows=rows,
        ),
    )
    # The test counts, if there is one.
    decisive = [name for name in better if name.startswith("test_")] or list(better)
    lost = list(dict.fromkeys(model for name in decisive for model in better[name]))
    run.summary["loses_to"] = lost
    if lost:
        verb = "predict" if is_rating else "rank"
        may_search = is_rating and "chosen_trial" not in run.summary
        more = "More ratings, or --search," if may_search else "More ratings"
        run.console.warning(
            f"The model does not {verb} better than {' and '.join(lost)}. {more} may help; "
            "until then, the simple model is the better one."
        )
