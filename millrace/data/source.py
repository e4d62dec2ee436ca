"""The interface of a dataset, and two datasets in memory: arrays and random images."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from millrace.card import Card, with_card

PIXEL_MEAN, PIXEL_STD = 127, 60
"""Distribution of synthetic pixels, before truncation."""
PIXEL_TRUNCATION = 2
"""Synthetic pixels stay within this many standard deviations, so each fits into a byte."""
_NUM_DISTINCT = 256


class DatasetError(ValueError):
    """A dataset on disk is damaged or not the expected one; the message names the file."""


class Source(Protocol):
    """Samples by index, returned as a batch."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, indices: np.ndarray) -> Any:
        """Return the samples at `indices`, stacked along dim 0."""
        ...


@with_card
class ArraySource:
    """Samples held in memory, as named arrays or lists with the samples along dim 0.

    >>> source = ArraySource({"x": np.arange(10), "y": np.arange(10) % 2})
    >>> source[np.array([3, 5])]["y"]
    array([1, 1])
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        if not isinstance(arrays, Mapping):
            raise ValueError(
                "A source needs a dict of arrays, such as {'x': ..., 'y': ...}, got "
                f"{type(arrays).__name__}."
            )
        self.arrays = {name: _as_array(name, array) for name, array in arrays.items()}
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if not lengths:
            raise ValueError("A source needs at least one array.")
        if len(set(lengths.values())) != 1:
            raise ValueError(f"The arrays have different numbers of samples: {lengths}.")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def card(self) -> Card:
        """Return what a terminal or a notebook shows."""
        rows = {"samples": f"{len(self):,}"}
        for name, array in self.arrays.items():
            rows[name] = f"{array.dtype}[{', '.join(map(str, array.shape[1:]))}]"
        return Card("ArraySource", rows)

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        # `take` is a third faster than `array[indices]` for samples as large as images.
        return {name: array.take(indices, 0) for name, array in self.arrays.items()}


def _as_array(name: str, given: Any) -> Any:
    try:
        array = given if hasattr(given, "take") else np.asarray(given)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} cannot be converted to an array: {error}") from error
    if array.ndim == 0 or array.dtype == object:
        raise ValueError(
            f"{name} must be an array with the samples along its first dim, got "
            f"{type(given).__name__}."
        )
    return array


class SyntheticImages:
    """Random images and labels, to measure speed without reading a disk.

    A few hundred distinct samples are generated once and repeated.

    Args:
        num_samples: Length of the dataset to imitate.
        image_shape: Shape of one image.
        num_classes: Labels are drawn uniformly from this many classes.
        prepare: Converts the uint8 images to the form that is transferred. It runs once,
            so it costs nothing during training.
        seed: Seed for images and labels.
    """

    def __init__(
        self,
        num_samples: int,
        image_shape: tuple[int, ...],
        num_classes: int,
        *,
        prepare: Callable[[np.ndarray], np.ndarray] | None = None,
        seed: int = 0,
    ) -> None:
        generator = np.random.default_rng(seed)
        count = min(num_samples, _NUM_DISTINCT)
        image = random_pixels(generator, (count, *image_shape))
        self._num_samples = num_samples
        self._image = image if prepare is None else prepare(image)
        self._label = generator.integers(0, num_classes, count, dtype=np.int32)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        distinct = np.asarray(indices) % len(self._label)
        return {
            "image": self._image.take(distinct, 0),
            "label": self._label.take(distinct, 0),
        }


def random_pixels(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw bytes from a truncated normal distribution."""
    values = generator.standard_normal(math.prod(shape), np.float32)
    while len(outside := np.flatnonzero(np.abs(values) > PIXEL_TRUNCATION)):
        values[outside] = generator.standard_normal(len(outside), np.float32)
    return (PIXEL_MEAN + PIXEL_STD * values).astype(np.uint8).reshape(shape)
