"""What the recommender can be told about its ratings. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

_MAY_CHANGE = {"may_change": True}

DataKind = Literal["file", "random", "generated"]
Rows = Literal["users", "items"]


class Recommended(NamedTuple):
    """What the reference trains a data set with."""

    batch_size: int
    size: Literal[128, 256, 512]


RECOMMENDED = {
    "3m_train.txt": Recommended(64, 128),
    "6m_train.txt": Recommended(64, 256),
    "1y_train.txt": Recommended(32, 256),
    "full_train.txt": Recommended(8, 512),
}
"""By the name of the training file."""
MADE_UP = Recommended(64, 128)

_SIZES = ("num_users", "num_items", "num_ratings")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The ratings."""

    training_data_file: Path | None = None
    """Ratings to learn from: lines of user, item and rating, plain or gzip."""
    validation_data_file: Path | None = None
    """Later ratings of the same users, to foretell (default: no validation)."""
    data: DataKind | None = None
    """file, random (nothing can be learned from it; for measuring speed) or generated
    (from a known truth, so that a run shows learning). Default: random without a
    training file."""
    rows: Rows = "users"
    """Whose ratings the network reads at a time, and reconstructs: a user's, of all
    items, or an item's, by all users. Rows of items foretold MovieLens better; they know
    no other users than those in training."""
    subtract_biases: bool = False
    """Have the network learn what is left of ratings without the mean, the user's bias and
    the item's, and add these to what it foretells."""
    rating_range: list[float] = field(default_factory=lambda: [0.5, 5.0])
    """The smallest and the largest that a rating in a file may be."""
    num_users: int | None = None
    """Of made-up ratings (default: 480000 random, 4000 generated)."""
    num_items: int | None = None
    """Of made-up ratings (default: 18000 random, 400 generated)."""
    num_ratings: int | None = None
    """Of random ratings (default: 13000000, and a thirteenth more for validation)."""
    pipeline_num_parallel: int = field(
        default=2, metadata={"may_change": True, "may_differ": True}
    )
    """Batches gathered on the host at a time."""
    data_on_device: bool | None = field(default=None, metadata=_MAY_CHANGE)
    """Keep all ratings on the device, sparse, and gather batches there (default: if they
    take at most a tenth of its memory; on CPU, no)."""

    def check_data_options(self) -> None:
        """Raise on what cannot be, or does not go together."""
        for name in (*_SIZES, "pipeline_num_parallel"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        limits = self.rating_range
        if len(limits) != 2 or not 0 < limits[0] <= limits[1]:
            raise ValueError(
                "rating_range must be the smallest and the largest rating, above 0 (which "
                f"means that there is none); got {' '.join(map(str, limits))}."
            )
        if self.data_kind == "file":
            self._check_file()
        else:
            self._check_made_up()

    def _check_file(self) -> None:
        if self.training_data_file is None:
            raise ValueError("data file needs a training_data_file.")
        for name in _SIZES:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is for made-up ratings, and a file is given.")

    def _check_made_up(self) -> None:
        for name in ("training_data_file", "validation_data_file"):
            if getattr(self, name) is not None:
                hint = "" if self.data else " Give a training_data_file as well."
                raise ValueError(f"{name} is given, but the ratings are made up.{hint}")
        if self.data_kind == "generated" and self.num_ratings is not None:
            raise ValueError(
                "num_ratings is for random ratings; of generated ones there are three in "
                "ten of all pairs of num_users and num_items."
            )

    @property
    def data_kind(self) -> DataKind:
        """Where ratings come from, worked out."""
        if self.data is not None:
            return self.data
        return "random" if self.training_data_file is None else "file"

    @property
    def recommended(self) -> Recommended | None:
        """Batch and size for this data, if the reference knows it."""
        if self.training_data_file is None:
            return MADE_UP
        return RECOMMENDED.get(self.training_data_file.name.removesuffix(".gz"))
