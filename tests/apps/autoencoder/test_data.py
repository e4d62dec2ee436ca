"""Batches are the same whether sent from the host or gathered on the device."""

import jax
import numpy as np
import pytest

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.data import open_evaluation_source, open_infeed
from millrace.apps.autoencoder.loss import to_dense_rows
from millrace.apps.autoencoder.program import plan_steps
from millrace.apps.autoencoder.resident import ResidentRatings
from millrace.config import build
from millrace.data.ratings.generated import random_ratings
from millrace.program.replicas import batch_sharding, replica_mesh

USERS, ITEMS = 50, 20


@pytest.fixture(scope="module")
def ratings():
    return random_ratings(USERS, ITEMS, 300, seed=1)


def build_infeed(ratings, **options):
    settings = {"data": "random", "batch_size": 6, "epochs": 3, "batches_per_step": 4}
    config = build(AutoencoderConfig, settings | options)
    num_users = int((ratings.num_ratings_by_user > 0).sum())
    return open_infeed(ratings, config, plan_steps(config, num_users), jax.devices()[0])


def read_chunks(infeed, count, capacities=(4, 3)):
    sharding = batch_sharding(replica_mesh(1))
    with infeed:
        for _ in range(count):
            chunk = infeed.chunk(capacities, sharding, only_full=True)
            yield jax.device_get(chunk.data)
            infeed.took(chunk.stop)


@pytest.mark.parametrize("refed", [False, True])
def test_ratings_on_the_device_give_the_batches_of_the_host(ratings, refed):
    fed = build_infeed(ratings, detached_refeeding=refed, data_on_device=False)
    resident = build_infeed(ratings, detached_refeeding=refed, data_on_device=True)
    assert isinstance(resident.dataset, ResidentRatings)
    assert not isinstance(fed.dataset, ResidentRatings)
    element, other = fed.peek(), resident.peek()
    assert {n: (a.shape, a.dtype) for n, a in element.items()} == {
        n: (a.shape, a.dtype) for n, a in other.items()
    }
    for here, there in zip(read_chunks(fed, 5), read_chunks(resident, 5), strict=True):
        assert here.keys() == there.keys()
        is_real = here["row"] < 6
        np.testing.assert_array_equal(here["row"], there["row"])
        for name in ("item", "value"):
            np.testing.assert_array_equal(here[name][is_real], there[name][is_real])
        for name in here.keys() - {"item", "value", "row", "user"}:
            np.testing.assert_array_equal(here[name], there[name])
        if not refed:
            np.testing.assert_array_equal(here["user"], there["user"])


def test_both_continue_at_the_position_sought(ratings):
    for options in ({}, {"data_on_device": True}):
        whole = list(read_chunks(build_infeed(ratings, **options), 3, (4,)))
        infeed = build_infeed(ratings, **options)
        infeed.seek(8)
        (rest,) = read_chunks(infeed, 1, (4,))
        np.testing.assert_array_equal(rest["value"], whole[2]["value"])


@pytest.mark.parametrize("on_device", [False, True])
def test_chunk_sizes_start_over_after_a_seek(ratings, on_device):
    infeed = build_infeed(ratings, data_on_device=on_device)
    for position in (0, 5):
        infeed.seek(position)
        sizes = [len(chunk["row"]) for chunk in read_chunks(infeed, 3)]
        assert sizes == [4, 3, 4]


def test_an_epoch_has_every_rating_of_its_users_once(ratings):
    infeed = build_infeed(ratings)
    per_epoch = int((ratings.num_ratings_by_user > 0).sum()) // 6
    batches = {}
    for chunk in read_chunks(infeed, per_epoch, (1,)):
        batch = {name: array[0] for name, array in chunk.items()}
        rows = np.asarray(to_dense_rows(batch, ITEMS))
        batches |= dict(zip(batch["user"].tolist(), rows, strict=True))
    assert len(batches) == 6 * per_epoch
    for user, row in batches.items():
        items, values = ratings.get_user(user)
        expected = np.zeros(ITEMS)
        expected[items] = values
        np.testing.assert_array_equal(row, expected)


def test_a_short_last_batch_is_not_whole(ratings):
    source = open_evaluation_source(ratings, ratings, 7)
    assert source[np.arange(7)]["is_whole"].all()
    assert not source[np.array([0, 1, 2, 3, 4, 5, 5])]["is_whole"].any()
