"""Batches of users for training and evaluation, sparse and of one fixed shape.

A batch is a flat list of its ratings, padded to a capacity. Most users have tens of
ratings and a few have thousands, so a bound for any possible batch would be mostly
padding. But the batches of a run are known before it starts: the capacity is that of its
fullest batch. A batch that does not fit is an error; ratings are never dropped.
"""

import math

import numpy as np

from millrace.data.ratings.matrix import Ratings
from millrace.data.source import ArraySource
from millrace.data.stream import Stream

_ROUNDING = 128
"""Capacities are multiples of this, so that similar runs share a compiled program."""


class RatingsSource:
    """Ratings of users as batches of one shape.

    A batch of B users has ``user`` int32[B] and its ratings in one list: ``item``
    int32[capacity], ``value`` float32[capacity], and ``row`` int32[capacity], the index of
    the user in the batch. For padding, ``row`` is B, one past the end. With `targets`
    there are also ``target_item``, ``target_value`` and ``target_row``.

    Args:
        ratings: The input of the model.
        capacity: Ratings per batch.
        targets: The ratings to predict, with the same users and items.
        target_capacity: Targets per batch.
        users: The samples, as indices into `ratings`; by default the users with targets,
            or with ratings if there are no targets.
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
            flat = _flatten(ratings, users, capacity)
            batch |= {prefix + name: array for name, array in flat.items()}
        return batch


def _flatten(ratings: Ratings, users: np.ndarray, capacity: int) -> dict[str, np.ndarray]:
    """Put the ratings of these users into one padded list."""
    firsts = ratings.starts[users]
    counts = ratings.starts[users + 1] - firsts
    total = int(counts.sum())
    if total > capacity:
        raise ValueError(
            f"A batch of {len(users)} users has {total} ratings, but the capacity is "
            f"{capacity}. Build the source for the batches that are read from it."
        )
    # The indices firsts[0], firsts[0] + 1, …, firsts[1], firsts[1] + 1, … without a loop.
    indices = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(total)
    item = np.zeros(capacity, np.int32)
    value = np.zeros(capacity, np.float32)
    row = np.full(capacity, len(users), np.int32)
    item[:total] = ratings.items[indices]
    value[:total] = ratings.values[indices]
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
    """Return a source with the capacity for the batches of one run.

    Args:
        ratings: The training ratings.
        batch_size: Users per batch.
        num_batches: Batches of the run.
        seed: The seed of the stream. The batches of another seed may not fit.
        batches_per_epoch: That of the stream, if given.
    """
    users = active_users(ratings)
    counts = ratings.num_ratings_by_user[users]
    in_epoch = batches_per_epoch or len(users) // batch_size
    if in_epoch < 1:
        raise ValueError(
            f"{len(users)} users with ratings do not make one batch of {batch_size}."
        )
    # One batch per epoch: the stream draws the same order, and thousands of batches are
    # summed at once.
    source = ArraySource({"count": counts})
    epochs = Stream(source, in_epoch * batch_size, batches_per_epoch=1, seed=seed)
    fullest = 0
    for epoch in range(-(-num_batches // in_epoch)):
        sums = epochs.batch(epoch)["count"].reshape(in_epoch, batch_size).sum(1)
        fullest = max(fullest, int(sums[: num_batches - epoch * in_epoch].max()))
    return RatingsSource(ratings, capacity=_round_up(fullest), users=users)


def evaluation_source(
    ratings: Ratings,
    targets: Ratings | None,
    batch_size: int,
    users: np.ndarray | None = None,
) -> RatingsSource:
    """Return a source with the capacity for one pass of `EvaluationBatches`.

    Args:
        ratings: The input of the model.
        targets: The ratings to predict, aligned with `ratings`; None to recommend.
        batch_size: Users per batch.
        users: The users to evaluate; by default those with targets, or with ratings if
            there are no targets.
    """
    if users is None:
        users = active_users(ratings if targets is None else targets)
    if len(users) == 0:
        raise ValueError("There are no users with ratings to evaluate.")
    # EvaluationBatches pads the last batch with the last user.
    padded = np.append(users, np.repeat(users[-1:], -len(users) % batch_size))

    def capacity(table: Ratings) -> int:
        counts = table.num_ratings_by_user[padded]
        return _round_up(int(counts.reshape(-1, batch_size).sum(1).max()))

    return RatingsSource(
        ratings,
        capacity=capacity(ratings),
        targets=targets,
        target_capacity=None if targets is None else capacity(targets),
        users=users,
    )


def _round_up(capacity: int) -> int:
    return max(1, math.ceil(capacity / _ROUNDING)) * _ROUNDING
