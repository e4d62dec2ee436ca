"""Splits ratings by time, at random or by leaving one out, and writes them."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from millrace.data.ratings.chunks import Events
from millrace.data.ratings.identifiers import CodedIds
from millrace.data.ratings.matrix import Unseen
from millrace.data.ratings.tables import import_pyarrow, select_events
from millrace.data.source import DatasetError

_DAY_SECONDS = 24 * 3600
_EPOCH = date(1970, 1, 1)
_LINES_PER_WRITE = 1 << 18


class Period(NamedTuple):
    """A published split of the Netflix Prize data; days are inclusive."""

    training: tuple[date, date]
    test: tuple[date, date]
    num_users: int
    """Users in training."""
    num_ratings: int
    """Ratings in training."""
    num_test_users: int
    """Users in the test month, including validation."""
    num_test_ratings: int
    """Ratings in the test month, including validation."""

    @property
    def window(self) -> tuple[int, int]:
        """The first second of the period, and the first after it."""
        return _seconds(self.training[0]), _seconds(self.test[1]) + _DAY_SECONDS


_DECEMBER = (date(2005, 12, 1), date(2005, 12, 31))
PERIODS: Mapping[str, Period] = MappingProxyType(
    {
        "3m": Period(
            (date(2005, 9, 1), date(2005, 11, 30)), _DECEMBER,
            311_315, 13_675_402, 160_906, 2_082_559,
        ),
        "6m": Period(
            (date(2005, 6, 1), date(2005, 11, 30)), _DECEMBER,
            390_795, 29_179_009, 169_541, 2_175_535,
        ),
        "1y": Period(
            (date(2004, 6, 1), date(2005, 5, 31)), (date(2005, 6, 1), date(2005, 6, 30)),
            345_855, 41_451_832, 197_951, 3_888_684,
        ),
        "full": Period(
            (date(1999, 12, 1), date(2005, 11, 30)), _DECEMBER,
            477_412, 98_074_901, 173_482, 2_250_481,
        ),
    }
)  # fmt: skip
"""The four periods of Graphcore's application and of the paper it is based on."""


class Split(NamedTuple):
    """Indices of ratings, in ascending order."""

    training: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    unseen: Unseen
    """What was dropped from validation and test because it is not in training."""


def split_period(events: Events, period: Period, *, seed: int) -> Split:
    """Split at the days of a period; its test days are divided at random in two."""
    training = _between(_times(events), *period.training)
    later = _between(_times(events), *period.test)
    return _build_split(events, training, *_halve(events, later, seed))


def split_at(events: Events, days: Sequence[date], *, seed: int) -> Split:
    """Split before each of one or two days: training, validation, test.

    With one day, the ratings from then on are divided at random in two.
    """
    times = _times(events)
    first = times < _seconds(days[0])
    if len(days) == 1:
        return _build_split(events, first, *_halve(events, ~first, seed))
    last = times >= _seconds(days[1])
    return _build_split(events, first, ~first & ~last, last)


def split_fractions(
    events: Events,
    fractions: Sequence[float],
    *,
    per_user: bool,
    random_seed: int | None = None,
) -> Split:
    """Split into fractions by time: the earliest for training, the latest for test.

    Args:
        events: Ratings, with times unless there is a `random_seed`.
        fractions: The fractions for training and validation; the rest is for test.
        per_user: Split the ratings of each user, instead of all ratings together.
        random_seed: If given, split at random instead of by time.
    """
    keys = _times(events) if random_seed is None else _draw(events, random_seed)
    users = events.users.codes if per_user else np.zeros(len(keys), np.int32)
    order = np.lexsort((keys, users))  # stable: ties keep the order of the file
    counts = np.bincount(users)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    part = np.empty(len(order), np.int8)
    # The middle of each rating's interval: at 0.6, a user with three ratings (1/6, 1/2,
    # 5/6) has two of them in training.
    fraction = (rank + 0.5) / np.repeat(counts, counts)
    part[order] = np.searchsorted(np.cumsum(fractions[:2]), fraction)
    return _build_split(events, part == 0, part == 1, part == 2)


def leave_one_out(events: Events, *, random_seed: int | None = None) -> Split:
    """Leave the last rating of each user for test, and the one before for validation.

    A user with two ratings has none for validation; a user with one has it in training.

    Args:
        events: Ratings, with times unless there is a `random_seed`.
        random_seed: If given, the two ratings are chosen at random.
    """
    keys = _times(events) if random_seed is None else _draw(events, random_seed)
    users = events.users.codes
    order = np.lexsort((keys, users))
    counts = np.bincount(users)
    from_end = np.empty(len(order), np.int64)
    from_end[order] = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(order))
    test = (from_end == 0) & (counts[users] >= 2)
    validation = (from_end == 1) & (counts[users] >= 3)
    return _build_split(events, ~test & ~validation, validation, test)


def drop_repeats(events: Events) -> tuple[Events, int]:
    """Keep the last of several choices of the same item by the same user; count others."""
    keys = events.users.codes.astype(np.int64) * len(events.items.ids) + events.items.codes
    last_first = keys[::-1]
    _, kept = np.unique(last_first, return_index=True)
    chosen = np.sort(len(keys) - 1 - kept)
    return select_events(events, chosen), len(keys) - len(chosen)


