"""What a dataset offers: a length, and the samples at some indices."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

Sample = Mapping[str, np.ndarray]
"""Named arrays with the samples along dim 0."""


class DatasetError(ValueError):
    """What lies on the disk is damaged, or not what it should be; names the file."""


class Source(Protocol):
    """Samples by index, as a batch."""

    def __len__(self) -> int:
        """Count the samples."""
        ...

    def __getitem__(self, indices: np.ndarray) -> Any:
        """Return the samples at these indices, stacked along dim 0."""
        ...


class ArraySource:
    """Samples held in memory.

    >>> source = ArraySource({"x": np.arange(10), "y": np.arange(10) % 2})
    >>> source[np.array([3, 5])]["y"]
    array([1, 1])
    """

    def __init__(self, arrays: Sample) -> None:
        if not isinstance(arrays, Mapping):
            raise ValueError(
                "A source needs a dict of arrays, such as {'x': ..., 'y': ...}, got "
                f"{type(arrays).__name__}."
            )
        lengths = {name: len(array) for name, array in arrays.items()}
        if not lengths:
            raise ValueError("A source needs at least one array.")
        if len(set(lengths.values())) != 1:
            raise ValueError(f"The arrays have different numbers of samples: {lengths}.")
        self.arrays = dict(arrays)

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        # Faster than `array[indices]` by a third where a sample is a picture.
        return {name: array.take(indices, 0) for name, array in self.arrays.items()}
