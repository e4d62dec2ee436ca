import numpy as np
import pytest

from millrace.data.ratings.biases import ColumnBiases, fit_biases
from millrace.data.ratings.generated import random_ratings
from millrace.data.ratings.matrix import align, from_events, transposed


def rated(values):
    """All users' ratings of all items."""
    users, items = np.indices(values.shape).reshape(2, -1)
    ids = {"user_ids": np.arange(len(values)), "item_ids": np.arange(values.shape[1])}
    return from_events(users, items, values.reshape(-1), **ids)


def test_what_is_due_to_users_and_items_alone_is_found():
    random = np.random.default_rng(0)
    of_user, of_item = random.normal(0, 0.5, 400), random.normal(0, 0.5, 300)
    truth = 3.5 + of_user[:, None] + of_item
    ratings = rated(truth)
    fitted = fit_biases(ratings, strength=0.01)
    left = fitted.subtracted(ratings, ratings)
    assert np.abs(left.values).max() < 1e-3
    weak = fit_biases(ratings, strength=300.0)
    assert np.abs(weak.of_column).mean() < 0.7 * np.abs(fitted.of_column).mean()


def test_they_are_those_that_least_squares_finds():
    ratings = random_ratings(40, 30, 500, seed=1)
    fitted = fit_biases(ratings, strength=5.0)
    users = np.repeat(np.arange(40), ratings.num_ratings_by_user)
    values, count = np.float64(ratings.values), ratings.num_ratings
    design = np.zeros((count + 70, 70))
    design[np.arange(count), users] = design[np.arange(count), 40 + ratings.items] = 1
    design[count:] = np.sqrt(5.0) * np.eye(70)
    wanted = np.append(values - values.mean(), np.zeros(70))
    solved = np.linalg.lstsq(design, wanted, rcond=None)[0]
    np.testing.assert_allclose(fitted.of_column, solved[40:], atol=2e-3)
    np.testing.assert_allclose(fitted.of_rows(ratings), solved[:40], atol=2e-3)


def test_ratings_come_back_and_none_of_what_is_left_counts_as_missing():
    ratings = random_ratings(40, 30, 500, seed=1)
    fitted = fit_biases(ratings)
    left = fitted.subtracted(ratings, ratings)
    users = np.repeat(np.arange(40), ratings.num_ratings_by_user)
    again = left.values + left.biases.of(users, left.items)
    np.testing.assert_allclose(again, np.float32(ratings.values), atol=1e-5)
    assert left.values.dtype == np.float32 and left.biases.of_user.std() > 0
    same = rated(np.full((3, 4), 2.0))
    assert (fit_biases(same).subtracted(same, same).values != 0).all()


def test_turned_ratings_have_the_biases_turned():
    ratings = random_ratings(40, 30, 500, seed=1)
    left = fit_biases(ratings).subtracted(ratings, ratings)
    turned = transposed(left)
    assert turned.biases is not None and left.biases is not None
    np.testing.assert_array_equal(turned.biases.of_user, left.biases.of_item)
    np.testing.assert_array_equal(turned.biases.of_item, left.biases.of_user)
    assert transposed(ratings).biases is None


def test_later_ratings_lose_the_bias_that_the_user_had_before():
    known = rated(np.array([[5.0, 5.0], [1.0, 1.0]]))
    later = rated(np.array([[3.0, 3.0], [3.0, 3.0]]))
    fitted = ColumnBiases(3.0, np.zeros(2, np.float32), strength=2.0)
    np.testing.assert_allclose(fitted.of_rows(known), [1, -1])
    left = fitted.subtracted(align(later, known)[0], known)
    np.testing.assert_allclose(left.values, [-1, -1, 1, 1])
    assert fitted.of_rows(rated(np.zeros((0, 2)))) == pytest.approx([])
