"""Ratings with their times, from the files that Netflix and MovieLens are published as."""

from collections.abc import Mapping
from pathlib import Path

from millrace.config import ConfigurationError
from millrace.data.ratings.chunks import check_plain_file
from millrace.data.ratings.netflix import is_sectioned, read_sections
from millrace.data.ratings.text import Events, read_events
from millrace.data.source import DatasetError

_NETFLIX = ("training_set/mv_*.txt", "mv_*.txt", "combined_data_*.txt")
_MOVIELENS = ("ratings.csv", "ratings.dat", "u.data")


def read_raw(
    path: Path,
    limits: tuple[float, float],
    columns: Mapping[str, str],
    window: tuple[float, float],
) -> Events:
    """Read a file of ratings with times, or the folder of a published data set.

    Args:
        path: The file or folder.
        limits: The smallest and the largest that a rating may be.
        columns: See `find_layout`.
        window: The first moment that is of use, and the first that is not any more.
    """
    files = _files(path)
    if is_sectioned(files[0]):
        if columns:
            raise ConfigurationError(
                f"{files[0]} has the columns of the Netflix Prize; they cannot be chosen."
            )
        events = read_sections(files, limits, window)
    else:
        events = read_events(files[0], limits, columns, window=window)
    if events.times is None:
        raise ConfigurationError(
            f"{files[0]} has no column of times to split by. If there is one, give its "
            "name or number with --time-column."
        )
    if len(events.values) == 0:
        raise DatasetError(f"{path} has no ratings in the period asked for.")
    return events


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        check_plain_file(path, "file or folder")
        return [path]
    for pattern in _NETFLIX:
        if found := sorted(path.glob(pattern)) or sorted(path.glob(f"{pattern}.gz")):
            return found
    for name in _MOVIELENS:
        for file in (path / name, path / f"{name}.gz"):
            if file.is_file():
                return [file]
    raise ConfigurationError(
        f"{path.resolve()} holds no ratings; looked for "
        f"{', '.join((*_NETFLIX, *_MOVIELENS))} (or .gz). Give a file, or the folder that "
        "holds one of these."
    )
