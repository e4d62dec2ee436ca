"""Synthetic ratings have the structure, noise and density they promise."""

import numpy as np
import pytest

from millrace.data.ratings.generated import generate_ratings, random_ratings


def test_generated_ratings_are_the_truth_plus_noise():
    *parts, truth = generate_ratings(500, 200, rank=4, noise=0.2, density=0.25, seed=5)
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
    pairs = [(u, i) for p in parts for u, i in zip(p.users, p.items, strict=True)]
    assert len(set(pairs)) == len(pairs)


def test_generated_ratings_depend_only_on_the_seed():
    first, again, other = (
        generate_ratings(50, 40, density=0.5, seed=seed)[0] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.values, again.values)
    assert first.num_ratings != other.num_ratings


def test_every_pair_can_be_rated():
    parts = generate_ratings(20, 10, density=1, seed=0)[:3]
    assert sum(part.num_ratings for part in parts) == 200


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"noise": 0.3}, "noise must be .* got 0.3"),
        ({"density": 0}, "density must be .* got 0"),
    ],
)
def test_impossible_parameters_are_rejected(wrong, message):
    with pytest.raises(ValueError, match=message):
        generate_ratings(10, 10, **wrong)


def test_random_ratings_are_uniform():
    ratings = random_ratings(1000, 100, 50_000, seed=0)
    assert ratings.num_ratings + ratings.num_duplicates == 50_000
    assert (
        np.bincount(ratings.values.astype(int))[1:].min() > 0.95 * ratings.num_ratings / 5
    )
    assert ratings.num_ratings_by_user.min() > 0
