"""Metrics match NumPy on a dataset that does not divide into full batches."""

import jax
import numpy as np
import pytest

from millrace.apps.autoencoder.data import open_evaluation_source
from millrace.apps.autoencoder.evaluate import Validator
from millrace.apps.autoencoder.metrics import build_metrics
from millrace.apps.autoencoder.model import Model, init_params, reconstruct
from millrace.data.ratings.generated import random_ratings
from millrace.plan import Plan

USERS, ITEMS, BATCH = 53, 40, 8


def dense(ratings):
    rows = np.zeros((USERS, ITEMS))
    users = np.repeat(np.arange(USERS), ratings.num_ratings_by_user)
    rows[users, ratings.items] = ratings.values
    return rows


@pytest.fixture(scope="module")
def found_and_data():
    shown = random_ratings(USERS, ITEMS, 500, seed=0)
    targets = random_ratings(USERS, ITEMS, 150, seed=1)
    model = Model(ITEMS, 128, 0.65)
    params = init_params(model, jax.random.key(0))
    source = open_evaluation_source(shown, targets, BATCH)
    metric_fn = build_metrics(model)
    validator = Validator(metric_fn, Plan(), source, BATCH, jax.devices()[0])
    rows, wanted = dense(shown), dense(targets)
    users = np.flatnonzero((wanted != 0).any(1))
    output = np.asarray(reconstruct(model, params, np.float32(rows)), np.float64)
    assert len(users) % BATCH, "the last batch should be short"
    return validator.score(params), rows[users], wanted[users], output[users]


def test_errors_pool_all_ratings(found_and_data):
    found, _, wanted, output = found_and_data
    error = (output - wanted)[wanted != 0]
    assert found["rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert found["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-5)


def test_the_rmse_of_the_reference_is_the_mean_over_full_batches(found_and_data):
    found, _, wanted, output = found_and_data
    whole = len(wanted) // BATCH
    squares = np.where(wanted != 0, (output - wanted) ** 2, 0)[: whole * BATCH]
    known = (wanted != 0)[: whole * BATCH].reshape(whole, -1)
    means = squares.reshape(whole, -1).sum(1) / known.sum(1)
    assert found["mean_batch_rmse"] == pytest.approx(np.sqrt(means).mean(), rel=1e-5)
    assert found["mean_batch_rmse"] != pytest.approx(found["rmse"], rel=1e-4)
