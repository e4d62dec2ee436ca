"""What users think of items: a sparse matrix of ratings, in memory or mapped from disk."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np


class Biases(NamedTuple):
    """What has been subtracted from ratings."""

    mean: float
    of_user: np.ndarray
    """float32[num_users]"""
    of_item: np.ndarray
    """float32[num_items]"""

    def of(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Return what was subtracted from ratings of these users for these items."""
        return self.mean + self.of_user[users] + self.of_item[items]


@dataclass(frozen=True, eq=False, kw_only=True)
class Ratings:
    """Ratings by user: user u's lie at ``starts[u]:starts[u + 1]`` of items and values.

    Users and items are numbered in the order of their identifiers.
    """

    starts: np.ndarray
    """int64[num_users + 1]"""
    items: np.ndarray
    """int32[num_ratings]: rising within a user."""
    values: np.ndarray
    """float16[num_ratings] where that holds every one exactly, else float32."""
    user_ids: np.ndarray
    """int64 or str[num_users]: what each user is called in the file."""
    item_ids: np.ndarray
    """int64 or str[num_items]"""
    smallest: float
    largest: float
    num_duplicates: int = 0
    """Ratings replaced by a later one of the same user and item."""
    biases: Biases | None = None
    """What the values are without, if anything."""

    @property
    def num_users(self) -> int:
        """Count the users, with ratings or without."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """Count the items."""
        return len(self.item_ids)

    @property
    def num_ratings(self) -> int:
        """Count the ratings."""
        return len(self.items)

    @property
    def num_ratings_by_user(self) -> np.ndarray:
        """Count each user's ratings."""
        return np.diff(self.starts)

    def of_user(self, user: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the items that a user has rated, and the ratings."""
        place = slice(self.starts[user], self.starts[user + 1])
        return self.items[place], self.values[place]


def transposed(ratings: Ratings) -> Ratings:
    """Return the ratings by item: items take the users' part, and users the items'."""
    starts = np.zeros(ratings.num_items + 1, np.int64)
    np.cumsum(np.bincount(ratings.items, minlength=ratings.num_items), out=starts[1:])
    order = _order_of(ratings.items, ratings.num_items)
    users = np.arange(ratings.num_users, dtype=np.int32)
    biases = ratings.biases
    return replace(
        ratings,
        starts=starts,
        items=np.repeat(users, ratings.num_ratings_by_user)[order],
        values=ratings.values[order],
        user_ids=ratings.item_ids,
        item_ids=ratings.user_ids,
        biases=biases and Biases(biases.mean, biases.of_item, biases.of_user),
    )


def _order_of(numbers: np.ndarray, count: int) -> np.ndarray:
    """Return the places of numbers below `count`, the smallest first, equal as they lie.

    NumPy sorts numbers of 16 bits in linear time, so larger ones are sorted in two halves.
    """
    order = np.argsort((numbers & 0xFFFF).astype(np.uint16), kind="stable")
    if count > 1 << 16:
        upper = (numbers >> 16).astype(np.uint16)
        order = order[np.argsort(upper[order], kind="stable")]
    return order


class Unseen(NamedTuple):
    """What a file has of users and items that another file does not know."""

    num_users: int
    num_items: int
    num_ratings: int
    """Ratings of such a user or such an item; they are left out."""

    def plus(self, other: "Unseen") -> "Unseen":
        """Add up what was left out one after the other."""
        return Unseen(*map(sum, zip(self, other, strict=True)))

    def turned(self) -> "Unseen":
        """Return what it is of ratings by user if it is of ratings by item."""
        return self._replace(num_users=self.num_items, num_items=self.num_users)


def from_events(
    users: np.ndarray,
    items: np.ndarray,
    values: np.ndarray,
    *,
    user_ids: np.ndarray,
    item_ids: np.ndarray,
) -> Ratings:
    """Gather single ratings, in any order; of two for one user and item the later counts.

    Args:
        users: Each rating's user, as a place in `user_ids`.
        items: Each rating's item, as a place in `item_ids`.
        values: The ratings.
        user_ids: What the users are called.
        item_ids: What the items are called.
    """
    keys = users.astype(np.int64) * len(item_ids) + items
    keys, values = _later_of_each(keys, compact(values))
    users = keys // max(1, len(item_ids))
    starts = np.zeros(len(user_ids) + 1, np.int64)
    np.cumsum(np.bincount(users, minlength=len(user_ids)), out=starts[1:])
    return Ratings(
        starts=starts,
        items=(keys - users * len(item_ids)).astype(np.int32),
        values=values,
        user_ids=user_ids,
        item_ids=item_ids,
        smallest=float(values.min()) if len(values) else np.nan,
        largest=float(values.max()) if len(values) else np.nan,
        num_duplicates=len(items) - len(values),
    )


def _later_of_each(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort by key, keeping the last of equal ones."""
    if (keys[1:] > keys[:-1]).all():
        return keys, values
    order = np.argsort(keys)  # not stable, which would take twice as long
    keys = keys[order]
    is_first = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    if is_first.all():
        return keys, values[order]
    firsts = np.flatnonzero(is_first)
    return keys[firsts], values[np.maximum.reduceat(order, firsts)]


def compact(values: np.ndarray) -> np.ndarray:
    """Return the values in two bytes each if that changes none, else in four."""
    values = values.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        halved = values.astype(np.float16)
    return halved if np.array_equal(halved, values) else values


def find(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the place of each wanted identifier among `ids`, -1 where it is not there.

    Numbers are compared with texts as they are written.
    """
    wanted = np.asarray(wanted)
    if len(ids) == 0:
        return np.full(wanted.shape, -1)
    if (ids.dtype.kind == "U") != (wanted.dtype.kind == "U"):
        ids, wanted = ids.astype(str), wanted.astype(str)
    order = np.argsort(ids, kind="stable")
    places = np.searchsorted(ids, wanted, sorter=order)
    places = order[np.minimum(places, len(ids) - 1)]
    return np.where(ids[places] == wanted, places, -1)


def align(ratings: Ratings, like: Ratings) -> tuple[Ratings, Unseen]:
    """Number users and items as in `like`, leaving out and counting what it lacks."""
    assert ratings.biases is None, "they are subtracted when all is numbered alike"
    users = find(like.user_ids, ratings.user_ids)
    items = find(like.item_ids, ratings.item_ids)
    user_of = np.repeat(users, ratings.num_ratings_by_user)
    item_of = items[ratings.items]
    kept = (user_of >= 0) & (item_of >= 0)
    aligned = from_events(
        user_of[kept],
        item_of[kept],
        ratings.values[kept],
        user_ids=like.user_ids,
        item_ids=like.item_ids,
    )
    unseen = Unseen(
        num_users=int(((users < 0) & (ratings.num_ratings_by_user > 0)).sum()),
        num_items=len(np.unique(ratings.items[item_of < 0])),
        num_ratings=int(len(kept) - kept.sum()),
    )
    return replace(aligned, num_duplicates=ratings.num_duplicates), unseen
