"""Splits ratings by time, because a recommender has to predict the future; writes them."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from millrace.data.ratings.chunks import CodedIds, Events
from millrace.data.ratings.matrix import Unseen

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


def split_fractions(events: Events, fractions: Sequence[float], *, per_user: bool) -> Split:
    """Split into fractions by time: the earliest for training, the latest for test.

    Args:
        events: Ratings with times.
        fractions: The fractions for training and validation; the rest is for test.
        per_user: Split the ratings of each user, instead of all ratings together.
    """
    times = _times(events)
    users = events.users.codes if per_user else np.zeros(len(times), np.int32)
    order = np.lexsort((times, users))
    counts = np.bincount(users)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    part = np.empty(len(order), np.int8)
    # The middle of each rating's interval: at 0.6, a user with three ratings (1/6, 1/2,
    # 5/6) has two of them in training.
    fraction = (rank + 0.5) / np.repeat(counts, counts)
    part[order] = np.searchsorted(np.cumsum(fractions[:2]), fraction)
    return _build_split(events, part == 0, part == 1, part == 2)


def write_ratings(
    path: Path, users: CodedIds, items: CodedIds, values: np.ndarray, chosen: np.ndarray
) -> None:
    """Write the ratings at the indices `chosen` as text: user, tab, item, tab, rating."""
    user_texts, item_texts = _as_bytes(users.ids), _as_bytes(items.ids)
    with path.open("wb") as file:
        for first in range(0, len(chosen), _LINES_PER_WRITE):
            part = chosen[first : first + _LINES_PER_WRITE]
            # Format each distinct value once: there are only a few.
            distinct, codes = np.unique(values[part], return_inverse=True)
            value_texts = _as_bytes(np.array([f"{value:.7g}" for value in distinct]))
            fields = [
                (user_texts[users.codes[part]], b"\t"),
                (item_texts[items.codes[part]], b"\t"),
                (value_texts[codes], b"\n"),
            ]
            file.write(_join_fields(fields))


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


def _as_bytes(ids: np.ndarray) -> np.ndarray:
    """Return texts as rows of bytes, padded with zeros."""
    encoded = np.char.encode(ids.astype(str), "utf-8")
    return encoded.view(np.uint8).reshape(len(encoded), -1)


def _join_fields(fields: list[tuple[np.ndarray, bytes]]) -> bytes:
    columns = []
    for texts, separator in fields:
        columns += [texts, np.full((len(texts), 1), separator[0], np.uint8)]
    lines = np.concatenate(columns, axis=1)
    return lines[lines != 0].tobytes()  # drops the padding
