"""A trained recommender in the hand: ratings in, ratings out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.model import Model, reconstruct
from millrace.apps.autoencoder.recommend import (
    find_users,
    rated_before,
    recommendations,
)
from millrace.apps.autoencoder.scoring import adding
from millrace.apps.autoencoder.trained import find_trained
from millrace.data.ratings.biases import ColumnBiases
from millrace.data.ratings.matrix import find, from_events


class Recommender(NamedTuple):
    """A trained model; users are what they have rated, by the items' identifiers.

    Where rows are items, users are those of the training ratings, by their own.
    """

    config: AutoencoderConfig
    model: Model
    params: Any
    item_ids: np.ndarray
    checkpoint: Path
    column_biases: ColumnBiases | None

    def predict(self, ratings: Mapping[Any, float]) -> dict[Any, float]:
        """Return the rating that a user would give to each item."""
        if self.config.data.rows == "items":
            raise ValueError(
                "A model with rows of items foretells the ratings of the users that it was "
                "trained with: ask recommend_to(user)."
            )
        places = self._places(ratings)
        given = from_events(
            np.zeros(len(places), int),
            places,
            _finite(ratings),
            user_ids=np.zeros(1, int),
            item_ids=self.item_ids,
        )
        if self.column_biases is not None:
            given = self.column_biases.subtracted(given, given)
        row = np.zeros((1, self.model.num_items), np.float32)
        row[0, given.items] = given.values
        params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), self.params)
        foretold = reconstruct(self.model, params, jnp.asarray(row))
        output = np.asarray(adding(given.biases)(foretold, jnp.zeros(1, int)))[0]
        return dict(zip(self.item_ids.tolist(), output.tolist(), strict=True))

    def recommend(
        self, ratings: Mapping[Any, float], top: int = 10
    ) -> list[tuple[Any, float]]:
        """Return the items not rated yet that the user would rate best, best first."""
        foretold = self.predict(ratings)
        rated = set(self.item_ids[self._places(ratings)].tolist())
        others = [pair for pair in foretold.items() if pair[0] not in rated]
        return sorted(others, key=lambda pair: -pair[1])[:top]

    def recommend_to(self, user: Any, top: int = 10) -> list[tuple[Any, float]]:
        """Return the best items for a user of the training ratings, which are read."""
        trained = find_trained(self.checkpoint)
        ratings, unknown = rated_before(trained)
        users = find_users([user], ratings, unknown, trained)
        found = recommendations(trained, ratings, users, top, 1, {})
        return [(entry.item, entry.rating) for entry in found]

    def _places(self, ratings: Mapping[Any, float]) -> np.ndarray:
        """Return the number of each rated item, which the model must know."""
        ids = np.array(list(ratings))
        places = find(self.item_ids, ids) if len(ids) else np.zeros(0, int)
        if (places < 0).any():
            unknown = ids[places < 0][0]
            raise ValueError(f"The model was trained without the item {unknown}.")
        return places


def _finite(ratings: Mapping[Any, float]) -> np.ndarray:
    """Return the ratings, each of which must be a number."""
    values = np.array(list(ratings.values()), np.float32)
    for item, value in zip(ratings, values, strict=True):
        if not np.isfinite(value):
            raise ValueError(f"The rating of the item {item} is {value}, not a number.")
    return values


def load_recommender(path: Path | str) -> Recommender:
    """Read the best checkpoint of an ``autoencoder train`` run."""
    trained = find_trained(Path(path))
    params, _ = trained.weights()
    return Recommender(
        trained.config,
        trained.model,
        params,
        trained.item_ids,
        trained.checkpoint,
        trained.column_biases,
    )
