"""What a training run keeps about its ratings, and ratings that fit its model.

Weights alone do not tell which column is which item, which biases were subtracted, or
where the ratings came from. A run therefore writes a few files next to its checkpoints.
Later, ratings for the model come from the same files or from others, and get its columns.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.apps.autoencoder import data
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.data import RowKind
from millrace.apps.autoencoder.data import RatingData
from millrace.config import ConfigurationError, replace_options
from millrace.data.ratings.matrix import (
    ColumnBiases,
    Ratings,
    Unseen,
    align,
    find_ids,
    from_events,
    transpose,
)
from millrace.data.ratings.reading import hash_file, load_like
from millrace.durable import replacing, write_atomically

ITEMS = "items.npy"
"""IDs of the items, in the order of the model."""
USERS = "users.npy"
"""IDs of the users, in the order of the model; only if rows are items."""
BIASES = "biases.npz"
"""The mean and the column biases, if biases are subtracted."""
POPULARITY = "popularity.npz"
"""How many users have rated each item, and the number of users."""
RATINGS = "ratings.json"
"""Absolute paths and hashes of the rating files."""
ROLES = {"training": "trained on", "validation": "validated on", "test": "tested on"}
"""How a run uses each of its rating files."""

_NONE_UNSEEN = Unseen(0, 0, 0)
_log = logging.getLogger("millrace")

_COLUMNS: dict[RowKind, str] = {"users": ITEMS, "items": USERS}


class Popularity(NamedTuple):
    """How popular items are among the training ratings."""

    counts: np.ndarray
    """The number of ratings of each item."""
    num_users: int

    @property
    def novelty(self) -> np.ndarray:
        """-log2 of the fraction of users who have rated each item; at least one counts."""
        return np.log2(self.num_users / np.maximum(self.counts, 1))


class RunFiles(NamedTuple):
    """The contents of the files that a run keeps."""

    item_ids: np.ndarray
    column_ids: np.ndarray
    """IDs of the columns of the network: the items, or the users if rows are items."""
    column_biases: ColumnBiases | None
    """Biases to subtract from ratings, if any."""
    hashes: Mapping[str, str]
    """Hashes of the rating files at the time of training, by role."""
    popularity: Popularity | None = None
    """The popularity of the items; older runs have not kept it."""


def save_run_files(folder: Path, config: AutoencoderConfig, ratings: RatingData) -> None:
    """Write the files to the run directory; a resumed run keeps those it has."""
    _save_rating_files(folder, config)
    training = ratings.training
    ids = {_COLUMNS[config.data.rows]: training.item_ids}
    if config.data.rows == "items":
        ids[ITEMS] = training.user_ids
    for name, array in ids.items():
        if not (folder / name).exists():
            with replacing(folder / name, binary=True) as file:
                np.save(file, np.asarray(array))
    if not (folder / POPULARITY).exists():
        with replacing(folder / POPULARITY, binary=True) as file:
            np.savez(file, **_measure_popularity(training, config.data.rows)._asdict())
    biases = ratings.column_biases
    if biases is not None and not (folder / BIASES).exists():
        with replacing(folder / BIASES, binary=True) as file:
            np.savez(file, **dataclasses.asdict(biases))


def _measure_popularity(training: Ratings, rows: RowKind) -> Popularity:
    if rows == "items":
        return Popularity(training.num_ratings_by_user, training.num_items)
    counts = np.bincount(training.items, minlength=training.num_items)
    return Popularity(counts, training.num_users)


def _load_popularity(path: Path) -> Popularity | None:
    if not path.is_file():
        return None
    with np.load(path) as saved:
        return Popularity(saved["counts"], int(saved["num_users"]))


def _save_rating_files(folder: Path, config: AutoencoderConfig) -> None:
    if not load_rating_files(folder):
        files = _list_rating_files(config)
        write_atomically(folder / RATINGS, json.dumps(files, indent=2) + "\n")


def _list_rating_files(config: AutoencoderConfig) -> dict[str, dict[str, str]]:
    paths = {role: getattr(config.data, f"{role}_data_file") for role in ROLES}
    return {
        role: {"file": str(path.absolute()), "hash": hash_file(path)}
        for role, path in paths.items()
        if path is not None and path.is_file()
    }


def load_kept_biases(folder: Path, config: AutoencoderConfig) -> ColumnBiases | None:
    """Return the biases that a run to resume has trained with, if it has any.

    Raises:
        ConfigurationError: A rating file has changed since the run was started.
    """
    before = load_rating_files(folder)
    for role, entry in _list_rating_files(config).items():
        if role in before and before[role]["hash"] != entry["hash"]:
            raise ConfigurationError(
                f"{getattr(config.data, f'{role}_data_file')} has changed since the run in "
                f"{folder} was started. Start a new run."
            )
    path = folder / BIASES
    return _load_biases(path) if config.data.subtract_biases and path.exists() else None


def load_rating_files(folder: Path) -> dict[str, Any]:
    """Return the path and hash of each rating file; old runs have recorded none."""
    path = folder / RATINGS
    return json.loads(path.read_text()) if path.exists() else {}


def load_run_files(folder: Path, config: AutoencoderConfig) -> RunFiles:
    """Read the files of a run."""
    return RunFiles(
        np.load(folder / ITEMS),
        np.load(folder / _COLUMNS[config.data.rows]),
        _load_biases(folder / BIASES) if config.data.subtract_biases else None,
        {role: entry["hash"] for role, entry in load_rating_files(folder).items()},
        _load_popularity(folder / POPULARITY),
    )


def _load_biases(path: Path) -> ColumnBiases:
    if not path.is_file():
        raise ConfigurationError(
            f"There is no {path}, but the model needs these biases to predict ratings."
        )
    with np.load(path) as biases:
        numbers = {n: float(biases[n]) for n in biases.files if n != "of_column"}
        return ColumnBiases(of_column=biases["of_column"], **numbers)


class FittedRatings(NamedTuple):
    """Ratings whose columns are those of a model."""

    ratings: RatingData
    unknown: Unseen
    """Counts of the known ratings that were left out, their columns, and the rows that are
    empty without them."""


def load_ratings_for(
    config: AutoencoderConfig,
    files: RunFiles,
    *,
    training: Path | None = None,
    validation: Path | None = None,
) -> FittedRatings:
    """Load the ratings of the run that trained a model, or those in other files."""
    config = _replace_files(config, files, training, validation)
    loaded = _load_ratings(config)
    known, unknown = _fit_columns(loaded.training, files.column_ids, config.data.rows)
    targets, unseen = _fit_targets(loaded.validation, known)
    if config.data.rows == "items":
        unknown, unseen = unknown.transpose(), unseen.transpose()
    fitted = loaded._replace(
        training=known,
        validation=targets,
        test=_fit_targets(loaded.test, known)[0],
        unseen=unseen.plus(loaded.unseen or _NONE_UNSEEN),
    )
    if files.column_biases is not None:
        fitted = data.subtract_biases(fitted, files.column_biases)
    return FittedRatings(fitted, unknown)


def _load_ratings(config: AutoencoderConfig) -> RatingData:
    """Load ratings, those to predict with all of their users and items.

    The model may know items that are not in the file of known ratings.
    """
    options, seed = config.data, config.run.seed
    paths = {r: getattr(options, f"{r}_data_file") for r in ("validation", "test")}
    if options.training_data_file is None or not any(paths.values()):
        return data.load(options, seed, objective=config.training.objective)
    dropped = dict.fromkeys(("validation_data_file", "test_data_file"))
    held_out = 0.0 if paths["validation"] else options.validation_fraction
    without = replace_options(config, **dropped, validation_fraction=held_out)
    loaded = data.load(without.data, seed, objective=config.training.objective)
    limits = (options.rating_range[0], options.rating_range[1])
    file, no_ratings = options.training_data_file, options.no_ratings
    targets = {
        role: load_like(path, file, loaded.training, limits, no_ratings=no_ratings)
        for role, path in paths.items()
        if path is not None
    }
    if options.rows == "items":
        targets = {role: transpose(ratings) for role, ratings in targets.items()}
    return loaded._replace(**targets)


def without_targets(config: AutoencoderConfig) -> AutoencoderConfig:
    """Return the configuration of a run with all ratings known, and none to predict.

    Files of ratings to predict are not needed any more, and may be gone.
    """
    return replace_options(
        config, validation_data_file=None, test_data_file=None, validation_fraction=0.0
    )


def load_known_ratings(
    config: AutoencoderConfig, files: RunFiles, path: Path | None = None
) -> tuple[Ratings, Unseen]:
    """Return the known ratings by user, and counts of those the model does not know.

    They come from the file at `path`, or are those of the run.
    """
    config = without_targets(config)
    fitted, unknown = load_ratings_for(config, files, training=path)
    by_item = config.data.rows == "items"
    return transpose(fitted.training) if by_item else fitted.training, unknown


def _replace_files(
    config: AutoencoderConfig,
    files: RunFiles,
    training: Path | None,
    validation: Path | None,
) -> AutoencoderConfig:
    """Return the configuration of a run with other rating files."""
    paths = {"training_data_file": training, "validation_data_file": validation}
    given: dict[str, Any] = {n: path for n, path in paths.items() if path is not None}
    if given:
        given["test_data_file"] = None  # that of the run belongs to its own ratings
    for role in ROLES:
        if f"{role}_data_file" not in given:
            _check_file(config, files, role)
    if given and config.data.kind != "file":
        if training is None:
            raise ConfigurationError(
                f"The model was trained on {config.data.kind} ratings: give a "
                "training_data_file together with the validation_data_file."
            )
        synthetic = ("data", "num_users", "num_items", "num_ratings")
        given |= dict.fromkeys((*synthetic, "arrays"))
    # The default sizes depend on the name of the training file, which may change.
    sizes = {"size": config.resolved_size, "batch_size": config.resolved_batch_size}
    # load_ratings_for subtracts the biases of the model, after fitting the columns.
    without = ("subtract_biases", "clip_predictions", "normalize_ratings")
    return replace_options(config, **dict.fromkeys(without, False), **sizes, **given)


def _check_file(config: AutoencoderConfig, files: RunFiles, role: str) -> None:
    """Raise if a rating file of the run is gone; warn if it has changed."""
    path: Path | None = getattr(config.data, f"{role}_data_file")
    if path is None:
        return
    if not path.exists():
        raise ConfigurationError(
            f"There is no file {path}, which the run was {ROLES[role]}. Give its new "
            f"location with --{role}-data-file."
        )
    if role in files.hashes and hash_file(path) != files.hashes[role]:
        _log.warning("%s has changed since the run was %s it.", path, ROLES[role])


def _fit_columns(
    ratings: Ratings, column_ids: np.ndarray, rows: RowKind
) -> tuple[Ratings, Unseen]:
    """Renumber columns as the model does; drop and count those that it does not know."""
    assert ratings.biases is None, "biases are subtracted after fitting the columns"
    if np.array_equal(ratings.item_ids, column_ids):
        return ratings, _NONE_UNSEEN
    places = find_ids(column_ids, ratings.item_ids)[ratings.items]
    users = np.repeat(np.arange(ratings.num_users), ratings.num_ratings_by_user)
    is_known = places >= 0
    if not is_known.any():
        columns = "items" if rows == "users" else "users"
        raise ConfigurationError(
            f"The model was trained on none of the {columns} in these ratings. Are they "
            "from the same dataset?"
        )
    known = from_events(
        users[is_known],
        places[is_known],
        ratings.values[is_known],
        user_ids=ratings.user_ids,
        item_ids=column_ids,
        implicit=ratings.implicit,
    )
    is_empty = (known.num_ratings_by_user == 0) & (ratings.num_ratings_by_user > 0)
    return known, Unseen(
        num_users=int(is_empty.sum()),
        num_items=len(np.unique(ratings.items[~is_known])),
        num_ratings=int((~is_known).sum()),
    )


def _fit_targets(targets: Ratings | None, known: Ratings) -> tuple[Ratings | None, Unseen]:
    if targets is None:
        return None, _NONE_UNSEEN
    aligned, unseen = align(targets, known)
    if not aligned.num_ratings:
        raise ConfigurationError(
            "The model can predict none of the validation ratings. Are they from the same "
            "dataset? Ratings of new users are predicted from others of theirs, which "
            "belong in --training-data-file."
        )
    return aligned, unseen


def format_unknown(unknown: Unseen, rows: RowKind) -> str:
    """Return a warning about known ratings that a model cannot use."""
    columns, empty = f"{unknown.num_items:,} items", "users have rated nothing else"
    count = unknown.num_users
    if rows == "items":
        columns, empty = f"{unknown.num_users:,} users", "items were rated by nobody else"
        count = unknown.num_items
    return (
        f"{unknown.num_ratings:,} known ratings are left out: the model does not know "
        f"{columns}{f', and {count:,} {empty}' if count else ''}."
    )


def find_users(
    ids: Iterable[Any],
    ratings: Ratings,
    unknown: Unseen,
    rows: RowKind,
    *,
    folds_in: bool = False,
) -> np.ndarray:
    """Return the places of users in the ratings; each must have some.

    `folds_in` says whether the model can take in users from other ratings.
    """
    ids = list(ids)
    places = find_ids(ratings.user_ids, np.array(ids))
    for user, place in zip(ids, places, strict=True):
        if place < 0 and folds_in:
            raise ConfigurationError(
                f"The model was trained without user {user}. Give ratings of this user: a "
                "file in --training-data-file, or a mapping to recommend in Python."
            )
        if place < 0 and rows == "items":
            raise ConfigurationError(
                f"The model was trained without user {user}, and a model with rows of "
                "items knows no other users. Train again with the ratings of this user, "
                "or with --rows users, which can recommend to new users."
            )
        if place < 0:
            raise ConfigurationError(f"There is no user {user} in the ratings.")
        if not len(ratings.get_user(place)[0]):
            # Every user in a file has ratings, so the model must have dropped them.
            dropped = unknown.num_users and rows == "users"
            what = (
                "rated only items that the model does not know"
                if dropped
                else ("no ratings")
            )
            raise ConfigurationError(
                f"User {user} has {what}, so there is nothing to predict from."
            )
    return places
