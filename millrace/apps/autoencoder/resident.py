"""Batches gathered on the device from all ratings, which lie there, sparse.

The host only says which users come: a batch of 1,024 users of Netflix has two megabytes
of ratings, more than a host gathers while an H200 trains on it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from millrace.data.ratings.matrix import Ratings
from millrace.data.stream import Stream
from millrace.feeds.device import DeviceDataset


class ResidentRatings(DeviceDataset):
    """The batches of a stream, element for element, made where they are used.

    Args:
        ratings: All of them.
        users: The stream's samples, as places in `ratings`.
        stream: Of batches by user; it gives their order and their shape.
        refed: Whether every batch is followed by one without ratings, as `Refed` does.
    """

    def __init__(
        self, ratings: Ratings, users: np.ndarray, stream: Stream, *, refed: bool
    ) -> None:
        self._ratings = ratings
        self._users = users.astype(np.int32)
        self._stream = stream
        self._refed = refed
        self._element = stream.batch(0)
        if refed:
            self._element["refed"] = np.zeros(stream.batch_size, bool)
        self._gathers: dict[Any, Any] = {}

    def peek(self) -> Any:
        """Return a batch like those to come."""
        return self._element

    def close(self) -> None:
        """Free the ratings; they are placed again if needed."""
        self._gathers.clear()

    def make(self, position: int, count: int, sharding: NamedSharding) -> Any:
        """Return the batches from `position` on, which may still be computed."""
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())
        if sharding not in self._gathers:
            tables = jax.device_put(_tables(self._ratings), everywhere)
            capacity = self._element["item"].size
            gather = jax.jit(
                functools.partial(gather_batches, capacity=capacity),
                out_shardings=sharding,
            )
            self._gathers[sharding] = functools.partial(gather, tables)
        numbers = range(position, position + count)
        each = 1 + self._refed
        users = np.stack([self._stream.indices(number // each) for number in numbers])
        is_refed = np.array([number % each for number in numbers], bool)
        users, is_refed = jax.device_put((self._users[users], is_refed), everywhere)
        batches = self._gathers[sharding](users, is_refed)
        return (
            batches if self._refed else {n: a for n, a in batches.items() if n != "refed"}
        )


def _tables(ratings: Ratings) -> dict[str, np.ndarray]:
    """Return the ratings in as few bytes as they need."""
    assert fits(ratings)
    narrow = np.uint16 if ratings.num_items <= 1 << 16 else np.int32
    return {
        "starts": ratings.starts.astype(np.int32),
        "items": np.asarray(ratings.items).astype(narrow),
        "values": np.asarray(ratings.values),
    }


def table_bytes(ratings: Ratings) -> int:
    """Count the bytes that the ratings need at most on the device."""
    return 4 * len(ratings.starts) + (4 + ratings.values.itemsize) * ratings.num_ratings


def fits(ratings: Ratings) -> bool:
    """Tell whether the places of ratings can be counted on the device."""
    return ratings.num_ratings < 2**31


def gather_batches(
    tables: dict[str, jax.Array], users: jax.Array, is_refed: jax.Array, *, capacity: int
) -> dict[str, jax.Array]:
    """Lay the ratings of each batch's users one after the other, as `RatingsSource` does.

    Args:
        tables: starts, items and values of all ratings.
        users: int32 (batches, users in each).
        is_refed: (batches,): which of them are to have no ratings.
        capacity: Ratings in a batch.
    """
    batch_size = users.shape[1]
    firsts = tables["starts"][users]
    counts = tables["starts"][users + 1] - firsts
    ends = jnp.cumsum(counts, axis=1)
    slots = jnp.arange(capacity)
    row = jax.vmap(lambda ends: jnp.searchsorted(ends, slots, side="right"))(ends)
    row = jnp.where(is_refed[:, None], batch_size, row).astype(jnp.int32)
    # Where a batch has no more ratings the row is past the end already.
    offset = jnp.take_along_axis(firsts - (ends - counts), row, axis=1, mode="clip")
    is_real = row < batch_size
    place = jnp.where(is_real, offset + slots, 0)
    batches = {
        "item": jnp.where(is_real, tables["items"][place].astype(jnp.int32), 0),
        "row": row,
        "value": jnp.where(is_real, tables["values"][place].astype(jnp.float32), 0),
    }
    by_user = {n: a.reshape(*users.shape, -1) for n, a in batches.items()}
    refed = jnp.broadcast_to(is_refed[:, None], users.shape)
    return by_user | {"user": users, "refed": refed}
