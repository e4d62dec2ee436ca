"""Gather elements into chunks on the host and copy them to the devices."""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

# A chunk large enough to amortize a transfer, small enough to arrive soon.
_CHUNK_BYTES = 16 << 20
_CHUNK_ELEMENTS = 256


class ElementError(ValueError):
    """An element of the dataset differs from the first one in structure, shape or type."""


class Chunk(NamedTuple):
    """Elements staged on the devices: leaves are (capacity, ...)."""

    data: Any
    start: int
    """The first unused element."""
    stop: int
    """The end of the elements; the rest is padding."""


class SampleSlice(NamedTuple):
    """The samples of every element that this process stages."""

    own: slice
    total: int
    """Samples in the whole element."""


class HostChunk(NamedTuple):
    """Consecutive elements of the dataset on the host."""

    first: int
    """Number of the first element in the dataset."""
    size: int
    buffers: list[np.ndarray]
    """One array per leaf: (capacity, ...)."""
    treedef: Any

    def element(self, index: int) -> Any:
        """Return one element; it shares memory with the chunk."""
        return jax.tree.unflatten(self.treedef, [buffer[index] for buffer in self.buffers])


class Stager:
    """Gathers elements into one array per leaf and copies them to the devices.

    Args:
        first: An element that all others must look like.
        capacities: Sizes of successive chunks, repeated forever; None chooses one.
        sharding: Where chunks go; the default device if None.
        samples: The samples of each element that this process stages; None for all.
    """

    def __init__(
        self,
        first: Any,
        capacities: tuple[int, ...] | None,
        sharding: Any,
        samples: SampleSlice | None,
    ) -> None:
        leaves, self._treedef = jax.tree.flatten(first)
        if not leaves:
            raise ElementError("The elements of the dataset contain no arrays.")
        self._specs = [(np.shape(x), np.asarray(x).dtype) for x in leaves]
        self._limits = [_device_limits(dtype) for _, dtype in self._specs]
        self._names = [
            jax.tree_util.keystr(path) or "the element"
            for path, _ in jax.tree_util.tree_leaves_with_path(first)
        ]
        num_bytes = sum(np.asarray(x).nbytes for x in leaves)
        default = max(1, min(_CHUNK_ELEMENTS, _CHUNK_BYTES // max(1, num_bytes)))
        self._capacities = itertools.cycle(capacities or (default,))
        self._sharding = sharding
        self._samples = samples
        self._start_chunk()

    def _start_chunk(self) -> None:
        # New buffers for every chunk: a CPU device may use this memory without copying.
        self._capacity = next(self._capacities)
        self._buffers = [
            np.empty((self._capacity, *shape), dtype) for shape, dtype in self._specs
        ]
        self.count = self._first = 0

    @property
    def is_full(self) -> bool:
        """Whether the chunk has no room for another element."""
        return self.count == self._capacity

    def add(self, element: Any, number: int) -> None:
        """Copy element `number` of the dataset into the chunk; it must match the first."""
        leaves, treedef = jax.tree.flatten(element)
        if treedef != self._treedef:
            raise ElementError(
                f"Element {number} of the dataset has the structure {treedef}; the "
                f"first has {self._treedef}."
            )
        for index, leaf in enumerate(leaves):
            array = np.asarray(leaf)
            self._check_leaf(array, index, number)
            self._buffers[index][self.count] = array
        if not self.count:
            self._first = number
        self.count += 1

    def _check_leaf(self, array: np.ndarray, index: int, number: int) -> None:
        shape, dtype = self._specs[index]
        if array.shape != shape or array.dtype != dtype:
            raise ElementError(
                f"Element {number} of the dataset: {self._names[index]} is "
                f"{array.dtype}{list(array.shape)}; in the first element it is "
                f"{dtype}{list(shape)}. All elements must have the same shapes and types "
                "(drop a short last batch)."
            )
        limits = self._limits[index]
        if limits is None or not array.size:
            return
        if array.min() < limits.min or array.max() > limits.max:
            raise ElementError(
                f"Element {number} of the dataset: {self._names[index]} has values from "
                f"{array.min()} to {array.max()}, which {limits.dtype} cannot hold. Enable "
                '64-bit types with jax.config.update("jax_enable_x64", True).'
            )

    def take(self) -> HostChunk:
        """Return the gathered elements and start the next chunk."""
        chunk = HostChunk(self._first, self.count, self._buffers, self._treedef)
        self._start_chunk()
        return chunk

    def place(self, chunk: HostChunk) -> Chunk:
        """Copy a chunk to the devices."""
        for buffer in chunk.buffers:
            buffer[chunk.size :] = 0
        data = jax.tree.unflatten(chunk.treedef, chunk.buffers)
        sharding, samples = self._sharding, self._samples
        if sharding is None or sharding.is_fully_addressable:
            return Chunk(jax.device_put(data, sharding), 0, chunk.size)

        def place_own(own: np.ndarray) -> jax.Array:
            num_samples = own.shape[1] if samples is None else samples.total
            shape = (own.shape[0], num_samples, *own.shape[2:])
            # Nothing crosses between processes: each fills its own devices.
            own = own.astype(jax.dtypes.canonicalize_dtype(own.dtype), copy=False)
            return jax.make_array_from_process_local_data(sharding, own, shape)

        return Chunk(jax.tree.map(place_own, data), 0, chunk.size)


def _device_limits(dtype: np.dtype) -> np.iinfo | None:
    """Return the limits of an integer type on the device where it is narrower there."""
    on_device = jax.dtypes.canonicalize_dtype(dtype)
    is_integer = np.issubdtype(dtype, np.integer)
    return np.iinfo(on_device) if is_integer and on_device != dtype else None
