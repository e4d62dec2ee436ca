"""What is done to the images of each data set, alike on the host and on the device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import device_images
from millrace.data import augment
from millrace.data.catalog import CATALOG
from millrace.data.mnist import DIGITS_MAX_PIXEL

_IMAGENET = CATALOG["imagenet"]
_STATISTICS = {"mean": _IMAGENET.mean, "std": _IMAGENET.std}
_MEAN_OF_BYTES = (123.68, 116.78, 103.94)
"""As the references have it where they do not normalize."""


class Preparation(NamedTuple):
    """To the range the networks expect; then, in training, at random."""

    scale_on_host: Callable[[np.ndarray], np.ndarray]
    scale_on_device: Callable[[jax.Array], jax.Array]
    augment_on_host: tuple[Callable[[np.ndarray, np.random.Generator], Any], ...] = ()
    augment_on_device: Callable[[jax.Array, jax.Array], jax.Array] | None = None


def preparation(dataset: str, *, normalize: bool = True) -> Preparation:
    """Return what is done to images of a data set.

    Args:
        dataset: Its name.
        normalize: Whether pictures of any size are scaled, or only their mean is
            subtracted.
    """
    if dataset.startswith("cifar"):
        return Preparation(
            augment.standardize,
            device_images.standardize,
            (augment.pad_and_crop, augment.random_flip),
            device_images.random_crop_and_flip,
        )
    if dataset in ("imagenet", "imagefolder"):  # the host has cropped, and maybe flipped
        if not normalize:
            mean = _MEAN_OF_BYTES
            return Preparation(
                lambda image: as_float(image) - np.array(mean, np.float32),
                lambda image: image.astype(jnp.float32) - jnp.array(mean, jnp.float32),
                augment_on_device=device_images.random_flip,
            )
        return Preparation(
            functools.partial(augment.normalize, **_STATISTICS),
            functools.partial(device_images.normalize, **_STATISTICS),
            augment_on_device=device_images.random_flip,
        )
    largest = DIGITS_MAX_PIXEL if dataset == "digits" else 255
    return Preparation(
        lambda image: as_float(image) / largest,
        lambda image: image.astype(jnp.float32) / largest,
    )


def as_float(image: np.ndarray) -> np.ndarray:
    """Widen to what travels where bytes do not."""
    return image.astype(np.float32)
