"""Options of the ratings. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

DataKind = Literal["file", "random", "generated"]
RowKind = Literal["users", "items"]


class ReferenceSettings(NamedTuple):
    """The settings that Graphcore's application uses for a dataset."""

    batch_size: int
    size: Literal[128, 256, 512]


REFERENCE_SETTINGS = {
    "3m_train.txt": ReferenceSettings(64, 128),
    "6m_train.txt": ReferenceSettings(64, 256),
    "1y_train.txt": ReferenceSettings(32, 256),
    "full_train.txt": ReferenceSettings(8, 512),
}
"""Settings by the name of the training file."""
_SYNTHETIC_SETTINGS = ReferenceSettings(64, 128)

_FILES = ("training_data_file", "validation_data_file", "test_data_file")
_MOST_HELD_OUT = 0.5
_PARALLEL_BATCHES = 2
_COUNTS = ("num_users", "num_items", "num_ratings")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Ratings."""

    training_data_file: Path | None = None
    """Ratings to train on: lines of user, item and rating, plain or gzip, or Parquet."""
    validation_data_file: Path | None = None
    """Later ratings of the same users, to predict (default: some training ratings are held
    out by the modern recipe, otherwise no validation)."""
    test_data_file: Path | None = None
    """Ratings that the best model predicts at the end."""
    validation_fraction: float = 0.0
    """Fraction of the training ratings to hold out for validation, if there is no
    validation file (default: at most 0.1 in the modern recipe, otherwise 0)."""
    data: DataKind | None = None
    """Source of the ratings: file, random (to measure speed; there is nothing to learn) or
    generated (drawn from a known truth that a model can learn). Default: file if there is
    a training file; random with num_users, num_items or num_ratings; otherwise a small
    generated example."""
    rows: RowKind = "users"
    """What one sample is: all ratings of a user, or all ratings of an item. Rows of items
    predict better, but only for users in the training ratings (default: users; items in
    the modern recipe up to 50,000 users)."""
    subtract_biases: bool = False
    """Train on ratings minus the global mean, the user bias and the item bias; predictions
    add them back."""
    bias_strength: float = 10.0
    """Shrinkage of the biases toward 0, in ratings: a user or item with this many ratings
    gets half of its mean residual (default: 5 in the modern recipe)."""
    normalize_ratings: bool = False
    """Divide what the biases leave over by its size, so that the other options suit any
    scale of ratings; needs subtract_biases. Errors and predictions stay on the scale of
    the ratings (default: on in the modern recipe)."""
    clip_predictions: bool = False
    """Limit predictions to the smallest and largest training rating when errors are
    measured; needs subtract_biases. Recommendations show limited ratings always."""
    rating_range: list[float] = field(default_factory=lambda: [0.5, 5.0])
    """Smallest and largest valid rating in a file."""
    no_ratings: bool = False
    """Ignore ratings: files only say which users chose which items. Without a header, the
    columns are then user, item and optionally a time."""
    positive_from: float = 4.0
    """Smallest rating of an item that a user likes, for the objective ranking (default: 4;
    in the modern recipe 0.8 of the largest valid rating, or 1, which is all, for ratings
    that are all 1)."""
    num_users: int | None = None
    """Users in synthetic ratings (default: 480000 random, 4000 generated)."""
    num_items: int | None = None
    """Items in synthetic ratings (default: 18000 random, 400 generated)."""
    num_ratings: int | None = None
    """Random ratings for training; validation has a thirteenth as many (default:
    13000000)."""
    pipeline_num_parallel: int | None = field(
        default=None, metadata={"may_change": True, "may_differ": True}
    )
    """Rows that the host prepares in parallel, rounded up to whole batches (default: two
    batches)."""
    data_on_device: bool | None = field(default=None, metadata={"may_change": True})
    """Keep all ratings on the device in sparse form and build batches there (default: yes
    if they fit in a tenth of its memory; no on CPU)."""

    arrays: dict[str, Any] | None = field(default=None, metadata={"hidden": True})
    """Record of arrays passed from Python: their shapes and a checksum."""

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "pipeline_num_parallel"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not 0 <= self.validation_fraction <= _MOST_HELD_OUT:
            raise ValueError(
                f"validation_fraction must be from 0 to {_MOST_HELD_OUT}, got "
                f"{self.validation_fraction:g}."
            )
        if not 0 <= self.bias_strength < math.inf:
            raise ValueError(f"bias_strength must be 0 or more, got {self.bias_strength}.")
        for name in ("clip_predictions", "normalize_ratings"):
            if getattr(self, name) and not self.subtract_biases:
                raise ValueError(f"{name} needs subtract_biases.")
        limits = self.rating_range
        if len(limits) != 2 or not 0 < limits[0] <= limits[1]:
            raise ValueError(
                "rating_range must be the smallest and the largest rating, both above 0 "
                f"(0 means no rating); got {' '.join(map(str, limits))}."
            )

    def check_source(self) -> None:
        """Raise if the options do not describe one source of ratings."""
        if self.arrays is not None:
            given = ("data", *_FILES, *_COUNTS)
            if any(getattr(self, name) is not None for name in given):
                raise ValueError("Give arrays as data, or a file, not both.")
            return
        if self.kind == "file":
            if self.training_data_file is None:
                raise ValueError("data file needs a training_data_file.")
            for name in _COUNTS:
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for synthetic ratings, not for a file.")
            return
        for name in _FILES:
            if getattr(self, name) is not None:
                hint = "" if self.data else " Give a training_data_file as well."
                raise ValueError(f"{name} is given, but the ratings are synthetic.{hint}")
        if self.kind == "generated" and self.num_ratings is not None:
            raise ValueError(
                "num_ratings is for random ratings. Generated ratings cover three in ten "
                "pairs of num_users and num_items."
            )

    def parallel_batches(self, batch_size: int) -> int:
        """Return how many batches of this size the host prepares in parallel."""
        if (rows := self.pipeline_num_parallel) is None:
            return _PARALLEL_BATCHES
        return -(-rows // batch_size)

    @property
    def kind(self) -> DataKind | Literal["arrays"]:
        """The source of the ratings, after defaults."""
        if self.arrays is not None:
            return "arrays"
        if self.data is not None:
            return self.data
        return "random" if self.training_data_file is None else "file"

    @property
    def reference_settings(self) -> ReferenceSettings | None:
        """The reference settings for this data; None for a file of another name."""
        if self.training_data_file is None:
            return _SYNTHETIC_SETTINGS
        return REFERENCE_SETTINGS.get(self.training_data_file.name.removesuffix(".gz"))

    def default_for(self, option: str, recipe_reason: str | None = None) -> int:
        """Return the reference value of ``size`` or ``batch_size`` for this data.

        `recipe_reason` is what chose the graphcore recipe, if that was not asked for.
        """
        if (settings := self.reference_settings) is not None:
            return getattr(settings, option)
        file = self.training_data_file
        assert file is not None
        if not file.exists():
            raise ValueError(f"There is no training_data_file {file}.")
        chosen = f", chosen by {recipe_reason}," if recipe_reason else ""
        raise ValueError(
            f"{option} must be given for {file.name}: the graphcore recipe{chosen} has a "
            f"default only for files called {', '.join(REFERENCE_SETTINGS)}. Give it, or "
            "--recipe modern, which chooses it for any file."
        )
