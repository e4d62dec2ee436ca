"""Preprocessing of each data set, the same on the host and on the device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import augment as on_device
from millrace.apps.cnn.models.spec import has_small_images
from millrace.data import augment as on_host
from millrace.data.catalog import CATALOG
from millrace.data.mnist import DIGITS_MAX_PIXEL

_IMAGENET = {"mean": CATALOG["imagenet"].mean, "std": CATALOG["imagenet"].std}
_IMAGENET_BYTES_MEAN = (123.68, 116.78, 103.94)  # as in Graphcore's applications


class Preprocessing(NamedTuple):
    """Scaling to the range that models expect, and random augmentation for training."""

    scale_on_host: Callable[[np.ndarray], np.ndarray]
    scale_on_device: Callable[[jax.Array], jax.Array]
    augment_on_host: tuple[Callable[[np.ndarray, np.random.Generator], Any], ...] = ()
    augment_on_device: Callable[[jax.Array, jax.Array], jax.Array] | None = None


def get_preprocessing(dataset: str, *, normalize: bool = True) -> Preprocessing:
    """Return the preprocessing of a data set.

    Args:
        dataset: The name of the data set.
        normalize: Whether large images are normalized, or only their mean is subtracted.
    """
    if dataset.startswith("cifar"):
        return Preprocessing(
            on_host.standardize,
            on_device.standardize,
            (on_host.pad_and_crop, on_host.random_flip),
            on_device.random_crop_and_flip,
        )
    if has_small_images(dataset):
        largest = DIGITS_MAX_PIXEL if dataset == "digits" else 255
        return Preprocessing(
            lambda images: as_float(images) / largest,
            lambda images: images.astype(jnp.float32) / largest,
        )
    # The host has already cropped these images, and flipped them if it scales them.
    if normalize:
        return Preprocessing(
            functools.partial(on_host.normalize, **_IMAGENET),
            functools.partial(on_device.normalize, **_IMAGENET),
            augment_on_device=on_device.random_flip,
        )
    mean = np.array(_IMAGENET_BYTES_MEAN, np.float32)
    return Preprocessing(
        lambda images: as_float(images) - mean,
        lambda images: images.astype(jnp.float32) - jnp.array(mean),
        augment_on_device=on_device.random_flip,
    )


def as_float(images: np.ndarray) -> np.ndarray:
    """Convert bytes to float32."""
    return images.astype(np.float32)
