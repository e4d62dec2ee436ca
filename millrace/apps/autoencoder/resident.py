"""Batches gathered on the device from all ratings, which stay there in sparse form.

The host sends only the row numbers of a batch. A batch of 1,024 Netflix users has two
megabytes of ratings, more than a host can gather while an H200 trains on it.
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
    """The same batches as a stream, built on the device that uses them.

    Args:
        ratings: All ratings.
        users: The samples of the stream, as row numbers in `ratings`.
        stream: The stream of batches; it determines their order and shape.
        refed: Whether an empty batch follows every batch, as in `RefedStream`.
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
        """Return a batch with the shapes of those to come."""
        return self._element

    def close(self) -> None:
        """Free the ratings; a later batch puts them on the device again."""
        self._gathers.clear()

    def make(self, position: int, count: int, sharding: NamedSharding) -> Any:
        """Return the batches from `position` on; the device may still compute them."""
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        if sharding not in self._gathers:
            tables = jax.device_put(_build_tables(self._ratings), replicated)
            capacity = self._element["item"].size
            gather = jax.jit(
                functools.partial(gather_batches, capacity=capacity),
                out_shardings=sharding,
            )
            self._gathers[sharding] = functools.partial(gather, tables)
        numbers = range(position, position + count)
        per_batch = 1 + self._refed
        users = np.stack([self._stream.indices(number // per_batch) for number in numbers])
        is_refed = np.array([number % per_batch for number in numbers], bool)
        users, is_refed = jax.device_put((self._users[users], is_refed), replicated)
        batches = self._gathers[sharding](users, is_refed)
        if not self._refed:
            del batches["refed"]
        return batches


def _build_tables(ratings: Ratings) -> dict[str, np.ndarray]:
    """Return the ratings in as few bytes as they need."""
    assert can_be_indexed(ratings)
    item_dtype = np.uint16 if ratings.num_items <= 1 << 16 else np.int32
    return {
        "starts": ratings.starts.astype(np.int32),
        "items": np.asarray(ratings.items).astype(item_dtype),
        "values": np.asarray(ratings.values),
    }


def count_table_bytes(ratings: Ratings) -> int:
    """Return an upper bound on the bytes that the ratings need on the device."""
    return 4 * len(ratings.starts) + (4 + ratings.values.itemsize) * ratings.num_ratings


def can_be_indexed(ratings: Ratings) -> bool:
    """Whether int32, the index type on the device, can address every rating."""
    return ratings.num_ratings < 2**31


def gather_batches(
    tables: dict[str, jax.Array],
    users: jax.Array,  # int32 (batches, users)
    is_refed: jax.Array,  # bool (batches,), which batches to leave empty
    *,
    capacity: int,  # ratings per batch, padding included
) -> dict[str, jax.Array]:
    """Build a flat list of ratings per batch, as `RatingsSource` does on the host."""
    batch_size = users.shape[1]
    starts = tables["starts"][users]
    counts = tables["starts"][users + 1] - starts
    ends = jnp.cumsum(counts, axis=1)
    slots = jnp.arange(capacity)
    # Slots after the last rating get the row batch_size, one past the end: padding.
    row = jax.vmap(lambda ends: jnp.searchsorted(ends, slots, side="right"))(ends)
    row = jnp.where(is_refed[:, None], batch_size, row).astype(jnp.int32)
    offset = jnp.take_along_axis(starts - (ends - counts), row, axis=1, mode="clip")
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
