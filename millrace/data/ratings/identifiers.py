"""Identifiers of users and items, replaced by codes: each distinct one is stored once.

Integers in a narrow range are numbered with a table. All others, text included, are seen
as words of 64 bits and numbered with a hash table that NumPy fills for all of them at
once, so text costs about as much as integers. Equal hashes are resolved by comparing the
words themselves.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MAX_SPARSENESS = 8
"""A table is faster than hashing up to this many possible identifiers per actual one."""
_WORD_BYTES = 8
_MULTIPLIERS = (
    *(0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53),
)
"""Odd constants that mix bits well, as in splitmix64, xxHash and MurmurHash: one per
round. Identifiers that still collide after the last are sorted."""


class CodedIds(NamedTuple):
    """Identifiers, with each distinct one stored once."""

    ids: np.ndarray
    """The distinct identifiers; sorted once the chunks of a file are merged."""
    codes: np.ndarray
    """int32, indices into `ids`."""


def encode(ids: np.ndarray) -> CodedIds:
    """Number identifiers: int64, bytes or text. The distinct ones are in any order."""
    if len(ids) == 0:
        return CodedIds(ids, np.zeros(0, np.int32))
    if ids.dtype.kind in "SU" or np.ptp(ids) > _MAX_SPARSENESS * len(ids):
        firsts, codes = _hash_words(_as_words(ids))
        return CodedIds(ids[firsts], codes)
    first = ids.min()
    is_present = np.zeros(np.ptp(ids) + 1, bool)
    is_present[ids - first] = True
    codes = np.cumsum(is_present, dtype=np.int32) - np.int32(1)
    return CodedIds(np.flatnonzero(is_present) + first, codes[ids - first])


def merge(chunks: Sequence[CodedIds]) -> CodedIds:
    """Number the identifiers of all chunks in ascending order; bytes become text."""
    found = encode(np.concatenate([chunk.ids for chunk in chunks]))
    order = np.argsort(found.ids)
    ranks = np.empty(len(order), np.int32)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    renumbered = ranks[found.codes]
    ends = np.cumsum([len(chunk.ids) for chunk in chunks])
    codes = [
        renumbered[end - len(chunk.ids) : end][chunk.codes]
        for chunk, end in zip(chunks, ends, strict=True)
    ]
    ids = found.ids[order]
    return CodedIds(_decode(ids) if ids.dtype.kind == "S" else ids, np.concatenate(codes))


def _as_words(ids: np.ndarray) -> np.ndarray:
    """Return a row of 64-bit words for each identifier; text is padded with zeros."""
    if ids.dtype.kind in "SU":
        num_bytes = -(-ids.dtype.itemsize // _WORD_BYTES) * _WORD_BYTES
        width = num_bytes if ids.dtype.kind == "S" else num_bytes // 4
        ids = ids.astype(f"{ids.dtype.kind}{max(2, width)}", copy=False)
    return np.ascontiguousarray(ids).view(np.uint64).reshape(len(ids), -1)


def _hash_words(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of one row of each kind, and the number of the kind of each row.

    All rows write their index into the slot of their hash. The one that is left there
    stands for every row that equals it. Rows that do not equal the one in their slot have
    collided, and go on to the next round with another hash.
    """
    codes = np.empty(len(words), np.int32)
    firsts: list[np.ndarray] = []
    num_found, pending = 0, np.arange(len(words), dtype=np.int32)
    for multiplier in _MULTIPLIERS:
        standing, is_equal = _find_standing(words, multiplier)
        is_first = standing == np.arange(len(standing), dtype=np.int32)
        numbers = np.cumsum(is_first, dtype=np.int32) + np.int32(num_found - 1)
        firsts.append(pending[is_first])
        num_found += len(firsts[-1])
        codes[pending] = numbers[standing]  # those of collisions are replaced below
        collided = np.flatnonzero(~is_equal)
        pending, words = pending[collided], np.take(words, collided, axis=0)
        if not len(pending):
            return np.concatenate(firsts), codes
    _, chosen, kinds = np.unique(words, axis=0, return_index=True, return_inverse=True)
    codes[pending] = kinds.reshape(-1) + num_found
    return np.concatenate([*firsts, pending[chosen]]), codes


def _find_standing(words: np.ndarray, multiplier: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row in the slot of each row, and whether the two are equal."""
    num_bits = max(4, len(words).bit_length() + 1)
    hashes = np.zeros(len(words), np.uint64)
    for column in words.T:
        hashes ^= column
        hashes *= np.uint64(multiplier)
        hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(multiplier)
    slots = (hashes >> np.uint64(64 - num_bits)).astype(np.intp)
    table = np.empty(1 << num_bits, np.int32)  # only slots that were written are read
    table[slots] = np.arange(len(words), dtype=np.int32)
    standing = table[slots]
    difference = np.take(
        words, standing, axis=0
    )  # several times as fast as words[standing]
    difference ^= words
    is_equal = difference[:, 0] == 0
    for column in difference.T[1:]:
        is_equal &= column == 0
    return standing, is_equal


def _decode(ids: np.ndarray) -> np.ndarray:
    """Return UTF-8 as text. ASCII only needs to be widened."""
    width = int(np.char.str_len(ids).max(initial=1))
    ids = ids.astype(f"S{width}")
    characters = ids.view(np.uint8)
    if characters.max(initial=0) < 128:
        return characters.astype(np.uint32).view(f"U{width}")
    return np.char.decode(ids, "utf-8")
