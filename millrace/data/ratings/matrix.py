"""Ratings as a sparse matrix of users and items, in memory or mapped, and their biases."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from millrace.data.ratings.least_squares import solve_column_biases

_STRENGTH = 10.0
"""The best of 2, 5, 10 and 25 on the validation ratings of the three Netflix months."""
_USUAL_RESIDUAL = 0.9
"""The root mean square of what biases leave over of MovieLens-1M, from 1 to 5 stars."""
ALMOST_ZERO = 1e-4
"""Stands for a residual of exactly 0, because 0 means that there is no rating."""


class Biases(NamedTuple):
    """Biases that have been subtracted from ratings."""

    mean: float
    of_user: np.ndarray
    """float32[num_users]"""
    of_item: np.ndarray
    """float32[num_items]"""
    smallest: float = -np.inf
    largest: float = np.inf
    """The smallest and the largest rating that the biases were fitted to."""
    unit: float = 1.0
    """What the residuals were divided by."""

    def lookup(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Return what was subtracted from ratings of these items by these users."""
        return self.mean + self.of_user[users] + self.of_item[items]

    def restore(
        self, values: np.ndarray, users: np.ndarray, items: np.ndarray
    ) -> np.ndarray:
        """Return the ratings of these items by these users, given what was left of them."""
        return values * self.unit + self.lookup(users, items)


