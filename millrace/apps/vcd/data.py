"""Binary images, packed into bits so that a whole dataset fits on the device."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.vcd.config.sections import DataOptions
from millrace.commands.fetch import fetch_missing, may_fetch
from millrace.config import ConfigurationError
from millrace.data import mnist
from millrace.data.catalog import DatasetNotFound, find_downloaded
from millrace.data.memory import HeldArrays, as_images, find_held, require_held
from millrace.data.source import ArraySource, DatasetError
from millrace.feeds.device import DeviceDataset

Loader = Callable[[Path], tuple[ArraySource, ArraySource]]
"""``folder -> (training, test)``."""

_SHIFTS = np.arange(8, dtype=np.uint8)[::-1]  # np.packbits puts the highest bit first
_HALF_OF_BYTE = 127

_LOADERS: dict[str, tuple[Loader, int]] = {
    "binarized-mnist": (mnist.load_binarized_mnist, 0),
    "fashion-mnist": (mnist.load_fashion_mnist, _HALF_OF_BYTE),
    "mnist": (mnist.load_mnist, _HALF_OF_BYTE),
    "digits": (lambda _: mnist.load_digits(), mnist.DIGITS_MAX_PIXEL // 2),
}
"""The loader of each dataset, and the value above which a pixel is 1."""


class BinaryImages(NamedTuple):
    """Images of zeros and ones."""

    packed: np.ndarray
    """(images, bytes), uint8."""
    shape: tuple[int, int]
    """Height and width."""

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def num_pixels(self) -> int:
        """Pixels per image."""
        return self.shape[0] * self.shape[1]

    def gather(self, index: Any) -> jax.Array:
        """Return the images at `index` on the device: float32, (images, pixels)."""
        return unpack(jnp.asarray(self.packed)[index], self.num_pixels)

    def subset(self, which: slice | np.ndarray) -> "BinaryImages":
        """Return some of the images."""
        return BinaryImages(self.packed[which], self.shape)


class ImageSplits(NamedTuple):
    """A dataset and its splits."""

    training: BinaryImages
    validation: BinaryImages | None
    test: BinaryImages
    name: str
    folder: Path | None
    """Where it was loaded from; None if it is embedded."""

    def describe(self) -> str:
        """Return the name and the sizes of the dataset in one line."""
        held_out = f", {len(self.validation):,} validation" if self.validation else ""
        source = f" from {self.folder.resolve()}" if self.folder else ""
        return (
            f"{self.name}{source}, {len(self.training):,} training{held_out} and "
            f"{len(self.test):,} test images of {self.training.num_pixels} pixels"
        )


def load_images(
    options: DataOptions, *, num_validation: int = 0, needs_images: bool = True
) -> ImageSplits:
    """Load a dataset; the last `num_validation` training images are held out.

    Args:
        options: Which dataset, and where it is.
        num_validation: Training images to hold out.
        needs_images: Whether arrays that are no longer in memory are an error; otherwise
            they are empty.
    """
    name, folder = options.resolved_dataset, None
    if options.arrays is not None:
        name = "arrays in memory"
        training, test = load_arrays(options.arrays, needs_images=needs_images)
        num_validation *= bool(len(training))
    else:
        loader, threshold = _LOADERS[name]
        sources, folder = _load(name, options.dataset_path, loader, options.fetch)
        training, test = (binarize(source.arrays["image"], threshold) for source in sources)
    validation = None
    if num_validation:
        if num_validation >= len(training):
            raise ConfigurationError(
                f"num_validation is {num_validation}, but {name} has only {len(training)} "
                "training images. Lower --num-validation."
            )
        validation = training.subset(slice(-num_validation, None))
        training = training.subset(slice(-num_validation))
    return ImageSplits(training, validation, test, name, folder)


def hold_images(data: Any, test_data: Any = None) -> HeldArrays:
    """Check and binarize images from Python, and keep them in memory.

    Args:
        data: Training images: (images, height, width), with or without a channel.
        test_data: The same, for the log-likelihood after training.
    """
    given = {"image": data, "test_image": test_data}
    arrays, shapes = {}, {}
    for name, value in given.items():
        if value is None:
            continue
        images = as_images("data" if name == "image" else "test_data", value)
        if images.shape[3] != 1:
            raise ConfigurationError(
                f"Images must be black and white, got {images.shape[3]} channels."
            )
        threshold = _HALF_OF_BYTE if images.max() > 1 else 0.5
        packed, shapes[name] = binarize(images, threshold)
        arrays[name] = packed
    if len(set(shapes.values())) > 1:
        raise ConfigurationError(f"data and test_data have different sizes: {shapes}.")
    return HeldArrays(arrays, size=list(shapes["image"]))


def load_arrays(
    record: Mapping[str, Any], *, needs_images: bool
) -> tuple[BinaryImages, BinaryImages]:
    """Return training and test images from Python; without test images, the same twice.

    Args:
        record: The record of the arrays.
        needs_images: Whether missing arrays are an error.
    """
    shape = (record["size"][0], record["size"][1])
    if not needs_images and find_held(record) is None:
        empty = BinaryImages(np.zeros((0, -(-shape[0] * shape[1] // 8)), np.uint8), shape)
        return empty, empty
    arrays = require_held(record, "mr.vcd.train").arrays
    test = arrays.get("test_image", arrays["image"])
    return BinaryImages(arrays["image"], shape), BinaryImages(test, shape)


def _load(
    name: str, folder: Path, loader: Loader, fetch: bool
) -> tuple[tuple[ArraySource, ArraySource], Path | None]:
    """Load from `folder` or the download cache; download what is in neither."""
    if name == "digits":
        return loader(folder), None
    try:
        return loader(folder), folder
    except DatasetNotFound as error:
        cached = find_downloaded(name)
        with contextlib.suppress(DatasetNotFound):
            return loader(cached), cached
        if not may_fetch(fetch):
            raise error
        return loader(fetch_missing(name, error)), cached


def binarize(
    images: np.ndarray,  # (images, height, width, 1)
    threshold: float,
) -> BinaryImages:
    """Return binary images that are 1 where a pixel is above the threshold."""
    if not len(images):
        raise DatasetError("The dataset has no images.")
    pixels = (images > threshold).reshape(len(images), -1)
    return BinaryImages(np.packbits(pixels, axis=1), images.shape[1:3])


def unpack(
    packed: jax.Array,  # (..., bytes)
    num_pixels: int,
) -> jax.Array:
    """Unpack bytes into pixels on the device: (..., num_pixels)."""
    bits = (packed[..., None] >> jnp.asarray(_SHIFTS)) & jnp.uint8(1)
    pixels = bits.reshape(*packed.shape[:-1], -1)[..., :num_pixels]
    return pixels.astype(jnp.float32)


class ShuffledIndices(DeviceDataset):
    """Batches of indices, ``{"index": (samples,)}``, in a new order every epoch.

    The order depends only on the seed and the epoch, so a resumed run continues with the
    batches of the interrupted one. An epoch drops the samples that do not fill a batch,
    different ones each time.
    """

    def __init__(self, num_samples: int, batch_size: int, *, seed: int) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._batches_per_epoch = num_samples // batch_size
        self._seed = seed
        assert self._batches_per_epoch, "checked by schedule_events"
        self._compiled: dict[Any, Any] = {}

    def peek(self) -> Any:
        """Return a batch of zeros."""
        return {"index": np.zeros(self._batch_size, np.int32)}

    def make(self, position: int, count: int, sharding: Any) -> Any:
        """Return `count` batches from `position` on."""
        if sharding not in self._compiled:
            self._compiled[sharding] = jax.jit(
                self._batches, static_argnums=1, out_shardings=sharding
            )
        return self._compiled[sharding](jnp.int32(position), count)

    def _batches(self, position: jax.Array, count: int) -> dict[str, jax.Array]:
        epoch, first = jnp.divmod(position, self._batches_per_epoch)
        # One epoch more than `count` batches fill: they may start in the middle of one.
        num_epochs = -(-count // self._batches_per_epoch) + 1
        orders = jax.lax.map(self._shuffle, epoch + jnp.arange(num_epochs))
        batches = orders.reshape(-1, self._batch_size)
        return {"index": jax.lax.dynamic_slice_in_dim(batches, first, count)}

    def _shuffle(self, epoch: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(self._seed), epoch)
        order = jax.random.permutation(key, self._num_samples).astype(jnp.int32)
        used = order[: self._batches_per_epoch * self._batch_size]
        return used.reshape(self._batches_per_epoch, self._batch_size)
