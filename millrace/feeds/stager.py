"""Elements gathered into chunks, each like the first, and moved to the devices."""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

_CHUNK_BYTES = 16 << 20
_CHUNK_ELEMENTS = 256


class ElementError(ValueError):
    """An element of the dataset does not look like the first one."""


class Chunk(NamedTuple):
    """Elements staged on the devices: leaves are (capacity, ...)."""

    data: Any
    start: int
    """The first element that has not been used."""
    stop: int
    """The end of the elements; what follows is padding."""


class Rows(NamedTuple):
    """The samples of an element that are this process's to read."""

    places: slice
    of: int
    """Samples in the whole element."""


class GradientResult(NamedTuple):
    """Elements on the host, in the order of the dataset."""

    first: int
    """The number of the first one in the dataset."""
    size: int
    buffers: list[np.ndarray]
    """One per leaf: (capacity, ...)."""
    treedef: Any

    def element(self, place: int) -> Any:
        """Return one of them; it shares the memory of all."""
        return jax.tree.unflatten(self.treedef, [buffer[place] for buffer in self.buffers])


class Stager:
    """Gathers elements into one array per leaf and moves it to the devices."""

    def __init__(
        self,
        first: Any,
        pattern: tuple[int, ...] | None,
        sharding: Any,
        rows: Rows | None = None,
    ) -> None:
        leaves, self._treedef = jax.tree.flatten(first)
        if not leaves:
            raise ElementError("The dataset's elements hold no arrays.")
        self._specs = [(np.shape(x), np.asarray(x).dtype) for x in leaves]
        self._limits = [_narrowed(dtype) for _, dtype in self._specs]
        self._names = [
            jax.tree_util.keystr(path) or "the element"
            for path, _ in jax.tree_util.tree_leaves_with_path(first)
        ]
        size = sum(np.asarray(x).nbytes for x in leaves)
        chosen = max(1, min(_CHUNK_ELEMENTS, _CHUNK_BYTES // max(1, size)))
        self._capacities = itertools.cycle(pattern or (chosen,))
        self._sharding = sharding
        self._rows = rows
        self._begin()

    def _begin(self) -> None:
        # A fresh buffer each time: on CPU the device may use this memory in place.
        self._capacity = next(self._capacities)
        self._buffers = [
            np.empty((self._capacity, *shape), dtype) for shape, dtype in self._specs
        ]
        self.count = self._first = 0

    @property
    def full(self) -> bool:
        """Whether another element would not fit."""
        return self.count == self._capacity

    def add(self, element: Any, index: int) -> None:
        """Take element number `index` of the dataset, if it looks like the first."""
        leaves, treedef = jax.tree.flatten(element)
        if treedef != self._treedef:
            raise ElementError(
                f"Element {index} of the dataset has the structure {treedef}; the "
                f"first had {self._treedef}."
            )
        for place, leaf in enumerate(leaves):
            array = np.asarray(leaf)
            shape, dtype = self._specs[place]
            if array.shape != shape or array.dtype != dtype:
                raise ElementError(
                    f"Element {index} of the dataset: {self._names[place]} is "
                    f"{array.dtype}{list(array.shape)}; in the first element it was "
                    f"{dtype}{list(shape)}. Every element must have the same shape "
                    "and type (drop a short last batch)."
                )
            limits = self._limits[place]
            if limits and array.size and not _is_within(array, limits):
                raise ElementError(
                    f"Element {index} of the dataset: {self._names[place]} has numbers "
                    f"from {array.min()} to {array.max()}, which {limits.dtype} does not "
                    "hold. JAX has 64 bits only after "
                    'jax.config.update("jax_enable_x64", True).'
                )
            self._buffers[place][self.count] = array
        if not self.count:
            self._first = index
        self.count += 1

    def take(self) -> GradientResult:
        """Return what was gathered, and start the next chunk."""
        gathered = GradientResult(self._first, self.count, self._buffers, self._treedef)
        self._begin()
        return gathered

    def placed(self, gathered: GradientResult) -> Chunk:
        """Move what was gathered to the devices."""
        for buffer in gathered.buffers:
            buffer[gathered.size :] = 0
        data = jax.tree.unflatten(gathered.treedef, gathered.buffers)
        return Chunk(self._placed(data), 0, gathered.size)

    def _placed(self, data: Any) -> Any:
        sharding, rows = self._sharding, self._rows
        if sharding is None or sharding.is_fully_addressable:
            return jax.device_put(data, sharding)

        def of_all(own: np.ndarray) -> jax.Array:
            samples = own.shape[1] if rows is None else rows.of
            shape = (own.shape[0], samples, *own.shape[2:])
            # No copy between processes: each puts its samples on its own devices.
            own = own.astype(jax.dtypes.canonicalize_dtype(own.dtype), copy=False)
            return jax.make_array_from_process_local_data(sharding, own, shape)

        return jax.tree.map(of_all, data)


def _narrowed(dtype: np.dtype) -> np.iinfo | None:
    """Return the limits of what an integer type becomes on the device, where it differs."""
    becomes = jax.dtypes.canonicalize_dtype(dtype)
    is_integer = np.issubdtype(dtype, np.integer)
    return np.iinfo(becomes) if is_integer and becomes != dtype else None


def _is_within(array: np.ndarray, limits: np.iinfo) -> bool:
    return limits.min <= array.min() and array.max() <= limits.max
