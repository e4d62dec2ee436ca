"""Images for training and validation, and where they are prepared.

Normalising and flipping happen on the host, or on the device as the first thing in the
compiled loop; what changes an image's size (padding and cropping) stays on the host.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn.config import CnnConfig
from millrace.data import cifar, mnist
from millrace.data.digits import load_digits
from millrace.data.source import ArraySource

_PAD = 4

_LOADERS: dict[str, Callable[[Any], tuple[ArraySource, ArraySource]]] = {
    "digits": lambda _: load_digits(),
    "mnist": mnist.load_mnist,
    "fashion-mnist": mnist.load_fashion_mnist,
    "cifar10": cifar.load_cifar10,
    "cifar100": cifar.load_cifar100,
}
_NUM_CLASSES = {"cifar100": 100}


class ImageData(NamedTuple):
    """A data set, and what is done to its images on either side of the infeed."""

    training: Any
    validation: Any
    num_classes: int
    transform: Callable[[Any, np.random.Generator], Any] | None
    """On the host, for each training batch."""
    prepare: Callable[[jax.Array, jax.Array | None], jax.Array]
    """On the device: ``(images, key)``; the key is None in validation."""


def load(config: CnnConfig) -> ImageData:
    """Load the data set that the configuration names."""
    name = config.resolved_dataset
    training, validation = _LOADERS[name](config.dataset_path)
    natural = name.startswith("cifar")
    on_device = config.accelerator_side_preprocess

    def transform(batch: Any, generator: np.random.Generator) -> Any:
        image = batch["image"]
        if natural:
            image = _padded_crop(image, generator)
            if not on_device:
                flipped = generator.random(len(image)) < 0.5
                image = np.where(flipped[:, None, None, None], image[:, :, ::-1], image)
        return batch | {"image": _on_wire(image, name, config)}

    def prepare(image: jax.Array, key: jax.Array | None) -> jax.Array:
        if not on_device:
            return image
        if natural and key is not None:
            flipped = jax.random.bernoulli(key, 0.5, (image.shape[0], 1, 1, 1))
            image = jnp.where(flipped, image[:, :, ::-1], image)
        dtype = jnp.dtype(config.types.compute)
        return _normalised(image.astype(jnp.float32), name, jnp).astype(dtype)

    return ImageData(
        training,
        _Prepared(validation, lambda image: _on_wire(image, name, config)),
        _NUM_CLASSES.get(name, 10),
        transform,
        prepare,
    )


class _Prepared:
    """A source whose images are brought into the form that travels."""

    def __init__(self, source: Any, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self._source = source
        self._function = function

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, indices: np.ndarray) -> Any:
        batch = self._source[indices]
        return batch | {"image": self._function(batch["image"])}


def _on_wire(image: np.ndarray, name: str, config: CnnConfig) -> np.ndarray:
    if config.eight_bit_transfer and image.dtype == np.uint8:
        return np.ascontiguousarray(image)
    wide = image.astype(np.float32)
    return wide if config.accelerator_side_preprocess else _normalised(wide, name, np)


def _normalised(image: Any, name: str, numpy: Any) -> Any:
    """To the range the networks expect, alike on host (NumPy) and device (JAX)."""
    if name == "digits":
        return image  # scaled when loaded
    if not name.startswith("cifar"):
        return image / 255
    mean = image.mean((1, 2, 3), keepdims=True)
    std = image.std((1, 2, 3), keepdims=True)
    return (image - mean) / numpy.maximum(std, 1e-3)


def _padded_crop(image: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Pad with zeros and cut the old size out at random, each image by itself."""
    count, height, width, _ = image.shape
    padded = np.pad(image, ((0, 0), (_PAD, _PAD), (_PAD, _PAD), (0, 0)))
    down, right = generator.integers(0, 2 * _PAD + 1, (2, count))
    rows = down[:, None] + np.arange(height)
    columns = right[:, None] + np.arange(width)
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None]]
