"""Binary pictures, eight pixels to a byte: few enough bytes to lie on the device whole."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.vcd.config.common import DataOptions
from millrace.config import ConfigurationError
from millrace.data import mnist
from millrace.data.catalog import DatasetNotFound, download_folder
from millrace.data.source import ArraySource, DatasetError

_SHIFTS = np.arange(8, dtype=np.uint8)[::-1]  # as np.packbits: the highest bit comes first
_HALF_OF_BYTE = 127  # pixels above it are above a half

_LOADERS: dict[str, tuple[Callable[[Path], tuple[ArraySource, ArraySource]], int]] = {
    "binarized-mnist": (mnist.load_binarized_mnist, 0),
    "fashion-mnist": (mnist.load_fashion_mnist, _HALF_OF_BYTE),
    "mnist": (mnist.load_mnist, _HALF_OF_BYTE),
    "digits": (lambda _: mnist.load_digits(), mnist.DIGITS_MAX_PIXEL // 2),
}
"""For each data set what loads it, and the value above which a pixel is 1."""


class BinaryPictures(NamedTuple):
    """Some pictures of zeros and ones."""

    packed: np.ndarray
    """(pictures, bytes)."""
    shape: tuple[int, int]
    """Height and width."""

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def num_pixels(self) -> int:
        """Pixels in a picture."""
        return self.shape[0] * self.shape[1]

    def at(self, index: Any) -> jax.Array:
        """Gather pictures on the device: float32, one row of pixels each."""
        return unpack(jnp.asarray(self.packed)[index], self.num_pixels)

    def some(self, which: slice | np.ndarray) -> "BinaryPictures":
        """Return a part of the pictures."""
        return BinaryPictures(self.packed[which], self.shape)


class PictureData(NamedTuple):
    """A data set, split."""

    training: BinaryPictures
    validation: BinaryPictures | None
    test: BinaryPictures
    name: str
    folder: Path | None

    def describe(self) -> str:
        """Name the data set and its sizes in a line."""
        held_out = f", {len(self.validation):,} validation" if self.validation else ""
        place = f" from {self.folder.resolve()}" if self.folder else ""
        return (
            f"{self.name}{place}, {len(self.training):,} training{held_out} and "
            f"{len(self.test):,} test pictures of {self.training.num_pixels} pixels"
        )


def load(options: DataOptions, *, num_validation: int = 0) -> PictureData:
    """Load the data set that the options name; the last pictures may be held out."""
    name = options.resolved_dataset
    load_from, threshold = _LOADERS[name]
    sources, folder = _find(name, options.dataset_path, load_from)
    training, test = (binarize(source.arrays["image"], threshold) for source in sources)
    validation = None
    if num_validation:
        if num_validation >= len(training):
            raise ConfigurationError(
                f"num_validation is {num_validation}, but {name} has only {len(training)} "
                "training pictures. Give a smaller --num-validation."
            )
        validation = training.some(slice(-num_validation, None))
        training = training.some(slice(-num_validation))
    return PictureData(training, validation, test, name, folder)


def _find(
    name: str,
    given: Path,
    load_from: Callable[[Path], tuple[ArraySource, ArraySource]],
) -> tuple[tuple[ArraySource, ArraySource], Path | None]:
    """Load from the folder given or, where it has no such data set, from the cache."""
    if name == "digits":
        return load_from(given), None
    try:
        return load_from(given), given
    except DatasetNotFound as error:
        cached = download_folder(name)
        with contextlib.suppress(DatasetNotFound):
            return load_from(cached), cached
        raise error


def binarize(images: np.ndarray, threshold: int) -> BinaryPictures:
    """Make (pictures, height, width, 1) binary: 1 where above the threshold."""
    if not len(images):
        raise DatasetError("There are no pictures in the data set.")
    pixels = (images > threshold).reshape(len(images), -1)
    return BinaryPictures(np.packbits(pixels, axis=1), images.shape[1:3])


def unpack(packed: jax.Array, num_pixels: int) -> jax.Array:
    """Turn bytes into pixels, on the device."""
    bits = (packed[..., None] >> jnp.asarray(_SHIFTS)) & jnp.uint8(1)
    pixels = bits.reshape(*packed.shape[:-1], -1)[..., :num_pixels]
    return pixels.astype(jnp.float32)
