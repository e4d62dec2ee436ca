"""Ratings as a sparse matrix: built, transposed, searched, aligned."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.data.ratings.matrix import Unseen, align, find_ids, from_events, transpose


def events(*triples, user_ids=(), item_ids=()):
    users, items, values = (np.array(column) for column in zip(*triples, strict=True))
    return from_events(
        users.astype(np.int32),
        items.astype(np.int32),
        values,
        user_ids=np.array(user_ids) if user_ids else np.arange(users.max() + 1),
        item_ids=np.array(item_ids) if item_ids else np.arange(items.max() + 1),
    )


def as_dict(ratings):
    """Return {(user id, item id): rating}."""
    values_by_pair = {}
    for user in range(ratings.num_users):
        items, values = ratings.get_user(user)
        assert (np.diff(items) > 0).all()
        for item, value in zip(items, values, strict=True):
            pair = ratings.user_ids[user].item(), ratings.item_ids[item].item()
            values_by_pair[pair] = float(value)
    return values_by_pair


def test_ratings_are_sorted_by_user_and_item():
    ratings = events((2, 1, 4.5), (0, 3, 1.0), (2, 0, 3.0))
    np.testing.assert_array_equal(ratings.starts, [0, 1, 1, 3])
    np.testing.assert_array_equal(ratings.items, [3, 0, 1])
    np.testing.assert_array_equal(ratings.values, [1, 3, 4.5])
    np.testing.assert_array_equal(ratings.num_ratings_by_user, [1, 0, 2])
    assert (ratings.num_users, ratings.num_items, ratings.num_ratings) == (3, 4, 3)
    assert (ratings.smallest, ratings.largest) == (1.0, 4.5)
    types = ratings.starts.dtype, ratings.items.dtype, ratings.values.dtype
    assert types == (np.int64, np.int32, np.float16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ratings.smallest = 0.0  # pyright: ignore


pairs = st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(1, 10))


@given(st.lists(pairs, min_size=1, max_size=60))
def test_of_duplicate_ratings_the_later_one_counts(triples):
    ratings = events(*triples)
    expected = {(user, item): float(value) for user, item, value in triples}
    assert as_dict(ratings) == expected
    assert ratings.num_duplicates == len(triples) - len(expected)


@given(st.lists(pairs, min_size=1, max_size=60))
def test_transposed_ratings_are_the_same_ratings_by_item(triples):
    ratings = events(*triples)
    by_item = transpose(ratings)
    assert as_dict(by_item) == {(i, u): value for (u, i), value in as_dict(ratings).items()}
    for name in ("starts", "items", "values"):
        assert getattr(by_item, name).dtype == getattr(ratings, name).dtype
    again = transpose(by_item)
    for name in ("starts", "items", "values", "user_ids", "item_ids"):
        np.testing.assert_array_equal(getattr(again, name), getattr(ratings, name))


def test_more_items_than_fit_into_16_bits_are_transposed():
    items = [70_000, 3, 65_539, 131_075, 3]  # equal in their lower or upper halves
    ratings = events(*((user, item, 1 + user) for user, item in enumerate(items)))
    by_item = transpose(ratings)
    assert by_item.num_users == 131_076 and by_item.num_items == 5
    assert [by_item.get_user(item)[0].tolist() for item in items] == [
        [0], [1, 4], [2], [3], [1, 4]
    ]  # fmt: skip


def test_values_are_stored_exactly():
    assert events((0, 0, 3.5)).values.dtype == np.float16
    fine = events((0, 0, 3.7), (0, 1, 0.5))
    assert fine.values.dtype == np.float32 and fine.values[0] == np.float32(3.7)
    assert events((0, 0, 70_000.0)).largest == 70_000


def test_find_ids_returns_the_index_or_minus_one():
    np.testing.assert_array_equal(
        find_ids(np.array([2, 5, 9]), np.array([9, 3, 2])), [2, -1, 0]
    )
    names = np.array(["10", "9", "a"])
    np.testing.assert_array_equal(find_ids(names, np.array([9, 10, 11])), [1, 0, -1])
    np.testing.assert_array_equal(
        find_ids(np.array([9, 10]), np.array(["10", "x"])), [1, -1]
    )
    np.testing.assert_array_equal(find_ids(np.array([], np.int64), np.array([1])), [-1])


def test_aligning_drops_and_counts_what_is_not_in_training():
    training = events((0, 0, 4), (1, 1, 3), user_ids=[10, 20], item_ids=[7, 8])
    later = events(
        *((0, 0, 5), (0, 1, 1), (1, 1, 2), (1, 2, 3), (2, 0, 4)),
        user_ids=[10, 20, 30],
        item_ids=[7, 8, 9],
    )
    aligned, unseen = align(later, training)
    assert as_dict(aligned) == {(10, 7): 5, (10, 8): 1, (20, 8): 2}
    assert (aligned.num_users, aligned.num_items) == (2, 2)
    assert unseen == Unseen(num_users=1, num_items=1, num_ratings=2)


def test_aligning_numbers_with_texts_compares_them_as_text():
    training = events((0, 0, 4), (1, 0, 3), user_ids=["10", "9"], item_ids=["a"])
    later = events((0, 0, 1), (1, 0, 2), user_ids=[9, 10], item_ids=["a"])
    aligned, unseen = align(later, training)
    assert as_dict(aligned) == {("9", "a"): 1, ("10", "a"): 2}
    assert unseen == Unseen(0, 0, 0)
