"""Batches of users: one shape, large enough for the run, nothing dropped."""

import numpy as np
import pytest

from millrace.data.ratings.generated import random_ratings
from millrace.data.ratings.matrix import from_events
from millrace.data.ratings.source import (
    RatingsSource,
    evaluation_source,
    training_source,
)
from millrace.data.stream import EvaluationBatches, Stream


def skewed(num_users=70, num_items=300, seed=0):
    """Return ratings of which a few users have nearly all and every seventh has none."""
    generator = np.random.default_rng(seed)
    counts = generator.zipf(1.6, num_users).clip(max=num_items)
    counts[::7] = 0
    users = np.repeat(np.arange(num_users), counts)
    items = np.concatenate([generator.permutation(num_items)[:n] for n in counts])
    return from_events(
        users,
        items,
        generator.integers(1, 11, len(users)) / 2,
        user_ids=np.arange(num_users),
        item_ids=np.arange(num_items),
    )


def as_matrix(ratings):
    matrix = np.zeros((ratings.num_users, ratings.num_items), np.float32)
    for user in range(ratings.num_users):
        items, values = ratings.get_user(user)
        matrix[user, items] = values
    return matrix


def batch_as_matrix(batch, num_items, prefix=""):
    """Return the ratings of a batch as a matrix; padding goes to an extra row."""
    matrix = np.zeros((len(batch["user"]) + 1, num_items), np.float32)
    row, item, value = (batch[prefix + name] for name in ("row", "item", "value"))
    np.add.at(matrix, (row, item), value)
    assert not matrix[-1].any()
    return matrix[:-1]


def test_the_batches_of_a_run_are_the_rows_of_users_in_one_shape():
    ratings = skewed()
    source = training_source(ratings, 8, num_batches=50, seed=3)
    assert len(source) == 60  # users without ratings are left out
    stream = Stream(source, 8, seed=3)
    matrix, shapes = as_matrix(ratings), set()
    for position in range(50):
        batch = stream.batch(position)
        rows = batch_as_matrix(batch, ratings.num_items)
        np.testing.assert_array_equal(rows, matrix[batch["user"]])
        shapes.add(tuple((name, a.shape, a.dtype) for name, a in batch.items()))
    assert len(shapes) == 1


def test_the_capacity_is_that_of_the_fullest_batch_of_the_run():
    ratings = random_ratings(3000, 500, 90_000, seed=0)
    source = training_source(ratings, 32, num_batches=400, seed=1, batches_per_epoch=90)
    stream = Stream(source, 32, seed=1, batches_per_epoch=90)
    fullest = max(int((stream.batch(n)["row"] < 32).sum()) for n in range(400))
    (capacity,) = stream.batch(0)["row"].shape
    assert fullest <= capacity < fullest + 128
    shorter = training_source(ratings, 32, num_batches=1, seed=1, batches_per_epoch=90)
    (capacity,) = shorter[stream.indices(0)]["row"].shape
    assert capacity - 128 < (stream.batch(0)["row"] < 32).sum() <= capacity


def test_a_batch_that_does_not_fit_is_an_error():
    ratings = skewed()
    source = RatingsSource(ratings, capacity=3)
    fullest = int(np.argmax(ratings.num_ratings_by_user[source.users]))
    with pytest.raises(ValueError, match=r"A batch of 1 users has .* capacity is 3"):
        source[np.array([fullest])]


def test_an_evaluation_pass_has_each_user_with_the_targets_to_predict():
    ratings, targets = skewed(seed=0), skewed(seed=1)
    source = evaluation_source(ratings, targets, 16)
    shown, hidden = as_matrix(ratings), as_matrix(targets)
    users = []
    for element in EvaluationBatches(source, 16):
        batch, valid = element["batch"], element["valid"]
        users += batch["user"][valid].tolist()
        for matrix, prefix in ((shown, ""), (hidden, "target_")):
            rows = batch_as_matrix(batch, ratings.num_items, prefix)
            np.testing.assert_array_equal(rows, matrix[batch["user"]])
    assert users == np.flatnonzero(hidden.any(1)).tolist()


def test_without_targets_every_user_with_ratings_is_evaluated():
    ratings = skewed()
    source = evaluation_source(ratings, None, 16)
    assert len(source) == 60 and set(source[np.arange(16)]) == {
        *("user", "item", "row", "value")
    }


def test_too_few_users_are_an_error():
    with pytest.raises(
        ValueError, match="60 users with ratings do not make one batch of 64"
    ):
        training_source(skewed(), 64, num_batches=1, seed=0)
