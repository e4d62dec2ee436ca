"""What a training run has left behind: its configuration, its items and its weights."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.data import RowKind
from millrace.apps.autoencoder.model import Model, init_params
from millrace.apps.autoencoder.program import model_of
from millrace.checkpoint.store import Checkpoints, restore_part
from millrace.config import ConfigurationError
from millrace.data.ratings.biases import ColumnBiases
from millrace.data.ratings.cache import file_hash
from millrace.data.ratings.matrix import Ratings, Unseen, find, from_events
from millrace.durable import replacing
from millrace.program.step import Weights
from millrace.run.directory import write_atomically
from millrace.run.saved import SavedRun, find_run

RMSE = "validation_rmse"
"""The metric that the best checkpoint is chosen by."""
ITEMS = "items.npy"
"""In the run directory: what the model's items are called, in order."""
USERS = "users.npy"
"""Where rows are items: what the users are called, who are the columns."""
BIASES = "biases.npz"
"""Where biases are subtracted: the mean, and those of the columns."""
RATINGS = "ratings.json"
"""Which files its ratings are from, as seen from any folder, and the hash of each."""
ROLES = {"training": "trained on", "validation": "validated with"}
"""What a file of ratings is to a run."""


_COLUMNS: dict[RowKind, str] = {"users": ITEMS, "items": USERS}


class Trained(NamedTuple):
    """A model that has been trained."""

    config: AutoencoderConfig
    model: Model
    item_ids: np.ndarray
    column_ids: np.ndarray
    """What the network's columns are called: the items, or where these are rows, the
    users."""
    checkpoint: Path
    column_biases: ColumnBiases | None
    """What is to be subtracted from ratings first, if anything."""
    hashes: Mapping[str, str]
    """Of the files it was trained on and validated with, as they were."""

    def weights(self) -> tuple[Any, dict[str, Any]]:
        """Read the weights, and what the checkpoint says about itself."""
        return weights_in(self.checkpoint, self.model, self.config)


def weights_in(
    checkpoint: Path, model: Model, config: AutoencoderConfig
) -> tuple[Any, dict[str, Any]]:
    """Read a model's weights, and what the checkpoint says about itself."""
    like = weight_shapes(model, config.plan.types.weights)
    restored = restore_part(checkpoint, Weights(like))
    return restored.state.params, restored.manifest


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
    saved = find_run(path, command="autoencoder train")
    folder = saved.directory
    if folder is None or not (folder / ITEMS).is_file():
        raise ConfigurationError(
            f"{path} is not the directory of an autoencoder train run, nor in one: there "
            f"is no {ITEMS}."
        )
    config = _config_of(saved, folder)
    columns = np.load(folder / _COLUMNS[config.data.rows])
    checkpoint = saved.newest()
    if not newest and path != checkpoint:
        checkpoint = best_checkpoint(checkpoint.parent) or checkpoint
    return Trained(
        config,
        model_of(config, len(columns)),
        np.load(folder / ITEMS),
        columns,
        checkpoint,
        _biases_in(folder) if config.data.subtract_biases else None,
        {name: kept["hash"] for name, kept in kept_ratings(folder).items()},
    )


def _biases_in(folder: Path) -> ColumnBiases:
    path = folder / BIASES
    if not path.is_file():
        raise ConfigurationError(
            f"There is no {path}, and the model foretells only what ratings are beyond it."
        )
    with np.load(path) as kept:
        return ColumnBiases(float(kept["mean"]), kept["of_column"], float(kept["strength"]))


def _config_of(saved: SavedRun, folder: Path) -> AutoencoderConfig:
    saved.check_command("autoencoder-train")
    # Its files may have been given relative to another working directory.
    files = {
        f"{name}_data_file": kept["file"] for name, kept in kept_ratings(folder).items()
    }
    without = ("logdir", "testing_on_checkpoint")
    return saved._replace(options=saved.options | files).build_config(
        AutoencoderConfig, without=without
    )


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that was validated best, if any was."""
    checkpoints = Checkpoints(folder, better=better)
    try:
        return checkpoints.best()
    finally:
        checkpoints.close()


def with_columns_of_model(ratings: Ratings, trained: Trained) -> tuple[Ratings, Unseen]:
    """Number columns as a model does, leaving out and counting those it does not know.

    Of the rows, those are counted that have nothing else.
    """
    assert ratings.biases is None, "they are subtracted when columns are the model's"
    if np.array_equal(ratings.item_ids, trained.column_ids):
        return ratings, Unseen(0, 0, 0)
    places = find(trained.column_ids, ratings.item_ids)[ratings.items]
    users = np.repeat(np.arange(ratings.num_users), ratings.num_ratings_by_user)
    is_known = places >= 0
    if not is_known.any():
        columns = "items" if trained.config.data.rows == "users" else "users"
        raise ConfigurationError(
            f"None of the {columns} in the ratings is one that the model was trained on. "
            "Are they of the same data set?"
        )
    known = from_events(
        users[is_known],
        places[is_known],
        ratings.values[is_known],
        user_ids=ratings.user_ids,
        item_ids=trained.column_ids,
    )
    is_empty = (known.num_ratings_by_user == 0) & (ratings.num_ratings_by_user > 0)
    return known, Unseen(
        num_users=int(is_empty.sum()),
        num_items=len(np.unique(ratings.items[~is_known])),
        num_ratings=int((~is_known).sum()),
    )


def keep_biases(folder: Path, biases: ColumnBiases | None) -> None:
    """Write what is subtracted from ratings; it stays when a run is resumed."""
    if biases is None:
        return
    if not (folder / BIASES).exists():
        with replacing(folder / BIASES, binary=True) as file:
            np.savez(file, **dataclasses.asdict(biases))


def keep_ratings(folder: Path, config: AutoencoderConfig) -> None:
    """Write which files a run has its ratings from; one that is resumed must have these."""
    files = {name: getattr(config.data, f"{name}_data_file") for name in ROLES}
    found = {
        name: {"file": str(path.absolute()), "hash": file_hash(path)}
        for name, path in files.items()
        if path is not None
    }
    before = kept_ratings(folder)
    for name, kept in before.items():
        if name in found and kept["hash"] != found[name]["hash"]:
            raise ConfigurationError(
                f"{files[name]} has changed since the run in {folder} was started. Start a "
                "new run."
            )
    if not before:
        write_atomically(folder / RATINGS, json.dumps(found, indent=2) + "\n")


def kept_ratings(folder: Path) -> dict[str, Any]:
    """Return what ``keep_ratings`` wrote; runs of older versions have nothing."""
    path = folder / RATINGS
    return json.loads(path.read_text()) if path.exists() else {}


def keep_names(folder: Path, ratings: Ratings, rows: RowKind) -> None:
    """Write what the model's items, or users, are called; they stay when it is resumed."""
    kept = {_COLUMNS[rows]: ratings.item_ids}
    if rows == "items":
        kept[ITEMS] = ratings.user_ids
    for name, ids in kept.items():
        if not (folder / name).exists():
            np.save(folder / name, np.asarray(ids))
