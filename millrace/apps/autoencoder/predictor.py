"""A trained recommender: find its run, load it, and predict ratings."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.bulk import (
    Columns,
    TopItems,
    join_top_items,
    name_top_items,
    stream_top_items,
    write_top_items,
)
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.commands import check_suffix
from millrace.apps.autoencoder.item_rows import (
    EncodedItems,
    encode_items,
    fold_in,
    predict_for_users,
)
from millrace.apps.autoencoder.metrics import build_add_biases, select_top_items
from millrace.apps.autoencoder.model import Model, init_params, predict_rows
from millrace.apps.autoencoder.program import build_model
from millrace.apps.autoencoder.ranking import (
    NDCG,
    load_linear_items,
    read_network_weight,
    score_items,
)
from millrace.apps.autoencoder.run_ratings import (
    ITEMS,
    RunFiles,
    find_users,
    load_known_ratings,
    load_rating_files,
    load_ratings_for,
    load_run_files,
    without_targets,
)
from millrace.card import Card, with_card
from millrace.checkpoint.best import BestMetric
from millrace.checkpoint.store import restore_part
from millrace.config import ConfigurationError
from millrace.data.ratings.matrix import (
    ColumnBiases,
    Ratings,
    find_ids,
    from_events,
    transpose,
)
from millrace.data.ratings.source import active_users
from millrace.program.mixed_precision import narrow
from millrace.program.step import Weights
from millrace.run.options import Which
from millrace.run.saved import announce, find_run
from millrace.storage.address import display

RMSE = "validation_rmse"
BEST_BY = BestMetric(RMSE, "min")
"""The metric that selects the best checkpoint of a model that predicts ratings."""
BEST_RANKING = BestMetric(NDCG, "max")
"""The metric that selects the best checkpoint of a model that ranks items."""


def get_best_metric(config: AutoencoderConfig) -> BestMetric:
    """Return the metric that selects the best checkpoint of a run."""
    return BEST_RANKING if config.training.objective == "ranking" else BEST_BY


@with_card
class Recommender(NamedTuple):
    """A trained model that predicts ratings, or scores to rank by, and recommends items.

    A user is given by ratings, a mapping from item IDs to values. A model that ranks items
    also takes the liked items as a list or a set. If the rows of the model
    are items, other users than those of the training ratings are folded in.
    """

    config: AutoencoderConfig
    model: Model
    params: Any
    files: RunFiles
    """What the run has kept about its ratings."""
    checkpoint: Path
    manifest: dict[str, Any]
    """The update, epoch and metrics of the checkpoint."""
    kept: dict[str, Any]
    """Results of reading the training ratings, which later calls use again."""
    linear: np.ndarray | None = None
    """The matrix (items, items) of the linear item model, part of a model that ranks."""

    @property
    def ranks(self) -> bool:
        """Whether the model was trained to rank items: it has scores, not ratings."""
        return self.model.positive_from is not None

    @property
    def network_weight(self) -> float:
        """How much the network counts next to the linear item model."""
        return read_network_weight(self.manifest)

    def card(self) -> Card:
        """Return what a terminal or a notebook shows."""
        metric = get_best_metric(self.config).name
        error = self.manifest.get("metrics", {}).get(metric)
        rows = {
            "rows": self.config.data.rows,
            "items": f"{len(self.item_ids):,}",
            "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(self.params)):,}",
            "epoch": f"{self.manifest.get('epoch', 0):.4g}",
            **({metric: f"{error:.4f}"} if isinstance(error, float) else {}),
            "checkpoint": self.checkpoint,
        }
        return Card("Recommender", rows)

    @property
    def item_ids(self) -> np.ndarray:
        """IDs of the items, as in the training ratings."""
        return self.files.item_ids

    @property
    def column_biases(self) -> ColumnBiases | None:
        """The biases that are subtracted from ratings, if any."""
        return self.files.column_biases

    @property
    def folds_in(self) -> bool:
        """Whether the model has rows of items, and can take in users it does not know."""
        by_item = self.config.data.rows == "items"
        return by_item and self.model.linear_output and self.column_biases is not None

    def predict(self, ratings: Mapping[Any, float] | Iterable[Any]) -> dict[Any, float]:
        """Return the predicted rating of every item for a user with these ratings.

        If the model ranks items, these are scores: higher is better, and only their order
        has a meaning.
        """
        scores = self._predict_scores(ratings)
        return {item: self.limit(score) for item, score in scores.items()}

    @property
    def limits(self) -> tuple[float, float] | None:
        """The smallest and the largest rating of the training ratings; None for scores."""
        if self.ranks:
            return None
        biases = self.column_biases
        low, high = self.config.data.rating_range
        if biases is not None:
            low, high = max(low, biases.smallest), min(high, biases.largest)
        return low, high

    def limit(self, rating: Any) -> float:
        """Return a predicted rating within the scale; a score stays as it is."""
        low, high = self.limits or (-math.inf, math.inf)
        return min(max(float(rating), low), high)

    def list_columns(self, titles: Mapping[str, str] | None = None) -> Columns:
        """Return what files of recommendations say about each item."""
        name = "score" if self.ranks else "rating"
        return Columns(titles, self.item_ids, self.files.popularity, name)

    def _as_ratings(self, ratings: Mapping[Any, float] | Iterable[Any]) -> Mapping:
        """Return ratings; those of a list of liked items are `positive_from`."""
        if isinstance(ratings, Mapping):
            return ratings
        if not self.ranks or isinstance(ratings, str):
            raise ValueError(
                "This model predicts ratings: give a mapping from items to ratings."
                if not self.ranks
                else f"Give the liked items as a list or a set, got {ratings!r}."
            )
        return dict.fromkeys(ratings, self.config.data.positive_from)

    def _predict_scores(
        self, ratings: Mapping[Any, float] | Iterable[Any]
    ) -> dict[Any, float]:
        """Return ``predict`` before it is limited, which makes no ties at the ends."""
        ratings = self._as_ratings(ratings)
        if self.config.data.rows == "items":
            return self._fold_in(ratings)
        known = from_events(
            np.zeros(len(ratings), int),
            self._find_items(ratings),
            _check_finite(ratings),
            user_ids=np.zeros(1, int),
            item_ids=self.item_ids,
        )
        if self.column_biases is not None:
            known = self.column_biases.subtract(known, known)
        row = np.zeros((1, self.model.num_items), np.float32)
        row[0, known.items] = known.values
        params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), self.params)
        if self.ranks:
            output = self.score_rows(params, jnp.asarray(row))
        else:
            output = predict_rows(self.model, params, jnp.asarray(row))
        output = build_add_biases(known.biases)(output, jnp.zeros(1, int))
        values = np.asarray(output)[0].tolist()
        return dict(zip(self.item_ids.tolist(), values, strict=True))

    def score_rows(
        self,
        params: Any,
        rows: jax.Array,  # (users, items), 0 where there is no rating
        linear: Any = None,
    ) -> jax.Array:  # (users, items)
        """Return the scores of a model that ranks items; a pure function."""
        if linear is None and self.linear is not None:
            linear = jnp.asarray(self.linear)
        return score_items(self.model, params, linear, rows, self.network_weight)

    def _fold_in(self, ratings: Mapping[Any, float]) -> dict[Any, float]:
        """Return the scores of a user who is no column of a model with rows of items."""
        if not self.folds_in or self.column_biases is None:
            raise ValueError(
                "A model with rows of items and without biases predicts only for users of "
                "its training ratings: call recommend_to(user)."
            )
        encoded, item_biases, penalty = self.encode_items()
        items, values = self._find_items(ratings), _check_finite(ratings)
        base = self.column_biases.mean + item_biases
        residuals, unit = values - base[items], self.column_biases.unit
        of_user = residuals.sum() / max(len(residuals) + self.column_biases.strength, 1)
        left = fold_in(encoded, items, (residuals - of_user) / unit, penalty)
        output = left * unit + base + of_user
        return dict(zip(self.item_ids.tolist(), output.tolist(), strict=True))

    def encode_items(self) -> tuple[EncodedItems, np.ndarray, float]:
        """Return the items with their biases, and the penalty of a user's weights.

        The weight decay of training is a penalty of the mean squared error; this is the one
        of the sum.
        """
        if "items" not in self.kept:
            config = without_targets(self.config)
            training = load_ratings_for(config, self.files).ratings.training
            assert training.biases is not None
            encoded = encode_items(
                self.model,
                self.params,
                training,
                config.resolved_validation_batch_size,
                config.plan.types.compute,
            )
            penalty = training.num_ratings * config.training.weight_decay / 2
            self.kept["items"] = (encoded, training.biases.of_user, penalty)
        return self.kept["items"]

    def recommend(
        self, ratings: Mapping[Any, float] | Iterable[Any], top: int = 10
    ) -> list[tuple[Any, float]]:
        """Return the unrated items with the highest ratings or scores, best first."""
        ratings = self._as_ratings(ratings)
        predicted = self._predict_scores(ratings)
        rated = set(self.item_ids[self._find_items(ratings)].tolist())
        unrated = [pair for pair in predicted.items() if pair[0] not in rated]
        best = sorted(unrated, key=lambda pair: -pair[1])[:top]
        return [(item, self.limit(rating)) for item, rating in best]

    def recommend_to(self, user: Any, top: int = 10) -> list[tuple[Any, float]]:
        """Return the best unrated items for a user of the training ratings.

        This reads the training ratings.
        """
        ratings, unknown = load_known_ratings(self.config, self.files)
        by, folds_in = self.config.data.rows, self.folds_in
        users = find_users([user], ratings, unknown, by, folds_in=folds_in)
        predict, weights = build_predict(self, ratings)
        items, values = ratings.get_user(users[0])
        row = np.zeros((1, ratings.num_items), np.float32)
        row[0, items] = values
        rows = narrow(jnp.asarray(row), self.config.plan.types.compute)
        output = predict(weights, rows, jnp.asarray(users))
        best, places = jax.device_get(select_top_items(output, rows, top))
        items = ratings.item_ids[places[0]].tolist()
        pairs = zip(items, best[0].tolist(), strict=True)
        return [(item, self.limit(rating)) for item, rating in pairs if np.isfinite(rating)]

    @overload
    def recommend_all(
        self, top: int = 10, *, output: None = None, batch_size: int = 256
    ) -> TopItems: ...
    @overload
    def recommend_all(
        self, top: int = 10, *, output: Path | str, batch_size: int = 256
    ) -> None: ...
    def recommend_all(
        self, top: int = 10, *, output: Path | str | None = None, batch_size: int = 256
    ) -> TopItems | None:
        """Return the best unrated items for all users of the training ratings.

        This reads the training ratings.

        Args:
            top: Items per user.
            output: A file to write instead of returning arrays: .csv, .tsv, .jsonl or
                .parquet.
            batch_size: Users per batch.
        """
        ratings, _ = load_known_ratings(self.config, self.files)
        predict, weights = build_predict(self, ratings)
        batches = stream_top_items(
            predict, weights, ratings, active_users(ratings), top, batch_size
        )
        named = name_top_items(batches, ratings, self.limits)
        if output is None:
            return join_top_items(named)
        path = Path(output)
        check_suffix(path)
        write_top_items(path, named, self.list_columns())
        return None

    def _find_items(self, ratings: Mapping[Any, float]) -> np.ndarray:
        """Return the places of rated items; the model must know all of them."""
        ids = np.array(list(ratings))
        places = find_ids(self.item_ids, ids) if len(ids) else np.zeros(0, int)
        if (places < 0).any():
            unknown = ids[places < 0][0]
            raise ValueError(f"The model was trained without the item {unknown}.")
        return places


def _check_finite(ratings: Mapping[Any, float]) -> np.ndarray:
    values = np.array(list(ratings.values()), np.float32)
    for item, value in zip(ratings, values, strict=True):
        if not np.isfinite(value):
            raise ValueError(f"The rating of the item {item} is {value}, not a number.")
    return values


def load_recommender(
    path: Path | str, which: Which = "best", *, announce: Callable[[str], Any] = announce
) -> Recommender:
    """Load a checkpoint of an ``autoencoder train`` run.

    Args:
        path: A run directory, its folder of checkpoints, or one checkpoint to load.
        which: The best checkpoint, the last, or that after this number of updates.
        announce: Called with a line about the checkpoint.
    """
    saved = find_run(path, command="autoencoder train")
    folder = saved.directory
    if folder is None or not (folder / ITEMS).is_file():
        raise ConfigurationError(
            f"{display(saved.path)} is not a run of `millrace autoencoder train`: it has "
            f"no {ITEMS}."
        )
    saved.check_command("autoencoder-train")
    # The run may have been given paths relative to another working directory.
    recorded = {
        f"{role}_data_file": entry["file"]
        for role, entry in load_rating_files(folder).items()
    }
    config = saved._replace(options=saved.options | recorded).build_config(
        AutoencoderConfig, without=("logdir", "testing_on_checkpoint")
    )
    files = load_run_files(folder, config)
    chosen = saved.choose(which, best_by=get_best_metric(config))
    announce(chosen.describe())
    model = build_model(config, len(files.column_ids))
    params, manifest = load_weights(chosen.path, model, config)
    linear = load_linear_items(folder) if model.positive_from is not None else None
    return Recommender(config, model, params, files, chosen.path, manifest, {}, linear)


def load_weights(
    checkpoint: Path, model: Model, config: AutoencoderConfig
) -> tuple[Any, dict[str, Any]]:
    """Return the weights in a checkpoint, and its manifest."""
    like = get_weight_shapes(model, config.plan.types.weights)
    restored = restore_part(checkpoint, Weights(like))
    return restored.state.params, restored.manifest


def get_weight_shapes(model: Model, dtype: str) -> Any:
    """Return the shapes and dtypes of the weights of a model."""
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), shapes)


Predict = Callable[[Any, jax.Array, jax.Array], jax.Array]
"""``(weights, rows, users) -> ratings``; rows and ratings are (users, items)."""


def build_predict(
    recommender: Recommender, ratings: Ratings, encoded: EncodedItems | None = None
) -> tuple[Predict, Any]:
    """Return a function that predicts ratings, or scores, by user, and its weights.

    `encoded` has the columns of the users, if they are not those of the model.
    """
    model, config = recommender.model, recommender.config
    if recommender.ranks:
        return _build_ranking_predict(recommender)
    add_biases = build_add_biases(ratings.biases)
    compute_dtype = config.plan.types.compute
    if config.data.rows == "users":
        weights: Any = narrow(recommender.params, compute_dtype)
    elif encoded is not None:
        weights = encoded
    else:
        batch_size = config.resolved_validation_batch_size
        by_item = transpose(ratings)
        weights = encode_items(
            model, recommender.params, by_item, batch_size, compute_dtype
        )

    def predict(weights: Any, rows: jax.Array, users: jax.Array) -> jax.Array:
        if config.data.rows == "users":
            output = predict_rows(model, weights, rows)
        else:
            output = predict_for_users(model, weights, users)
        return add_biases(output.astype(jnp.float32), users)

    return predict, weights


def _build_ranking_predict(recommender: Recommender) -> tuple[Predict, Any]:
    params = narrow(recommender.params, recommender.config.plan.types.compute)

    def predict(weights: Any, rows: jax.Array, users: jax.Array) -> jax.Array:
        del users
        params, linear = weights
        return recommender.score_rows(params, rows, linear)

    return predict, (params, recommender.linear)
