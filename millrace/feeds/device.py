"""Datasets whose elements are made on the devices: nothing is read or copied."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class DeviceDataset(abc.ABC):
    """An endless dataset that makes its elements on the devices; ``Infeed`` takes it."""

    @abc.abstractmethod
    def peek(self) -> Any:
        """Return an element, or arrays on the host that look like one."""

    @abc.abstractmethod
    def make(self, position: int, count: int, sharding: Any) -> Any:
        """Return `count` elements from `position` on: leaves are (count, ...)."""

    def close(self) -> None:
        """Free device memory; ``make`` allocates it again if needed."""
        return


class ResidentDataset(DeviceDataset):
    """The same elements over and over, to measure a loop that never waits for the host.

    Args:
        generate: ``(count) -> elements``, run on the devices: leaves are (count, ...).
    """

    def __init__(self, generate: Callable[[int], Any]) -> None:
        self._generate = generate
        self._elements: dict[Any, Any] = {}

    def peek(self) -> Any:
        """Return zeros that look like an element; they take no memory."""
        spec = jax.eval_shape(lambda: self._generate(1))
        return jax.tree.map(
            lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape[1:]), spec
        )

    def make(self, position: int, count: int, sharding: Any) -> Any:
        """Return the elements for this count; they are generated only once."""
        del position
        key = count, sharding
        if key not in self._elements:
            generate = jax.jit(lambda: self._generate(count), out_shardings=sharding)
            self._elements[key] = jax.block_until_ready(generate())
        return self._elements[key]

    def close(self) -> None:
        """Free the elements."""
        self._elements.clear()
