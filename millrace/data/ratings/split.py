"""Splits ratings by time: what comes later is what a recommender has to foretell."""

from collections.abc import Mapping, Sequence
from datetime import date
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from millrace.data.ratings.matrix import Unseen
from millrace.data.ratings.text import Events

_DAY_SECONDS = 24 * 3600
_EPOCH = date(1970, 1, 1)


class Period(NamedTuple):
    """A split of the Netflix Prize data, as published; days are inclusive."""

    training: tuple[date, date]
    test: tuple[date, date]
    num_users: int
    """In training."""
    num_ratings: int
    num_test_users: int
    """In the test month, validation included."""
    num_test_ratings: int


_DECEMBER = (date(2005, 12, 1), date(2005, 12, 31))
PERIODS: Mapping[str, Period] = MappingProxyType(
    {
        "3m": Period(
            (date(2005, 9, 1), date(2005, 11, 30)),
            _DECEMBER,
            num_users=311_315,
            num_ratings=13_675_402,
            num_test_users=160_906,
            num_test_ratings=2_082_559,
        ),
        "6m": Period(
            (date(2005, 6, 1), date(2005, 11, 30)),
            _DECEMBER,
            num_users=390_795,
            num_ratings=29_179_009,
            num_test_users=169_541,
            num_test_ratings=2_175_535,
        ),
        "1y": Period(
            (date(2004, 6, 1), date(2005, 5, 31)),
            (date(2005, 6, 1), date(2005, 6, 30)),
            num_users=345_855,
            num_ratings=41_451_832,
            num_test_users=197_951,
            num_test_ratings=3_888_684,
        ),
        "full": Period(
            (date(1999, 12, 1), date(2005, 11, 30)),
            _DECEMBER,
            num_users=477_412,
            num_ratings=98_074_901,
            num_test_users=173_482,
            num_test_ratings=2_250_481,
        ),
    }
)
"""The four that Graphcore's application and the paper behind it use."""


class Split(NamedTuple):
    """Places of ratings, in their order."""

    training: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    unseen: Unseen
    """What was left out of validation and test, because training does not know it."""


def window_of(period: Period) -> tuple[int, int]:
    """Return the first second of a period, and the first after it."""
    return _seconds(period.training[0]), _seconds(period.test[1]) + _DAY_SECONDS


def split_period(events: Events, period: Period, *, seed: int) -> Split:
    """Split at the days of a period; a fair coin divides its end into valid and test."""
    training = _between(_times(events), *period.training)
    later = _between(_times(events), *period.test)
    return _hold_out(events, training, *_by_coin(events, later, seed))


def split_at(events: Events, days: Sequence[date], *, seed: int) -> Split:
    """Split before each of one or two days: training, validation, test.

    With one day, a fair coin divides what comes from then on.
    """
    times = _times(events)
    first = times < _seconds(days[0])
    if len(days) == 1:
        return _hold_out(events, first, *_by_coin(events, ~first, seed))
    last = times >= _seconds(days[1])
    return _hold_out(events, first, ~first & ~last, last)


def split_fractions(events: Events, fractions: Sequence[float], *, per_user: bool) -> Split:
    """Split into shares by time: the earliest ratings for training, the latest for test.

    Args:
        events: With times.
        fractions: The shares of training and validation; the rest is for test.
        per_user: Take shares of each user's ratings, not of all.
    """
    times = _times(events)
    users = events.users.codes if per_user else np.zeros(len(times), np.int32)
    order = np.lexsort((times, users))
    counts = np.bincount(users)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    part = np.empty(len(order), np.int8)
    # A half, so that a user with three ratings has two of them for training at 0.6.
    share = (place + 0.5) / np.repeat(counts, counts)
    part[order] = np.searchsorted(np.cumsum(fractions[:2]), share)
    return _hold_out(events, part == 0, part == 1, part == 2)


def _hold_out(
    events: Events, training: np.ndarray, validation: np.ndarray, test: np.ndarray
) -> Split:
    """Leave out of validation and test what training does not know."""
    users, items = events.users.codes, events.items.codes
    knows_user = np.zeros(len(events.users.ids), bool)
    knows_item = np.zeros(len(events.items.ids), bool)
    knows_user[users[training]] = True
    knows_item[items[training]] = True
    later = validation | test
    known = knows_user[users] & knows_item[items]
    unseen = Unseen(
        num_users=len(np.unique(users[later & ~knows_user[users]])),
        num_items=len(np.unique(items[later & ~knows_item[items]])),
        num_ratings=int((later & ~known).sum()),
    )
    return Split(
        np.flatnonzero(training),
        np.flatnonzero(validation & known),
        np.flatnonzero(test & known),
        unseen,
    )


def _by_coin(
    events: Events, chosen: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Divide by a fair coin, in the same way whatever the order of the ratings."""
    places = np.flatnonzero(chosen)
    places = places[np.lexsort((events.items.codes[places], events.users.codes[places]))]
    heads = np.zeros(len(chosen), bool)
    heads[places] = np.random.default_rng(seed).random(len(places)) < 0.5
    return chosen & heads, chosen & ~heads


def _times(events: Events) -> np.ndarray:
    assert events.times is not None, "a split by time needs times"
    return events.times


def _seconds(day: date) -> int:
    return (day - _EPOCH).days * _DAY_SECONDS


def _between(times: np.ndarray, first: date, last: date) -> np.ndarray:
    """Whether a moment lies in these days, inclusive."""
    return (times >= _seconds(first)) & (times < _seconds(last) + _DAY_SECONDS)
