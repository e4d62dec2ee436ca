"""Ratings from files or synthetic ones, and the batches made from them.

Two options are handled when ratings are loaded, so that the rest of the application need
not know about them. With rows of items, the ratings are transposed: from then on, items
play the role of users. With biases subtracted, the values are residuals, possibly divided
by a unit: only code that measures, shows or ranks ratings adds the biases back.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.apps.autoencoder.arrays import build_ratings
from millrace.apps.autoencoder.config import TrainingConfig
from millrace.apps.autoencoder.config.data import DataOptions
from millrace.apps.autoencoder.config.training import Objective, Steps
from millrace.apps.autoencoder.resident import (
    ResidentRatings,
    can_be_indexed,
    count_table_bytes,
)
from millrace.config import ConfigurationError, option_value
from millrace.data.memory import HeldArrays, require_held
from millrace.data.ratings.generated import generate_ratings, random_ratings
from millrace.data.ratings.matrix import (
    ColumnBiases,
    Ratings,
    Unseen,
    align,
    fit_biases,
    hold_out,
    transpose,
)
from millrace.data.ratings.reading import load_ratings, load_targets
from millrace.data.ratings.source import RatingsSource, evaluation_source, training_source
from millrace.data.source import DatasetError
from millrace.data.stream import ParallelStream, Stream
from millrace.feeds.infeed import Infeed
from millrace.run.run import Run

_RANDOM_SIZES = {"num_users": 480_000, "num_items": 18_000, "num_ratings": 13_000_000}
_VALIDATION_DIVISOR = 13
"""Random ratings have this many times fewer ratings for validation than for training."""
_MEMORY_FRACTION = 0.1
"""Fraction of the device memory that all ratings may take by default."""


class RatingData(NamedTuple):
    """Ratings with the same users and items, by user or by item."""

    training: Ratings
    validation: Ratings | None
    test: Ratings | None = None
    """Generated, or from a file of their own."""
    unseen: Unseen | None = None
    """Counts of what was left out of validation."""
    noise: float | None = None
    """RMSE that no model can beat on generated ratings."""
    column_biases: ColumnBiases | None = None
    """The biases that were subtracted, if any."""

    @property
    def unit(self) -> float:
        """What the values are measured in: they are residuals divided by it."""
        return 1.0 if self.column_biases is None else self.column_biases.unit

    def map(self, function: Callable[[Ratings], Ratings]) -> "RatingData":
        """Apply a function to every split."""
        splits = {name: getattr(self, name) for name in ("training", "validation", "test")}
        return self._replace(**{n: function(s) for n, s in splits.items() if s is not None})


def load(
    options: DataOptions,
    seed: int,
    *,
    objective: Objective = "rating",
    biases: ColumnBiases | None = None,
) -> RatingData:
    """Load or generate the ratings, with the rows that the options ask for.

    Biases to subtract are fitted to the training ratings, unless they are given.
    """
    ratings = _load_by_user(options, seed)
    check_objective(ratings.training, objective, options)
    ratings = ratings.map(transpose) if options.rows == "items" else ratings
    if not options.subtract_biases:
        return ratings
    if biases is None:
        biases = fit_biases(
            ratings.training, options.bias_strength, normalize=options.normalize_ratings
        )
    return subtract_biases(ratings, biases)


def check_objective(ratings: Ratings, objective: Objective, options: DataOptions) -> None:
    """Raise if there are no ratings, but a model is to predict them."""
    if objective == "rating" and ratings.implicit:
        source = options.training_data_file or "data"
        raise ConfigurationError(
            f"{source} has no ratings to predict: it says only which users chose which "
            "items, which needs --objective ranking. If it has a column of ratings of "
            "another name, write a file with convert --rating-column."
        )


def subtract_biases(ratings: RatingData, biases: ColumnBiases) -> RatingData:
    """Subtract column biases, and row biases estimated from the training ratings."""
    known = ratings.training
    without = ratings.map(lambda part: biases.subtract(part, known))
    return without._replace(column_biases=biases)


def _load_by_user(options: DataOptions, seed: int) -> RatingData:
    if options.kind == "generated":
        sizes = _given_sizes(options, "num_users", "num_items")
        training, validation, test, truth = generate_ratings(**sizes, seed=seed)
        return RatingData(training, validation, test, noise=truth.noise)
    if options.kind == "random":
        sizes = _RANDOM_SIZES | _given_sizes(options, *_RANDOM_SIZES)
        training = random_ratings(**sizes, seed=seed)
        fewer = {"num_ratings": max(1, sizes["num_ratings"] // _VALIDATION_DIVISOR)}
        return RatingData(training, random_ratings(**(sizes | fewer), seed=seed + 1))
    limits = (options.rating_range[0], options.rating_range[1])
    if options.no_ratings and options.arrays is not None:
        raise ConfigurationError("no_ratings is for files: pass data without ratings.")
    if options.arrays is not None:
        held = require_held(options.arrays, "mr.autoencoder.train")
        ratings = _load_arrays(held, limits)
    else:
        ratings = _load_files(options, limits)
    if ratings.validation is None and options.validation_fraction:
        training, validation = hold_out(ratings.training, options.validation_fraction, seed)
        if not validation.num_ratings:
            raise DatasetError(
                f"{ratings.training.num_ratings} ratings are too few to hold some out for "
                "validation. Give --validation-data-file, or --no-validation."
            )
        ratings = ratings._replace(training=training, validation=validation)
    return ratings


def _load_files(options: DataOptions, limits: tuple[float, float]) -> RatingData:
    """Return the ratings in files; those to predict get the numbers of the others."""
    assert options.training_data_file is not None, "checked by DataOptions"
    file, no_ratings = options.training_data_file, options.no_ratings
    training = load_ratings(file, limits=limits, no_ratings=no_ratings)

    def load_others(path: Path) -> tuple[Ratings, Unseen]:
        return load_targets(path, file, training, limits, no_ratings=no_ratings)

    ratings = RatingData(training, None)
    if options.validation_data_file is not None:
        validation, unseen = load_others(options.validation_data_file)
        ratings = ratings._replace(validation=validation, unseen=unseen)
    if options.test_data_file is not None:
        ratings = ratings._replace(test=load_others(options.test_data_file)[0])
    return ratings


def _load_arrays(held: HeldArrays, limits: tuple[float, float]) -> RatingData:
    """Return ratings that were passed from Python."""
    training = build_ratings(held.arrays, "", limits)
    if "validation_user" not in held.arrays:
        return RatingData(training, None)
    validation = build_ratings(held.arrays, "validation_", limits)
    validation, unseen = align(validation, training)
    return RatingData(training, validation, unseen=unseen)


def _given_sizes(options: DataOptions, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if getattr(options, name)}


def describe(ratings: RatingData, options: DataOptions) -> str:
    """Return one line on the ratings and their counts."""
    training, validation = ratings.training, ratings.validation
    num_users, num_items = training.num_users, training.num_items
    if options.rows == "items":
        num_users, num_items = num_items, num_users
    origin = "random"
    if options.kind == "generated":
        origin = f"MADE UP: generated with noise {ratings.noise:g}"
    elif options.arrays is not None:
        origin = "arrays in memory"
    elif isinstance(options.training_data_file, Path):
        origin = str(options.training_data_file)
    line = (
        f"{training.num_ratings:,} by {num_users:,} users of {num_items:,} items ({origin})"
    )
    if validation is not None:
        line += f", {validation.num_ratings:,} for validation"
    return line


def print_notices(ratings: RatingData, config: TrainingConfig, run: Run) -> None:
    """Print what a user should know about the ratings before training starts."""
    options = config.data
    if options.kind == "random":
        run.console.warning(
            "No --training-data-file: THE RATINGS ARE RANDOM and there is nothing to learn "
            "from them. Use them to measure speed; --data generated shows learning."
        )
    if options.kind == "generated":
        run.console.line(
            "The ratings are made up, to try the program. Train on your own with "
            "--training-data-file and --validation-data-file."
        )
    warn_unseen(ratings, run)
    if config.recipe_reason:
        run.console.line(
            f"The graphcore recipe is chosen by {config.recipe_reason}: it has the "
            "settings of Graphcore's application. --recipe modern has settings for your "
            "own ratings."
        )
    for name in ("size", "batch_size") if config.recipe != "modern" else ():
        given = option_value(config, name)
        reference = getattr(options.reference_settings, name, None)
        if options.kind == "file" and given and reference and given != reference:
            run.console.line(
                f"Using --{name.replace('_', '-')} {given}; the reference trains "
                f"{options.training_data_file} with {reference}."
            )


def warn_unseen(ratings: RatingData, run: Run) -> None:
    """Print what was left out of validation, if anything."""
    unseen = ratings.unseen
    if unseen is not None and unseen.num_ratings:
        run.console.warning(
            f"{unseen.num_ratings:,} validation ratings are left out: "
            f"{unseen.num_users:,} users and {unseen.num_items:,} items do not occur in "
            "training."
        )


class RowSource:
    """A source of sparse batches in which every array has the rows along dim 0.

    The runtime splits and counts samples along dim 0. A batch is a flat list of ratings,
    so the list is cut into as many equal pieces as the batch has rows; ``row`` says which
    row each rating belongs to.

    Args:
        source: Returns the ratings of some rows as a flat list.
        micro_batch_size: Rows per replica; a batch is one such list per replica, joined.
            By default all rows belong to one replica.
    """

    def __init__(self, source: RatingsSource, micro_batch_size: int | None = None) -> None:
        self._source = source
        self._micro_batch_size = micro_batch_size

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        size = self._micro_batch_size or len(indices)
        if size < len(indices):
            starts = range(0, len(indices), size)
            parts = [self[indices[start : start + size]] for start in starts]
            return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
        batch = self._source[indices]
        return {
            name: array if name == "user" else _cut(array, len(indices), name)
            for name, array in batch.items()
        }


def _cut(array: np.ndarray, num_rows: int, name: str) -> np.ndarray:
    if missing := -len(array) % num_rows:
        padding = num_rows if name.endswith("row") else 0
        array = np.append(array, np.full(missing, padding, array.dtype))
    return array.reshape(num_rows, -1)


class EvaluationRowSource(RowSource):
    """A row source that also says whether a batch is full, without repeated rows."""

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = super().__getitem__(indices)
        is_whole = len(np.unique(indices)) == len(indices)
        return batch | {"is_whole": np.full(len(indices), is_whole)}


class RefedStream:
    """A stream in which an empty batch follows every batch.

    The empty batch tells the loss to train on the reconstruction of the one before it.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        first = stream.batch(0)
        self._num_rows = len(first["user"])
        self._empty = first | {"row": np.full_like(first["row"], self._num_rows)}

    def batch(self, position: int) -> dict[str, np.ndarray]:
        """Return the batch at `position`, counting empty ones."""
        number, is_refed = divmod(position, 2)
        batch = self._empty if is_refed else self._stream.batch(number)
        return batch | {"refed": np.full(self._num_rows, bool(is_refed))}


