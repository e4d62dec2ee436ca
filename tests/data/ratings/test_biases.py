"""Biases of users and items: fitted, subtracted, transposed."""

from dataclasses import replace

import numpy as np
import pytest

from millrace.data.ratings.generated import random_ratings
from millrace.data.ratings.matrix import (
    ColumnBiases,
    align,
    fit_biases,
    from_events,
    transpose,
)


def full_matrix(values):
    """Return ratings of all items by all users."""
    users, items = np.indices(values.shape).reshape(2, -1)
    ids = {"user_ids": np.arange(len(values)), "item_ids": np.arange(values.shape[1])}
    return from_events(users, items, values.reshape(-1), **ids)


def test_additive_biases_are_recovered():
    random = np.random.default_rng(0)
    of_user, of_item = random.normal(0, 0.5, 400), random.normal(0, 0.5, 300)
    truth = 3.5 + of_user[:, None] + of_item
    ratings = full_matrix(truth)
    fitted = fit_biases(ratings, strength=0.01)
    residuals = fitted.subtract(ratings, ratings)
    assert np.abs(residuals.values).max() < 1e-3
    weak = fit_biases(ratings, strength=300.0)
    assert np.abs(weak.of_column).mean() < 0.7 * np.abs(fitted.of_column).mean()


def make_sparse(num_users=2000, num_items=1200, num_ratings=40_000):
    """Return ratings of which a few users and items have most, as in real data."""
    random = np.random.default_rng(3)
    users = (num_users * random.random(num_ratings) ** 3).astype(int)
    items = (num_items * random.random(num_ratings) ** 3).astype(int)
    of_user, of_item = random.normal(0, 0.5, num_users), random.normal(0, 0.6, num_items)
    noisy = 3.5 + of_user[users] + of_item[items] + random.normal(0, 0.9, num_ratings)
    ids = {"user_ids": np.arange(num_users), "item_ids": np.arange(num_items)}
    return from_events(users, items, np.clip(np.round(noisy), 1, 5), **ids)


def solve_densely(ratings, strength):
    """Return the biases of users and of items by the normal equations."""
    num_users, size = ratings.num_users, ratings.num_users + ratings.num_items
    values = np.float64(ratings.values)
    columns = np.stack([ratings.users, num_users + ratings.items], axis=1)
    equations, sums = strength * np.eye(size), np.zeros(size)
    for one, other in ((0, 0), (0, 1), (1, 0), (1, 1)):
        np.add.at(equations, (columns[:, one], columns[:, other]), 1)
    np.add.at(sums, columns, (values - values.mean())[:, None])
    solved = np.linalg.solve(equations, sums)
    return solved[:num_users], solved[num_users:]


@pytest.mark.parametrize("strength", [0.5, 5.0, 10.0])
def test_the_biases_are_the_least_squares_solution(strength):
    ratings = make_sparse()
    of_user, of_item = solve_densely(ratings, strength)
    fitted = fit_biases(ratings, strength)
    np.testing.assert_allclose(fitted.of_column, of_item, rtol=0, atol=1e-6)
    np.testing.assert_allclose(fitted.of_rows(ratings), of_user, rtol=0, atol=1e-6)
    turned = fit_biases(transpose(ratings), strength)
    np.testing.assert_allclose(turned.of_column, of_user, rtol=0, atol=1e-6)


def test_biases_without_shrinkage_explain_ratings_that_do_not_overlap():
    users, items, values = np.array([[0, 0, 2], [0, 1, 3], [1, 3, 5]])
    ids = {"user_ids": np.arange(4), "item_ids": np.arange(5)}
    ratings = from_events(users, items, values.astype(np.float32), **ids)
    fitted = fit_biases(ratings, strength=0.0)
    found = fitted.subtract(ratings, ratings)
    np.testing.assert_allclose(found.biases.lookup(users, items), values, atol=1e-5)
    assert np.isfinite(fitted.of_column).all() and np.isfinite(found.biases.of_user).all()


def test_residuals_plus_biases_are_the_ratings_and_no_residual_is_zero():
    ratings = random_ratings(40, 30, 500, seed=1)
    fitted = fit_biases(ratings)
    residuals = fitted.subtract(ratings, ratings)
    users = np.repeat(np.arange(40), ratings.num_ratings_by_user)
    restored = residuals.values + residuals.biases.lookup(users, residuals.items)
    np.testing.assert_allclose(restored, np.float32(ratings.values), atol=1e-5)
    assert residuals.values.dtype == np.float32 and residuals.biases.of_user.std() > 0
    same = full_matrix(np.full((3, 4), 2.0))
    assert (fit_biases(same).subtract(same, same).values != 0).all()


@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_normalized_residuals_have_the_same_size_on_any_scale(scale):
    plain = random_ratings(40, 30, 500, seed=1)
    ratings = replace(plain, values=scale * np.float32(plain.values))
    residuals = fit_biases(ratings, normalize=True).subtract(ratings, ratings)
    assert np.square(residuals.values).mean() ** 0.5 == pytest.approx(0.9, rel=1e-5)
    users = np.repeat(np.arange(40), ratings.num_ratings_by_user)
    restored = residuals.biases.restore(residuals.values, users, residuals.items)
    np.testing.assert_allclose(restored, ratings.values, rtol=1e-5)
    same = full_matrix(np.full((3, 4), 2.0))
    residuals = fit_biases(same, normalize=True).subtract(same, same)
    assert np.isfinite(residuals.values).all() and (residuals.values != 0).all()
    empty = full_matrix(np.zeros((0, 2)))
    assert fit_biases(empty, normalize=True).unit == 1


def test_transposed_ratings_have_transposed_biases():
    ratings = random_ratings(40, 30, 500, seed=1)
    residuals = fit_biases(ratings).subtract(ratings, ratings)
    transposed = transpose(residuals)
    assert transposed.biases is not None and residuals.biases is not None
    np.testing.assert_array_equal(transposed.biases.of_user, residuals.biases.of_item)
    np.testing.assert_array_equal(transposed.biases.of_item, residuals.biases.of_user)
    assert transpose(ratings).biases is None


def test_later_ratings_use_the_biases_of_known_ratings():
    known = full_matrix(np.array([[5.0, 5.0], [1.0, 1.0]]))
    later = full_matrix(np.array([[3.0, 3.0], [3.0, 3.0]]))
    fitted = ColumnBiases(3.0, np.zeros(2, np.float32), strength=2.0)
    np.testing.assert_allclose(fitted.of_rows(known), [1, -1])
    residuals = fitted.subtract(align(later, known)[0], known)
    np.testing.assert_allclose(residuals.values, [-1, -1, 1, 1])
    assert fitted.of_rows(full_matrix(np.zeros((0, 2)))) == pytest.approx([])
