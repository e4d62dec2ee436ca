"""What a training run has left behind: its configuration, its items and its weights."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.model import Model, init_params
from millrace.apps.autoencoder.recipe import model_of
from millrace.config import ConfigurationError, build, load_yaml
from millrace.data.ratings.matrix import Ratings, find, from_events
from millrace.host.checkpoint import Checkpoints, checkpoints_in, restore_part

RMSE = "validation_rmse"
"""The metric that the best checkpoint is chosen by."""
ITEMS = "items.npy"
"""In the run directory: what the model's items are called, in order."""


class Trained(NamedTuple):
    """A model that has been trained."""

    config: AutoencoderConfig
    model: Model
    item_ids: np.ndarray
    checkpoint: Path

    def weights(self) -> tuple[Any, dict[str, Any]]:
        """Read the weights, and what the checkpoint says about itself."""
        like = weight_shapes(self.model, self.config.plan.types.weights)
        restored = restore_part(self.checkpoint, _Params(like))
        return restored.state.params, restored.manifest


class _Params(NamedTuple):
    """The field of a training state that holds the weights."""

    params: Any


def weight_shapes(model: Model, dtype: str) -> Any:
    """Return the shapes and types of a model's weights."""
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), shapes)


def better(scores: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether a checkpoint foretells better than another."""
    return scores.get(RMSE, math.inf) < other.get(RMSE, math.inf)


def find_trained(path: Path, *, newest: bool = False) -> Trained:
    """Find the best checkpoint of a run, or the newest, or the one that is named.

    Args:
        path: A run directory, its checkpoints' folder, or one of them.
        newest: Take the newest even if another has been validated as better.
    """
    folder = next((p for p in (path, *path.parents[:2]) if (p / ITEMS).is_file()), None)
    if folder is None:
        raise ConfigurationError(
            f"{path} is not the directory of an autoencoder train run, nor in one: there "
            f"is no {ITEMS}."
        )
    config = _config_of(folder)
    item_ids = np.load(folder / ITEMS)
    is_one = path.name.startswith("update-") and path.is_dir()
    checkpoint = path if is_one else _choose(folder / "checkpoints", newest)
    return Trained(config, model_of(config, len(item_ids)), item_ids, checkpoint)


def _config_of(folder: Path) -> AutoencoderConfig:
    values = load_yaml(folder / "config.yml")
    command = values.pop("command", None)
    if command != "autoencoder-train":
        raise ConfigurationError(f"{folder} holds a run of {command}, not of training.")
    # Where it was run, and whether it was resumed, are of no concern here.
    for name in ("run_dir", "resume", "logdir", "testing_on_checkpoint"):
        values.pop(name, None)
    return build(AutoencoderConfig, values)


def _choose(folder: Path, newest: bool) -> Path:
    best = None if newest else best_checkpoint(folder)
    found = checkpoints_in(folder)
    if best is None and not found:
        raise ConfigurationError(f"There are no checkpoints in {folder}.")
    return best or found[-1]


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that was validated best, if any was."""
    checkpoints = Checkpoints(folder, better=better)
    try:
        return checkpoints.best()
    finally:
        checkpoints.close()


def with_items_of_model(ratings: Ratings, item_ids: np.ndarray) -> Ratings:
    """Number items as a model does, leaving out those that it does not know."""
    if np.array_equal(ratings.item_ids, item_ids):
        return ratings
    places = find(item_ids, ratings.item_ids)[ratings.items]
    users = np.repeat(np.arange(ratings.num_users), ratings.num_ratings_by_user)
    is_known = places >= 0
    if not is_known.any():
        raise ConfigurationError(
            "None of the items in the ratings is one that the model was trained on. Are "
            "they of the same data set?"
        )
    return from_events(
        users[is_known],
        places[is_known],
        ratings.values[is_known],
        user_ids=ratings.user_ids,
        item_ids=item_ids,
    )


def keep_items(folder: Path, item_ids: np.ndarray) -> None:
    """Write what the items are called, or compare it with what a resumed run wrote."""
    path = folder / ITEMS
    if not path.exists():
        np.save(path, np.asarray(item_ids))
    elif not np.array_equal(np.load(path), item_ids):
        raise ConfigurationError(
            f"The training ratings have changed since the run in {folder} was started: "
            "their items are others. Start a new run."
        )
