"""What ``millrace autoencoder convert`` can be told. Imports nothing heavy."""

from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Literal

from millrace.config import ConfigurationError

_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Split ratings by time into the files that autoencoder train and validate read.

    INPUT is a file of user, item, rating and time, or the folder of a published data set:
    the Netflix Prize (training_set/mv_*.txt or combined_data_*.txt) or MovieLens (u.data,
    ratings.dat, ratings.csv). Identifiers stay as they are. Users and items that are not in
    training are left out of the other two files, and counted.
    """

    input: Path = field(metadata={"positional": True})
    """The file or folder to read; files may be compressed (gzip)."""
    output_dir: Path = Path(".")
    """Folder to write to; made if need be."""
    prefix: str | None = None
    """Begins the names of the files: PREFIXtrain.txt, PREFIXvalid.txt and PREFIXtest.txt
    (default: the period's name and an underscore, or nothing)."""
    period: Literal["3m", "6m", "1y", "full"] | None = None
    """One of the published splits of the Netflix Prize data."""
    split_at: list[str] = field(default_factory=list)
    """One or two days, such as 2005-12-01. Training ends before the first, validation
    before the second; with one, a coin divides the rest into validation and test."""
    fractions: list[float] = field(default_factory=list)
    """Shares of the ratings, by time: of training, validation and test."""
    per_user: bool = False
    """Take the fractions of each user's ratings instead of all together."""
    seed: int = 0
    """Of the coin."""
    rating_range: list[float] = field(default_factory=lambda: [0.5, 5.0])
    """The smallest and the largest that a rating may be."""
    user_column: str | None = None
    """The users' column: its name in the header, or its number from 1 (default: by
    well-known names; without a header the order is user, item, rating, time)."""
    item_column: str | None = None
    """The items' column."""
    rating_column: str | None = None
    """The ratings' column."""
    time_column: str | None = None
    """The times' column: seconds or milliseconds since 1970, or dates."""
    overwrite: bool = False
    """Replace files that are there."""
    quiet: bool = False
    """Print nothing but errors."""
    debug: bool = False
    """Show the full traceback of an error."""

    def __post_init__(self) -> None:
        ways = {
            "--period": self.period is not None,
            "--split-at": bool(self.split_at),
            "--fractions": bool(self.fractions),
        }
        given = [way for way, is_given in ways.items() if is_given]
        if len(given) != 1:
            raise ConfigurationError(
                f"One of {', '.join(ways)} must say where to split; "
                f"got {' and '.join(given) or 'none'}."
            )
        self._check_days()
        self._check_fractions()
        lowest, *highest = self.rating_range or [0]
        if len(highest) != 1 or not 0 < lowest < highest[0]:
            raise ConfigurationError(
                "--rating-range takes two numbers above 0, the smaller first (a rating of "
                f"0 would mean that there is none); got {self.rating_range}."
            )

    def _check_days(self) -> None:
        if len(self.split_at) > 2 or self.days != sorted(set(self.days)):
            raise ConfigurationError(
                "--split-at takes one or two days, the earlier first; "
                f"got {' '.join(self.split_at)}."
            )

    def _check_fractions(self) -> None:
        if self.per_user and not self.fractions:
            raise ConfigurationError("--per-user goes with --fractions only.")
        if not self.fractions:
            return
        wrong_sum = abs(sum(self.fractions) - 1) > _TOLERANCE
        if len(self.fractions) != 3 or min(self.fractions) <= 0 or wrong_sum:
            raise ConfigurationError(
                "--fractions takes three numbers above 0 that make 1 together, for "
                f"training, validation and test; got {self.fractions}."
            )

    @property
    def days(self) -> list[date]:
        """The days of split_at."""
        try:
            return [date.fromisoformat(day) for day in self.split_at]
        except ValueError as error:
            raise ConfigurationError(
                f"--split-at takes days such as 2005-12-01: {error}."
            ) from None

    @property
    def columns(self) -> dict[str, str]:
        """Those that were chosen."""
        chosen = {
            "user": self.user_column,
            "item": self.item_column,
            "rating": self.rating_column,
            "time": self.time_column,
        }
        return {kind: column for kind, column in chosen.items() if column is not None}