def open_infeed(
    ratings: Ratings, config: TrainingConfig, steps: Steps, device: Any
) -> Infeed:
    """Return the batches of a run, sent from the host or gathered on the device."""
    plan, seed = config.plan, config.run.seed
    source = training_source(
        ratings,
        plan.micro_batch_size,
        num_batches=steps.num_batches * plan.num_replicas,
        seed=seed,
        batches_per_epoch=steps.batches_per_epoch * plan.num_replicas,
    )
    rows = RowSource(source, plan.micro_batch_size)
    stream = Stream(rows, config.resolved_batch_size, seed=seed)
    refed = config.training.refeeding == "detached"
    if plan.num_replicas == 1 and _fits_on_device(ratings, config.data, device):
        return Infeed(ResidentRatings(ratings, source.users, stream, refed=refed))
    batches = RefedStream(stream) if refed else stream
    num_parallel = config.data.parallel_batches(config.resolved_batch_size)
    return Infeed(ParallelStream(batches, num_parallel))


def _fits_on_device(ratings: Ratings, options: DataOptions, device: Any) -> bool:
    """Whether to keep all ratings on the device."""
    if options.data_on_device is not None:
        return options.data_on_device
    statistics = device.memory_stats() if device.platform != "cpu" else None
    memory = (statistics or {}).get("bytes_limit", 0)
    fits = count_table_bytes(ratings) <= memory * _MEMORY_FRACTION
    return fits and can_be_indexed(ratings)


def open_evaluation_source(
    ratings: Ratings, targets: Ratings | None, batch_size: int
) -> EvaluationRowSource:
    """Return rows with their known ratings, and the target ratings to predict."""
    return EvaluationRowSource(evaluation_source(ratings, targets, batch_size))