@dataclass(frozen=True, eq=False, kw_only=True)
class Ratings:
    """Ratings in CSR format: user u has ``starts[u]:starts[u + 1]`` of items and values.

    Users and items are numbered in the order of their identifiers.
    """

    starts: np.ndarray
    """int64[num_users + 1]"""
    items: np.ndarray
    """int32[num_ratings], ascending within a user."""
    values: np.ndarray
    """float16[num_ratings] if that is exact, else float32."""
    user_ids: np.ndarray
    """int64 or str[num_users], the identifiers in the file."""
    item_ids: np.ndarray
    """int64 or str[num_items], the identifiers in the file."""
    smallest: float
    largest: float
    num_duplicates: int = 0
    """Ratings that were replaced by a later one of the same user and item."""
    biases: Biases | None = None
    """The biases that have been subtracted from the values, if any."""
    implicit: bool = False
    """Whether there are no ratings, only choices of items; every value is then 1."""

    @property
    def num_users(self) -> int:
        """Number of users, including those without ratings."""
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.item_ids)

    @property
    def num_ratings(self) -> int:
        """Number of ratings."""
        return len(self.items)

    @property
    def num_ratings_by_user(self) -> np.ndarray:
        """Number of ratings of each user."""
        return np.diff(self.starts)

    @property
    def users(self) -> np.ndarray:
        """int32[num_ratings], the user of each rating."""
        users = np.arange(self.num_users, dtype=np.int32)
        return np.repeat(users, self.num_ratings_by_user)

    def get_user(self, user: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the items that a user has rated, and the ratings."""
        part = slice(self.starts[user], self.starts[user + 1])
        return self.items[part], self.values[part]


class Unseen(NamedTuple):
    """Counts of users and items in one file that are not in another."""

    num_users: int
    num_items: int
    num_ratings: int
    """Ratings by such a user or of such an item, which are dropped."""

    def plus(self, other: "Unseen") -> "Unseen":
        """Add the counts of two drops in succession."""
        return Unseen(*map(sum, zip(self, other, strict=True)))

    def transpose(self) -> "Unseen":
        """Exchange users and items."""
        return self._replace(num_users=self.num_items, num_items=self.num_users)


def from_events(
    users: np.ndarray,
    items: np.ndarray,
    values: np.ndarray,
    *,
    user_ids: np.ndarray,
    item_ids: np.ndarray,
    implicit: bool = False,
) -> Ratings:
    """Build a matrix from ratings in any order; of duplicates the later one counts.

    Args:
        users: The user of each rating, an index into `user_ids`.
        items: The item of each rating, an index into `item_ids`.
        values: The ratings.
        user_ids: The identifiers of the users.
        item_ids: The identifiers of the items.
        implicit: Whether there are no ratings, only choices.
    """
    # One 64-bit key per (user, item) sorts much faster than a lexsort of two columns.
    keys = users.astype(np.int64) * len(item_ids) + items
    keys, values = _sort_and_keep_last(keys, _compact(values))
    users = keys // max(1, len(item_ids))
    return Ratings(
        starts=_count_starts(users, len(user_ids)),
        items=(keys - users * len(item_ids)).astype(np.int32),
        values=values,
        user_ids=user_ids,
        item_ids=item_ids,
        smallest=float(values.min()) if len(values) else np.nan,
        largest=float(values.max()) if len(values) else np.nan,
        num_duplicates=len(items) - len(values),
        implicit=implicit,
    )


def transpose(ratings: Ratings) -> Ratings:
    """Exchange users and items: the rows of the result are items."""
    order = _stable_argsort(ratings.items, ratings.num_items)
    biases = ratings.biases
    return replace(
        ratings,
        starts=_count_starts(ratings.items, ratings.num_items),
        items=ratings.users[order],
        values=ratings.values[order],
        user_ids=ratings.item_ids,
        item_ids=ratings.user_ids,
        biases=biases and biases._replace(of_user=biases.of_item, of_item=biases.of_user),
    )


def hold_out(ratings: Ratings, fraction: float, seed: int) -> tuple[Ratings, Ratings]:
    """Set a random fraction of the ratings aside.

    Each user and each item keeps at least one rating.

    Returns:
        The ratings that are left, and those set aside.
    """
    assert ratings.biases is None, "biases are subtracted afterwards"
    users, items = ratings.users, np.asarray(ratings.items)
    order = np.random.default_rng(seed).permutation(ratings.num_ratings)
    may_go = np.ones(ratings.num_ratings, bool)
    for ids in (users, items):
        _, firsts = np.unique(ids[order], return_index=True)
        may_go[order[firsts]] = False
    chosen = order[may_go[order]][: round(fraction * ratings.num_ratings)]
    is_held_out = np.zeros(ratings.num_ratings, bool)
    is_held_out[chosen] = True

    def select(mask: np.ndarray) -> Ratings:
        return from_events(
            users[mask],
            items[mask],
            ratings.values[mask],
            user_ids=ratings.user_ids,
            item_ids=ratings.item_ids,
            implicit=ratings.implicit,
        )

    return select(~is_held_out), select(is_held_out)


def align(ratings: Ratings, like: Ratings) -> tuple[Ratings, Unseen]:
    """Number users and items as in `like`; drop and count those it does not have."""
    assert ratings.biases is None, "biases are subtracted after aligning"
    new_users = find_ids(like.user_ids, ratings.user_ids)
    new_items = find_ids(like.item_ids, ratings.item_ids)
    users, items = new_users[ratings.users], new_items[ratings.items]
    known = (users >= 0) & (items >= 0)
    aligned = from_events(
        users[known],
        items[known],
        ratings.values[known],
        user_ids=like.user_ids,
        item_ids=like.item_ids,
        implicit=ratings.implicit,
    )
    unseen = Unseen(
        num_users=int(((new_users < 0) & (ratings.num_ratings_by_user > 0)).sum()),
        num_items=len(np.unique(ratings.items[items < 0])),
        num_ratings=int(len(known) - known.sum()),
    )
    return replace(aligned, num_duplicates=ratings.num_duplicates), unseen


def find_ids(ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the index of each wanted identifier in `ids`, or -1.

    Numbers and texts are compared as text.
    """
    wanted = np.asarray(wanted)
    if len(ids) == 0:
        return np.full(wanted.shape, -1)
    if (ids.dtype.kind == "U") != (wanted.dtype.kind == "U"):
        ids, wanted = ids.astype(str), wanted.astype(str)
    order = np.argsort(ids, kind="stable")
    positions = np.searchsorted(ids, wanted, sorter=order)
    indices = order[np.minimum(positions, len(ids) - 1)]
    return np.where(ids[indices] == wanted, indices, -1)


def _count_starts(rows: np.ndarray, num_rows: int) -> np.ndarray:
    starts = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=starts[1:])
    return starts


def _stable_argsort(numbers: np.ndarray, limit: int) -> np.ndarray:
    """Return the stable order of numbers below `limit`.

    NumPy sorts 16-bit numbers in linear time, so larger ones are sorted in two halves.
    """
    order = np.argsort((numbers & 0xFFFF).astype(np.uint16), kind="stable")
    if limit > 1 << 16:
        upper = (numbers >> 16).astype(np.uint16)
        order = order[np.argsort(upper[order], kind="stable")]
    return order


