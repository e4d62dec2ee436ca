"""Datasets whose elements are made on the devices: nothing large is read or copied."""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


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


class IndexedBatches(Protocol):
    """Says which samples are in each batch, such as ``Stream``."""

    def indices(self, position: int) -> np.ndarray:
        """Return the indices of the samples in batch number `position`."""
        ...

    def annotations(self, position: int) -> Mapping[str, np.ndarray]:
        """Return the other arrays of batch number `position`."""
        ...


class ResidentSamples(DeviceDataset):
    """Batches gathered on the devices from all samples, which stay there.

    The host sends only the indices of the samples of each batch. Every device holds all
    samples.

    Args:
        arrays: All samples, along dim 0 of named arrays.
        batches: The samples of each batch.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], batches: IndexedBatches) -> None:
        self._arrays = arrays
        self.batches = batches
        self._gathers: dict[Any, Any] = {}

    @property
    def num_bytes(self) -> int:
        """The memory that the samples take on each device."""
        return sum(array.nbytes for array in self._arrays.values())

    def peek(self) -> Any:
        """Return a batch with the shapes of those to come."""
        indices = self.batches.indices(0)
        batch = {name: array[indices] for name, array in self._arrays.items()}
        return {**batch, **self.batches.annotations(0)}

    def make(self, position: int, count: int, sharding: NamedSharding) -> Any:
        """Return the batches from `position` on; the devices may still gather them."""
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        if sharding not in self._gathers:
            samples = jax.device_put(dict(self._arrays), replicated)
            gather = jax.jit(_gather, out_shardings=sharding)
            self._gathers[sharding] = functools.partial(gather, samples)
        numbers = range(position, position + count)
        indices = np.stack([self.batches.indices(n) for n in numbers]).astype(np.int32)
        annotations = [self.batches.annotations(n) for n in numbers]
        more = jax.tree.map(lambda *arrays: np.stack(arrays), *map(dict, annotations))
        batches = self._gathers[sharding](jax.device_put(indices, replicated))
        return {**batches, **jax.device_put(more, sharding)}

    def close(self) -> None:
        """Free the samples; a later batch puts them on the devices again."""
        self._gathers.clear()


def _gather(samples: dict[str, jax.Array], indices: jax.Array) -> dict[str, jax.Array]:
    return {name: array[indices] for name, array in samples.items()}
