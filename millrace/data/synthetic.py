"""Random pictures in place of a data set, to measure speed without a disk."""

import math
from collections.abc import Callable

import numpy as np

MEAN, STD = 127, 60
TRUNCATED_AT = 2
"""In standard deviations, so every value is a byte."""
_NUM_DISTINCT = 256


class SyntheticImages:
    """As many samples as a data set has, over a few hundred distinct ones made once.

    Args:
        num_samples: How many there seem to be.
        image_shape: Of one picture.
        num_classes: Labels are drawn evenly from these.
        prepare: Brings the pictures, which are bytes, into the form that travels. It is
            done once, so it costs nothing while training.
        seed: Of the random numbers.
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
        image = truncated_normal(generator, (count, *image_shape))
        self._num_samples = num_samples
        self._image = image if prepare is None else prepare(image)
        self._label = generator.integers(0, num_classes, count, dtype=np.int32)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        places = np.asarray(indices) % len(self._label)
        return {"image": self._image.take(places, 0), "label": self._label.take(places, 0)}


def truncated_normal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return bytes of mean 127 and standard deviation 60 before the tails are cut off."""
    values = generator.standard_normal(math.prod(shape), np.float32)
    while len(outside := np.flatnonzero(np.abs(values) > TRUNCATED_AT)):
        values[outside] = generator.standard_normal(len(outside), np.float32)
    return (MEAN + STD * values).astype(np.uint8).reshape(shape)
