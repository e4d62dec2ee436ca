"""Which samples make up each batch, worked out on the devices: only a number crosses."""

from typing import Any

import jax
import jax.numpy as jnp

from millrace.feeds.resident import ResidentInfeed
from millrace.feeds.stager import Chunk


class ShuffledIndices(ResidentInfeed):
    """An infeed of indices, ``{"index": (samples,)}``, in a new order in every epoch.

    The order depends on the seed and the epoch alone, so that a resumed run goes on with
    the very batches it would have had.

    Args:
        num_samples: How many there are; an epoch leaves over what makes no whole batch,
            other samples each time.
        batch_size: Indices per element.
        seed: Of the order.
    """

    def __init__(self, num_samples: int, batch_size: int, *, seed: int) -> None:
        per_epoch = num_samples // batch_size
        assert per_epoch, "the schedule refuses less than one batch"

        def order(epoch: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), epoch)
            drawn = jax.random.permutation(key, num_samples)
            return drawn[: per_epoch * batch_size].reshape(per_epoch, batch_size)

        def elements(position: jax.Array, count: int) -> dict[str, jax.Array]:
            epoch, first = jnp.divmod(position, per_epoch)
            # One more than fills the count: it may begin within an epoch.
            epochs = -(-count // per_epoch) + 1
            orders = jax.lax.map(order, epoch + jnp.arange(epochs))
            batches = orders.reshape(epochs * per_epoch, batch_size)
            return {"index": jax.lax.dynamic_slice_in_dim(batches, first, count)}

        super().__init__(lambda count: elements(jnp.int32(0), count))
        self._elements_at = elements
        self._makers: dict[Any, Any] = {}

    def _elements(self, size: int, sharding: Any) -> Any:
        key = size, sharding
        if key not in self._makers:
            self._makers[key] = jax.jit(
                self._elements_at, static_argnums=1, out_shardings=sharding
            )
        return self._makers[key](jnp.int32(self.position), size)

    def seek(self, position: int) -> None:
        """Go to an element."""
        super().seek(position)
        self._chunk: Chunk | None = None
