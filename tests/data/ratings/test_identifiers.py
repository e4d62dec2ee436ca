"""Identifiers are numbered as ``np.unique`` would, whatever their hashes are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.data.ratings import identifiers
from millrace.data.ratings.identifiers import CodedIds, encode, merge

texts = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
columns = st.one_of(
    st.lists(st.integers(-(10**18), 10**18), min_size=1),
    st.lists(st.integers(0, 20), min_size=1),
    st.lists(texts.map(str.encode), min_size=1),
)


def assert_coded(found: CodedIds, ids: np.ndarray) -> None:
    """Assert that the codes are those of NumPy."""
    distinct, codes = np.unique(ids, return_inverse=True)
    np.testing.assert_array_equal(found.ids, distinct)
    np.testing.assert_array_equal(found.codes, codes)
    assert found.codes.dtype == np.int32


@given(columns, st.integers(1, 5), st.sampled_from([None, (0,), (0, 1), (1, 3)]))
def test_chunks_are_numbered_in_the_order_of_numpy(column, num_chunks, multipliers):
    ids = np.array(column)
    expected = ids if ids.dtype.kind != "S" else np.char.decode(ids, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        if multipliers:  # with 0, all hashes are the same
            patch.setattr(identifiers, "_MULTIPLIERS", multipliers)
        chunks = [encode(part) for part in np.array_split(ids, num_chunks)]
        for chunk, part in zip(chunks, np.array_split(ids, num_chunks), strict=True):
            np.testing.assert_array_equal(chunk.ids[chunk.codes], part)
        assert_coded(merge(chunks), expected)


def test_many_texts_with_equal_starts_and_ends_are_told_apart():
    numbers = np.random.default_rng(0).integers(0, 5000, 20_000)
    ids = np.array([f"a-long-start-{n}-a-long-end".encode() for n in numbers])
    assert_coded(merge([encode(ids[:9000]), encode(ids[9000:])]), ids.astype(str))


def test_hashing_needs_few_rounds(monkeypatch):
    """Collisions of one round in a hundred rows would make text slow."""
    ids = np.array([f"user{n}".encode() for n in range(50_000)])
    rounds = []
    find = identifiers._find_standing
    monkeypatch.setattr(
        identifiers,
        "_find_standing",
        lambda words, multiplier: rounds.append(len(words)) or find(words, multiplier),
    )
    encode(np.tile(ids, 2))
    assert rounds[0] == 100_000 and sum(rounds[1:]) < 30_000
