"""Batches that are made on the devices once and used over and over: nothing crosses."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from millrace.feeds.infeed import Infeed
from millrace.feeds.stager import Chunk


class ResidentInfeed(Infeed):
    """An infeed whose elements lie on the devices from the start, for measurements.

    A loop finds the same chunk of elements each time, in the layout in which staged ones
    come, so that it does all its work except waiting for the host.

    Args:
        generate: ``(count) -> elements``, run on the devices: leaves are (count, ...).
    """

    def __init__(self, generate: Callable[[int], Any]) -> None:
        super().__init__(())
        self._generate = generate
        self._chunks: dict[Any, Any] = {}
        self._position = 0
        self._served = 0

    def peek(self) -> Any:
        """Return zeros in the shape of an element; they take no memory."""
        spec = jax.eval_shape(lambda: self._generate(1))
        return jax.tree.map(
            lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape[1:]), spec
        )

    def seek(self, position: int) -> None:
        """Note the position; every element is like every other."""
        if position < 0:
            raise ValueError(f"position must not be negative, got {position}.")
        self._position = position

    def chunk(
        self,
        capacity: int | tuple[int, ...] | None = None,
        sharding: Any = None,
        *,
        only_full: bool = False,
    ) -> Chunk:
        """Return a full chunk of the next capacity; it is made when first asked for."""
        del only_full  # all are
        pattern = (capacity or 1,) if not isinstance(capacity, tuple) else capacity
        if self._chunk is None or self._chunk.start == self._chunk.stop:
            size = pattern[self._served % len(pattern)]
            self._served += 1
            self._chunk = Chunk(self._elements(size, sharding), 0, size)
        return self._chunk

    def _elements(self, size: int, sharding: Any) -> Any:
        key = size, sharding
        if key not in self._chunks:
            generate = jax.jit(lambda: self._generate(size), out_shardings=sharding)
            self._chunks[key] = jax.block_until_ready(generate())
        return self._chunks[key]

    def close(self) -> None:
        """Let the chunks go; they are made again if needed."""
        self._chunk = None
        self._served = 0
        self._chunks.clear()
