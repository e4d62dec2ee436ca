"""Random batches of sample indices, computed on the devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.feeds.device import DeviceDataset


class ShuffledIndices(DeviceDataset):
    """Batches of indices, ``{"index": (samples,)}``, in a new order every epoch.

    The order depends only on the seed and the epoch, so a resumed run continues with the
    batches of the interrupted one. An epoch drops the samples that do not fill a batch,
    different ones each time.
    """

    def __init__(self, num_samples: int, batch_size: int, *, seed: int) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._per_epoch = num_samples // batch_size
        self._seed = seed
        assert self._per_epoch, "checked by schedule_events"
        self._compiled: dict[Any, Any] = {}

    def peek(self) -> Any:
        """Return a batch of zeros."""
        return {"index": np.zeros(self._batch_size, np.int32)}

    def make(self, position: int, count: int, sharding: Any) -> Any:
        """Return `count` batches from `position` on."""
        if sharding not in self._compiled:
            self._compiled[sharding] = jax.jit(
                self._batches, static_argnums=1, out_shardings=sharding
            )
        return self._compiled[sharding](jnp.int32(position), count)

    def _batches(self, position: jax.Array, count: int) -> dict[str, jax.Array]:
        epoch, first = jnp.divmod(position, self._per_epoch)
        # One epoch more than `count` batches fill: they may start in the middle of one.
        num_epochs = -(-count // self._per_epoch) + 1
        orders = jax.lax.map(self._shuffle, epoch + jnp.arange(num_epochs))
        batches = orders.reshape(num_epochs * self._per_epoch, self._batch_size)
        return {"index": jax.lax.dynamic_slice_in_dim(batches, first, count)}

    def _shuffle(self, epoch: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(self._seed), epoch)
        order = jax.random.permutation(key, self._num_samples).astype(jnp.int32)
        used = order[: self._per_epoch * self._batch_size]
        return used.reshape(self._per_epoch, self._batch_size)