def _sort_and_keep_last(
    keys: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sort by key, keeping the last value of equal keys."""
    if (keys[1:] > keys[:-1]).all():
        return keys, values
    # A stable sort would take twice as long. The last of equal keys is instead the one
    # with the largest index.
    order = np.argsort(keys)
    keys = keys[order]
    is_first = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    if is_first.all():
        return keys, values[order]
    firsts = np.flatnonzero(is_first)
    return keys[firsts], values[np.maximum.reduceat(order, firsts)]


def _compact(values: np.ndarray) -> np.ndarray:
    """Return the values as float16 if that changes none, else as float32."""
    values = values.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        halved = values.astype(np.float16)
    return halved if np.array_equal(halved, values) else values


@dataclass(frozen=True, eq=False)
class ColumnBiases:
    """The mean rating and the biases of the columns.

    The bias of a row is computed from its known ratings, so new rows need no training.
    """

    mean: float
    of_column: np.ndarray
    """float32[num_items]"""
    strength: float = _STRENGTH
    """L2 shrinkage of the biases, in units of ratings."""
    smallest: float = -np.inf
    largest: float = np.inf
    """The smallest and the largest rating."""
    unit: float = 1.0
    """What residuals are divided by, so that they have the same size on any scale."""

    def of_rows(self, ratings: Ratings) -> np.ndarray:
        """Return the bias of each row, given the mean and the columns."""
        residuals = np.float32(ratings.values) - (self.mean + self.of_column[ratings.items])
        return _shrunk_means(residuals, ratings.users, ratings.num_users, self.strength)

    def subtract(self, ratings: Ratings, known: Ratings) -> Ratings:
        """Return the ratings without their biases, divided by the unit.

        Args:
            ratings: Ratings with the rows and columns of `known`.
            known: The ratings from which the biases of the rows are computed.
        """
        limits = (self.smallest, self.largest)
        of_rows = self.of_rows(known)
        biases = Biases(self.mean, of_rows, self.of_column, *limits, self.unit)
        residuals = np.float32(ratings.values)
        residuals = residuals - biases.lookup(ratings.users, ratings.items)
        residuals /= np.float32(self.unit)
        residuals[residuals == 0] = ALMOST_ZERO
        return replace(ratings, values=residuals.astype(np.float32), biases=biases)


def fit_biases(
    ratings: Ratings, strength: float = _STRENGTH, *, normalize: bool = False
) -> ColumnBiases:
    """Fit ``mean + row bias + column bias``: the exact solution of the least squares.

    Args:
        ratings: The ratings.
        strength: L2 shrinkage of the biases, in units of ratings.
        normalize: Whether to measure what is left in units of its size: residuals have the
            root mean square of those of ratings from 1 to 5, whatever the scale.
    """
    mean = float(np.mean(ratings.values, dtype=np.float64)) if len(ratings.values) else 0.0
    of_column = solve_column_biases(
        ratings.starts,
        ratings.items,
        ratings.values.astype(np.float64) - mean,
        ratings.num_items,
        strength,
    )
    fitted = ColumnBiases(mean, of_column, strength, ratings.smallest, ratings.largest)
    return replace(fitted, unit=_choose_unit(fitted, ratings)) if normalize else fitted


def _choose_unit(biases: ColumnBiases, ratings: Ratings) -> float:
    """Return the size of the residuals, relative to that of ratings from 1 to 5."""
    residuals = biases.subtract(ratings, ratings).values
    if not len(residuals):
        return 1.0
    size = float(np.sqrt(np.mean(np.square(residuals, dtype=np.float64))))
    return size / _USUAL_RESIDUAL


def _shrunk_means(
    values: np.ndarray, groups: np.ndarray, num_groups: int, strength: float
) -> np.ndarray:
    """Return the mean of each group, shrunk toward 0."""
    sums = np.bincount(groups, values, num_groups)
    counts = np.bincount(groups, minlength=num_groups)
    # Without shrinkage, an empty group would be 0 / 0.
    weights = np.maximum(counts + strength, np.finfo(float).tiny)
    return (sums / weights).astype(np.float32)
