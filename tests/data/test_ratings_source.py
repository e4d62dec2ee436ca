import numpy as np
import pytest

from millrace.data.ratings.generated import generated_ratings, random_ratings
from millrace.data.ratings.matrix import from_events
from millrace.data.ratings.source import (
    RatingsSource,
    evaluation_source,
    training_source,
)
from millrace.data.stream import EvaluationBatches, Stream


def skewed(num_users=70, num_items=300, seed=0):
    """Ratings of which a few users have nearly all, and every seventh has none."""
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


def dense(ratings):
    matrix = np.zeros((ratings.num_users, ratings.num_items), np.float32)
    for user in range(ratings.num_users):
        items, values = ratings.of_user(user)
        matrix[user, items] = values
    return matrix


def as_dense(batch, num_items, prefix=""):
    """Put a batch's ratings where they belong; what is left over falls off the end."""
    matrix = np.zeros((len(batch["user"]) + 1, num_items), np.float32)
    row, item, value = (batch[prefix + name] for name in ("row", "item", "value"))
    np.add.at(matrix, (row, item), value)
    assert not matrix[-1].any()
    return matrix[:-1]


def test_the_batches_of_a_run_are_the_users_rows_in_one_shape():
    ratings = skewed()
    source = training_source(ratings, 8, num_batches=50, seed=3)
    assert len(source) == 60  # who has rated nothing is not there
    stream = Stream(source, 8, seed=3)
    matrix, shapes = dense(ratings), set()
    for position in range(50):
        batch = stream.batch(position)
        rows = as_dense(batch, ratings.num_items)
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


def test_a_batch_that_does_not_fit_is_an_error_not_cut():
    ratings = skewed()
    source = RatingsSource(ratings, capacity=3)
    fullest = int(np.argmax(ratings.num_ratings_by_user[source.users]))
    with pytest.raises(ValueError, match=r"A batch of 1 users has .* room for 3"):
        source[np.array([fullest])]


def test_an_evaluation_pass_shows_each_user_with_what_to_foretell():
    ratings, targets = skewed(seed=0), skewed(seed=1)
    source = evaluation_source(ratings, targets, 16)
    shown, hidden = dense(ratings), dense(targets)
    users = []
    for element in EvaluationBatches(source, 16):
        batch, valid = element["batch"], element["valid"]
        users += batch["user"][valid].tolist()
        for matrix, prefix in ((shown, ""), (hidden, "target_")):
            rows = as_dense(batch, ratings.num_items, prefix)
            np.testing.assert_array_equal(rows, matrix[batch["user"]])
    assert users == np.flatnonzero(hidden.any(1)).tolist()


def test_without_targets_every_user_who_rated_comes():
    ratings = skewed()
    source = evaluation_source(ratings, None, 16)
    assert len(source) == 60 and set(source[np.arange(16)]) == {
        *("user", "item", "row", "value")
    }


def test_too_few_users_are_named():
    with pytest.raises(
        ValueError, match="60 users with ratings do not make one batch of 64"
    ):
        training_source(skewed(), 64, num_batches=1, seed=0)


def test_generated_ratings_have_the_truth_and_noise_they_say():
    *parts, truth = generated_ratings(500, 200, rank=4, noise=0.2, density=0.25, seed=5)
    training = parts[0]
    total = sum(part.num_ratings for part in parts)
    assert total == pytest.approx(500 * 200 * 0.25, rel=0.05)
    assert training.num_ratings == pytest.approx(0.8 * total, rel=0.05)
    errors = []
    for part in parts:
        users = np.repeat(np.arange(part.num_users), part.num_ratings_by_user)
        errors.append(part.values - truth.rating(users, part.items))
        assert part.smallest > 0
    errors = np.concatenate(errors)
    assert errors.std() == pytest.approx(0.2, rel=0.03) and abs(errors.mean()) < 0.01
    assert np.linalg.matrix_rank(truth.tastes[:20] @ truth.profiles[:, :20]) == 4
    seen = (dense(part) > 0 for part in parts)
    assert (sum(matrix.astype(int) for matrix in seen) <= 1).all()


def test_generated_ratings_depend_on_the_seed_only():
    first, again, other = (
        generated_ratings(50, 40, density=0.5, seed=seed)[0] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.values, again.values)
    assert first.num_ratings != other.num_ratings


def test_every_pair_can_be_rated():
    parts = generated_ratings(20, 10, density=1, seed=0)[:3]
    assert sum(part.num_ratings for part in parts) == 200


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"noise": 0.3}, "noise must be .* got 0.3"),
        ({"density": 0}, "density must be .* got 0"),
    ],
)
def test_ratings_that_cannot_be_generated_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        generated_ratings(10, 10, **wrong)


def test_random_ratings_are_even():
    ratings = random_ratings(1000, 100, 50_000, seed=0)
    assert ratings.num_ratings + ratings.num_duplicates == 50_000
    assert (
        np.bincount(ratings.values.astype(int))[1:].min() > 0.95 * ratings.num_ratings / 5
    )
    assert ratings.num_ratings_by_user.min() > 0