def write_ratings(
    path: Path,
    users: CodedIds,
    items: CodedIds,
    values: np.ndarray | None,
    chosen: np.ndarray,
    *,
    times: np.ndarray | None = None,
    delimiter: str = "\t",
    with_header: bool = False,
) -> None:
    """Write the ratings at the indices `chosen` as text: user, tab, item, tab, rating.

    Args:
        path: The file.
        users: The users of all ratings.
        items: The items of all ratings.
        values: All ratings; None to write none.
        chosen: The indices.
        times: Times to write as a further column.
        delimiter: A character between two fields.
        with_header: Whether the first line has the names of the columns.
    """
    texts = [(_as_fields(ids.ids, delimiter), ids.codes) for ids in (users, items)]
    columns = {"rating": values, "time": times}
    columns = {name: column for name, column in columns.items() if column is not None}
    with path.open("wb") as file:
        if with_header:
            file.write((delimiter.join(["user", "item", *columns]) + "\n").encode())
        for first in range(0, len(chosen), _LINES_PER_WRITE):
            part = chosen[first : first + _LINES_PER_WRITE]
            fields = [ids[codes[part]] for ids, codes in texts]
            fields += [_format_numbers(column[part]) for column in columns.values()]
            file.write(join_fields(fields, delimiter))


def write_parquet(path: Path, events: Events, chosen: np.ndarray) -> None:
    """Write the ratings at the indices `chosen`, with the columns they have."""
    pyarrow = import_pyarrow("Writing Parquet")
    columns: dict[str, Any] = {}
    for name, ids in (("user", events.users), ("item", events.items)):
        coded = pyarrow.DictionaryArray.from_arrays(
            pyarrow.array(ids.codes[chosen]), pyarrow.array(ids.ids.tolist())
        )
        columns[name] = coded.dictionary_decode()
    if not events.implicit:
        columns["rating"] = events.values[chosen]
    if events.times is not None:
        columns["time"] = events.times[chosen]
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _draw(events: Events, seed: int) -> np.ndarray:
    """Return a random number for each rating that does not depend on their order."""
    order = np.lexsort((events.items.codes, events.users.codes))
    drawn = np.empty(len(order))
    drawn[order] = np.random.default_rng(seed).random(len(order))
    return drawn


def _build_split(
    events: Events, training: np.ndarray, validation: np.ndarray, test: np.ndarray
) -> Split:
    """Drop what is not in training from validation and test."""
    users, items = events.users.codes, events.items.codes
    is_user_known = np.zeros(len(events.users.ids), bool)
    is_item_known = np.zeros(len(events.items.ids), bool)
    is_user_known[users[training]] = True
    is_item_known[items[training]] = True
    later = validation | test
    known = is_user_known[users] & is_item_known[items]
    unseen = Unseen(
        num_users=len(np.unique(users[later & ~is_user_known[users]])),
        num_items=len(np.unique(items[later & ~is_item_known[items]])),
        num_ratings=int((later & ~known).sum()),
    )
    return Split(
        np.flatnonzero(training),
        np.flatnonzero(validation & known),
        np.flatnonzero(test & known),
        unseen,
    )


def _halve(events: Events, chosen: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide ratings at random; the result does not depend on their order in the file."""
    indices = np.flatnonzero(chosen)
    indices = indices[
        np.lexsort((events.items.codes[indices], events.users.codes[indices]))
    ]
    heads = np.zeros(len(chosen), bool)
    heads[indices] = np.random.default_rng(seed).random(len(indices)) < 0.5
    return chosen & heads, chosen & ~heads


def _times(events: Events) -> np.ndarray:
    assert events.times is not None, "checked by read_timed_events"
    return events.times


def _seconds(day: date) -> int:
    return (day - _EPOCH).days * _DAY_SECONDS


def _between(times: np.ndarray, first: date, last: date) -> np.ndarray:
    return (times >= _seconds(first)) & (times < _seconds(last) + _DAY_SECONDS)


def as_bytes(texts: np.ndarray) -> np.ndarray:
    """Return texts as rows of bytes, padded with zeros."""
    encoded = np.char.encode(texts.astype(str), "utf-8")
    return encoded.view(np.uint8).reshape(len(encoded), -1)


def _as_fields(ids: np.ndarray, delimiter: str) -> np.ndarray:
    """Return identifiers as rows of bytes, with quotes around those that need them."""
    if ids.dtype.kind != "U":
        return as_bytes(ids)
    return as_bytes(np.array([quote(text, delimiter) for text in ids.tolist()]))


def quote(text: str, delimiter: str) -> str:
    """Return a field as it is written, with quotes around it if it needs them."""
    if "\n" in text or "\r" in text or text != text.strip():
        raise DatasetError(
            f"The ID {text!r} has line breaks, or spaces around it, which are lost in "
            "text. Write Parquet instead."
        )
    if delimiter in text or text.startswith('"'):
        doubled = text.replace('"', '""')
        return f'"{doubled}"'
    return text


def _format_numbers(numbers: np.ndarray) -> np.ndarray:
    """Format each distinct number once: of ratings, there are only a few."""
    distinct, codes = np.unique(numbers, return_inverse=True)
    form = ".7g" if distinct.dtype.kind == "f" else "d"
    return as_bytes(np.array([f"{number:{form}}" for number in distinct.tolist()]))[codes]


def join_fields(fields: Sequence[np.ndarray], delimiter: str) -> bytes:
    """Return lines of fields, each column of which is rows of bytes padded with zeros."""
    columns = []
    for number, texts in enumerate(fields, 1):
        separator = ord("\n" if number == len(fields) else delimiter)
        columns += [texts, np.full((len(texts), 1), separator, np.uint8)]
    lines = np.concatenate(columns, axis=1)
    return lines[lines != 0].tobytes()  # drops the padding
