"""Batches of users for training and evaluation, sparse and of one shape.

A batch is a flat list of its ratings, filled up to a capacity. Users differ so much (most
have tens of ratings, a few have thousands) that a bound for any batch would be mostly
filling. What a run will read is known before it starts, so the capacity is that of its
fullest batch. A batch that would not fit is an error; no rating is ever cut off.
"""

import math

import numpy as np

from millrace.data.ratings.matrix import Ratings
from millrace.data.stream import Stream

_ROUNDING = 128
"""Capacities are whole multiples of this, so that like runs compile to like programs."""


class RatingsSource:
    """Users' ratings as batches of one shape.

    A batch of B users has ``user`` int32[B] and its ratings, one after the other:
    ``item`` int32[capacity], ``value`` float32[capacity], and ``row`` int32[capacity], the
    rating's place in the batch. In the filling ``row`` is B, one past the end. With
    `targets` there are also ``target_item``, ``target_value`` and ``target_row``.

    Args:
        ratings: What the model is shown.
        capacity: Ratings in a batch.
        targets: What it should foretell, with the same users and items.
        target_capacity: The same for the targets.
        users: The samples, as places in `ratings`; if not given, the users that have
            something to learn from or be tested with.
    """

    def __init__(
        self,
        ratings: Ratings,
        *,
        capacity: int,
        targets: Ratings | None = None,
        target_capacity: int | None = None,
        users: np.ndarray | None = None,
    ) -> None:
        self._tables = {"": (ratings, capacity)}
        if targets is not None:
            assert (targets.num_users, targets.num_items) == (
                ratings.num_users,
                ratings.num_items,
            ), "targets must be aligned with ratings"
            assert target_capacity is not None, "targets need a target_capacity"
            self._tables["target_"] = (targets, target_capacity)
        self.users = active_users(targets or ratings) if users is None else users

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        users = self.users[indices]
        batch = {"user": users.astype(np.int32)}
        for prefix, (ratings, capacity) in self._tables.items():
            flat = _flat(ratings, users, capacity)
            batch |= {prefix + name: array for name, array in flat.items()}
        return batch


def _flat(ratings: Ratings, users: np.ndarray, capacity: int) -> dict[str, np.ndarray]:
    """Lay the ratings of these users one after the other."""
    firsts = ratings.starts[users]
    counts = ratings.starts[users + 1] - firsts
    total = int(counts.sum())
    if total > capacity:
        raise ValueError(
            f"A batch of {len(users)} users has {total} ratings, but was given room for "
            f"{capacity}. Make the source for the batches that are asked of it."
        )
    places = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(total)
    item = np.zeros(capacity, np.int32)
    value = np.zeros(capacity, np.float32)
    row = np.full(capacity, len(users), np.int32)
    item[:total] = ratings.items[places]
    value[:total] = ratings.values[places]
    row[:total] = np.repeat(np.arange(len(users), dtype=np.int32), counts)
    return {"item": item, "row": row, "value": value}


def active_users(ratings: Ratings) -> np.ndarray:
    """Return the users that have ratings."""
    return np.flatnonzero(ratings.num_ratings_by_user)


def training_source(
    ratings: Ratings,
    batch_size: int,
    *,
    num_batches: int,
    seed: int,
    batches_per_epoch: int | None = None,
) -> RatingsSource:
    """Return a source with room for the batches of one run.

    Args:
        ratings: What to learn.
        batch_size: Users in a batch.
        num_batches: How many batches the run will take.
        seed: The stream's. A stream with another one may not fit.
        batches_per_epoch: The stream's, if it is given one.
    """
    users = active_users(ratings)
    counts = ratings.num_ratings_by_user[users]
    in_epoch = batches_per_epoch or len(users) // batch_size
    if in_epoch < 1:
        raise ValueError(
            f"{len(users)} users with ratings do not make one batch of {batch_size}."
        )
    # One batch that is a whole epoch: the same order, thousands of batches at a time.
    epochs = Stream(_Counted(counts), in_epoch * batch_size, batches_per_epoch=1, seed=seed)
    fullest = 0
    for epoch in range(-(-num_batches // in_epoch)):
        sums = epochs.batch(epoch).reshape(in_epoch, batch_size).sum(1)
        fullest = max(fullest, int(sums[: num_batches - epoch * in_epoch].max()))
    return RatingsSource(ratings, capacity=_rounded(fullest), users=users)


def evaluation_source(
    ratings: Ratings,
    targets: Ratings | None,
    batch_size: int,
    users: np.ndarray | None = None,
) -> RatingsSource:
    """Return a source with room for one pass in order, as `EvaluationBatches` makes it.

    Args:
        ratings: What the model is shown.
        targets: What it is tested with, aligned with `ratings`; only users who have some
            come. None: every user with ratings comes, to recommend to.
        batch_size: Users in a batch.
        users: Who comes, if not those.
    """
    if users is None:
        users = active_users(ratings if targets is None else targets)
    if len(users) == 0:
        raise ValueError("There are no users with ratings to evaluate.")
    # The last batch is filled up with the last user, over and over.
    padded = np.append(users, np.repeat(users[-1:], -len(users) % batch_size))

    def capacity(table: Ratings) -> int:
        counts = table.num_ratings_by_user[padded]
        return _rounded(int(counts.reshape(-1, batch_size).sum(1).max()))

    return RatingsSource(
        ratings,
        capacity=capacity(ratings),
        targets=targets,
        target_capacity=None if targets is None else capacity(targets),
        users=users,
    )


def _rounded(capacity: int) -> int:
    return max(1, math.ceil(capacity / _ROUNDING)) * _ROUNDING


class _Counted:
    """A source whose samples are the numbers of ratings."""

    def __init__(self, counts: np.ndarray) -> None:
        self._counts = counts

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return self._counts[indices]
