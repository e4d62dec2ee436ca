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


def test_the_biases_are_the_least_squares_solution():
    ratings = random_ratings(40, 30, 500, seed=1)
    fitted = fit_biases(ratings, strength=5.0)
    users = np.repeat(np.arange(40), ratings.num_ratings_by_user)
    values, count = np.float64(ratings.values), ratings.num_ratings
    design = np.zeros((count + 70, 70))
    design[np.arange(count), users] = design[np.arange(count), 40 + ratings.items] = 1
    design[count:] = np.sqrt(5.0) * np.eye(70)
    target = np.append(values - values.mean(), np.zeros(70))
    solved = np.linalg.lstsq(design, target, rcond=None)[0]
    np.testing.assert_allclose(fitted.of_column, solved[40:], atol=2e-3)
    np.testing.assert_allclose(fitted.of_rows(ratings), solved[:40], atol=2e-3)


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
