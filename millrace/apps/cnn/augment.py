"""Preprocessing and augmentation on the device, at the start of the compiled loop.

Scaling, crops and flips are the same arithmetic as in `millrace.data.augment` on the host,
in the same order: values are scaled first, so that zero padding is the mean of an image.

Mixup and CutMix blend each sample with others of its micro-batch. The partners are the
micro-batch itself, rolled by one sample for mixup and then by two for CutMix, so that one
key determines both the images and the shares of their labels.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.cnn import augment as on_device
from millrace.apps.cnn import auto_augment
from millrace.apps.cnn.config.augmentation import AugmentationOptions, Basics
from millrace.apps.cnn.config.training import TestTimeName
from millrace.apps.cnn.models.spec import has_small_images
from millrace.data import augment as on_host
from millrace.data.catalog import CATALOG
from millrace.data.mnist import DIGITS_MAX_PIXEL

PAD = 4
_CROP_STREAM = 0x5EED  # separate these random numbers from each other and from
_MIX_STREAM = 0x317  # those of the layers, which get the same key
_MIXUP_PARTNER = 1
_NUM_QUANTILES = 4096


# Scaling, crops and flips

_IMAGENET = {"mean": CATALOG["imagenet"].mean, "std": CATALOG["imagenet"].std}
_IMAGENET_BYTES_MEAN = (123.68, 116.78, 103.94)  # as in Graphcore's applications


def standardize(
    images: jax.Array,  # (batch, height, width, channels)
) -> jax.Array:
    """Scale each image to mean 0 and standard deviation 1."""
    images = images.astype(jnp.float32)
    axes = (1, 2, 3)
    floor = 1 / math.sqrt(math.prod(images.shape[1:]))
    std = jnp.maximum(images.std(axes, keepdims=True), floor)
    return (images - images.mean(axes, keepdims=True)) / std


def normalize(
    images: jax.Array,  # (batch, height, width, channels)
    mean: Sequence[float],
    std: Sequence[float],
) -> jax.Array:
    """Scale bytes to 0–1 and normalize each channel."""
    scale = jnp.array([1 / (255 * s) for s in std], jnp.float32)
    offset = jnp.array([m / s for m, s in zip(mean, std, strict=True)], jnp.float32)
    return images.astype(jnp.float32) * scale - offset


def random_flip(
    images: jax.Array,  # (batch, height, width, channels)
    key: jax.Array,
) -> jax.Array:
    """Mirror each image horizontally with probability one half."""
    key = jax.random.fold_in(key, _CROP_STREAM)
    return mirror(images, jax.random.bernoulli(key, 0.5, (images.shape[0],)))


def random_crop_and_flip(
    images: jax.Array,  # (batch, height, width, channels)
    key: jax.Array,
    *,
    padding: int = PAD,
    crop: bool = True,
    flip: bool = True,
    reflect: bool = False,
) -> jax.Array:
    """Pad each image, crop it at random to its size, and mirror half of them."""
    count = images.shape[0]
    offset_key, flip_key = jax.random.split(jax.random.fold_in(key, _CROP_STREAM))
    top, left = jax.random.randint(offset_key, (2, count), 0, 2 * padding + 1)
    if not crop:
        top = left = jnp.full(count, padding)
    flipped = jax.random.bernoulli(flip_key, 0.5, (count,)) & flip
    return crop_and_flip(images, top, left, flipped, padding, reflect=reflect)


def crop_and_flip(
    images: jax.Array,  # (batch, height, width, channels)
    top: jax.Array,  # (batch,)
    left: jax.Array,  # (batch,)
    flipped: jax.Array,  # (batch,)
    padding: int = PAD,
    *,
    reflect: bool = False,
) -> jax.Array:
    """Crop each padded image at an offset, and mirror it where `flipped`.

    A single gather does all of it; indices outside an image read zeros, or the image
    mirrored at its edges.
    """
    count, height, width, _ = images.shape
    across = jnp.arange(width)
    across = jnp.where(flipped[:, None], across[::-1], across)
    rows = top[:, None] + jnp.arange(height) - padding
    columns = left[:, None] + across - padding
    if reflect:
        rows, columns = _reflect(rows, height), _reflect(columns, width)
    # Negative indices would count from the end; past the end, zeros are filled in.
    rows = jnp.where(rows < 0, height, rows)
    columns = jnp.where(columns < 0, width, columns)
    samples = jnp.arange(count)[:, None, None]
    return images.at[samples, rows[:, :, None], columns[:, None, :]].get(
        mode="fill", fill_value=0
    )


def _reflect(indices: jax.Array, size: int) -> jax.Array:
    """Mirror indices at the first and the last pixel, which are not repeated."""
    return size - 1 - jnp.abs(size - 1 - jnp.abs(indices))


def mirror(
    images: jax.Array,  # (batch, height, width, channels)
    mirrored: jax.Array,  # bool (batch,)
) -> jax.Array:
    """Mirror images, left to right, where `mirrored`."""
    return jnp.where(mirrored[:, None, None, None], images[:, :, ::-1], images)


# Mixup and CutMix


class Mixing(NamedTuple):
    """How much is blended; see ``RecipeOptions`` and ``AugmentationOptions``."""

    mixup_alpha: float = 0.0
    cutmix_lambda: float = 1.0
    cutmix_alpha: float = 0.0
    """With mixup as well, each micro-batch gets one of the two."""


class MixDraw(NamedTuple):
    """The random choices for a micro-batch; None for a method that is off."""

    shares: jax.Array | None
    """Share of each sample in its blend with the one before, at least 0.5: (batch,)."""
    box: jax.Array | None
    """Top, bottom, left and right edge of the box to replace, in pixels."""


def draw_mix(
    mixing: Mixing, key: jax.Array, num_samples: int, height: int, width: int
) -> MixDraw:
    """Draw the shares of mixup and the box of CutMix.

    The sides of the box are √(1 - lambda) of the image's. Its center is uniform, and it is
    clipped to the image.
    """
    share_key, box_key = jax.random.split(jax.random.fold_in(key, _MIX_STREAM))
    shares = box = None
    if mixing.mixup_alpha > 0:
        shares = _draw_shares(share_key, mixing.mixup_alpha, num_samples)
    if mixing.cutmix_lambda < 1:
        side = math.sqrt(1 - mixing.cutmix_lambda)
        half = jnp.array([int(height * side) // 2, int(width * side) // 2])
        box = _draw_box(box_key, half, height, width)
    if mixing.cutmix_alpha > 0:
        box_key, kept_key, side_key, coin_key = jax.random.split(box_key, 4)
        kept = _draw_shares(kept_key, mixing.cutmix_alpha, 1)[0]
        kept = jnp.where(jax.random.bernoulli(side_key), kept, 1 - kept)
        sides = jnp.array([height, width]) * jnp.sqrt(1 - kept)
        box = _draw_box(box_key, sides.astype(jnp.int32) // 2, height, width)
        if shares is not None:
            cuts = jax.random.bernoulli(coin_key)
            shares, box = jnp.where(cuts, 1.0, shares), jnp.where(cuts, box, 0)
    return MixDraw(shares, box)


def _draw_box(key: jax.Array, half: jax.Array, height: int, width: int) -> jax.Array:
    """Return the edges of a box with half sides `half` and a random center."""
    sides = jnp.array([height, width])
    center = jax.random.randint(key, (2,), 0, sides)
    first, last = jnp.maximum(center - half, 0), jnp.minimum(center + half, sides)
    return jnp.stack([first[0], last[0], first[1], last[1]])


def _draw_shares(key: jax.Array, alpha: float, count: int) -> jax.Array:
    """Draw x from Beta(alpha, alpha) and return the larger of x and 1 - x.

    Looks up quantiles, because ``jax.random.beta`` uses rejection sampling: on a GPU, each
    iteration of its loop waits for the host.
    """
    table = jnp.asarray(_quantiles(alpha))
    place = jax.random.uniform(key, (count,)) * _NUM_QUANTILES
    below = jnp.clip(jnp.floor(place), 0, _NUM_QUANTILES - 1).astype(jnp.int32)
    fraction = place - below
    s = (1 - fraction) * table[below] + fraction * table[below + 1]
    return 1 - s ** (1 / alpha) / 2


@functools.cache
def _quantiles(alpha: float) -> np.ndarray:
    """Return quantiles of s, where s^(1/alpha) / 2 is the smaller of x and 1 - x.

    The density of s, (1 - s^(1/alpha) / 2)^(alpha - 1), has no poles, unlike that of the
    Beta distribution, so a table is accurate.
    """
    s = np.linspace(0, 1, 16 * _NUM_QUANTILES + 1)
    density = (1 - s ** (1 / alpha) / 2) ** (alpha - 1)
    mass = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    levels = np.linspace(0, 1, _NUM_QUANTILES + 1)
    return np.interp(levels, mass / mass[-1], s).astype(np.float32)


def mix_images(
    images: jax.Array,  # (batch, height, width, channels)
    draw: MixDraw,
) -> jax.Array:
    """Blend images in float32, and round once."""
    mixed = images.astype(jnp.float32)
    if draw.shares is not None:
        shares = draw.shares[:, None, None, None]
        mixed = shares * mixed + (1 - shares) * jnp.roll(mixed, _MIXUP_PARTNER, 0)
    if draw.box is not None:
        _, height, width, _ = images.shape
        top, bottom, left, right = draw.box
        rows, columns = jnp.arange(height)[:, None], jnp.arange(width)
        inside = (top <= rows) & (rows < bottom) & (left <= columns) & (columns < right)
        partner = jnp.roll(mixed, _cutmix_partner(len(images)), 0)
        mixed = jnp.where(inside[:, :, None], partner, mixed)
    return mixed.astype(images.dtype)


def mix_labels(
    labels: jax.Array,  # (batch,)
    draw: MixDraw,
    height: int,
    width: int,
) -> list[tuple[jax.Array, jax.Array]]:
    """Return the labels of each blended sample with their shares, which add up to 1."""
    parts = [(labels, jnp.ones(labels.shape, jnp.float32))]
    if draw.shares is not None:
        before = jnp.roll(labels, _MIXUP_PARTNER)
        parts = [(labels, draw.shares), (before, 1 - draw.shares)]
    if draw.box is None:
        return parts
    top, bottom, left, right = draw.box
    # The true share: clipping makes the box smaller than 1 - lambda.
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    partner = _cutmix_partner(len(labels))
    return [
        *((label, kept * share) for label, share in parts),
        *(
            (jnp.roll(label, partner), (1 - kept) * jnp.roll(share, partner))
            for label, share in parts
        ),
    ]


def _cutmix_partner(num_samples: int) -> int:
    """Return 2, so that the partner is not that of mixup; with two samples, 1."""
    return 2 if num_samples > 2 else 1


# Test-time augmentation


def classify_views(
    classify: Callable[[jax.Array], jax.Array],
    images: jax.Array,  # (batch, height, width, channels)
    views: TestTimeName,
) -> jax.Array:  # (batch, classes)
    """Return the mean logits of several views of each image.

    Args:
        classify: Returns the logits of images.
        images: The images, scaled.
        views: "none" for the image itself, "flip" for the image and its mirror image;
            "shift" also has both of the image shifted by one pixel up and left, and down
            and right, which count half as much. Images are mirrored at their edges.
    """
    if views == "none":
        return classify(images)

    def with_mirror_image(images: jax.Array) -> jax.Array:
        return (classify(images) + classify(images[:, :, ::-1])) / 2

    logits = with_mirror_image(images)
    if views == "flip":
        return logits
    _, height, width, _ = images.shape
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    shifted = [padded[:, at : at + height, at : at + width] for at in (0, 2)]
    return logits / 2 + sum(map(with_mirror_image, shifted)) / 4


class Preprocessing(NamedTuple):
    """Scaling to the range that models expect, and random crops and flips for training."""

    scale_on_host: Callable[[np.ndarray], np.ndarray]
    scale_on_device: Callable[[jax.Array], jax.Array]
    augment_on_host: tuple[Callable[[np.ndarray, np.random.Generator], Any], ...] = ()
    augment_on_device: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    max_pixel: int = 255
    """The value of white, before scaling."""


def get_preprocessing(
    dataset: str,
    *,
    normalize: bool = True,
    by_channel: bool = False,
    basics: Basics | None = None,
    arrays: Mapping[str, Any] | None = None,
) -> Preprocessing:
    """Return the preprocessing of a dataset.

    Args:
        dataset: The name of the dataset.
        normalize: Whether large images are normalized, or only their mean is subtracted.
        by_channel: Whether images of CIFAR are normalized with the statistics of the
            dataset, or each with its own.
        basics: The crops and flips (default: those that are usual for the dataset).
        arrays: The record of arrays passed from Python, if they are the dataset.
    """
    basics = basics or AugmentationOptions().basics(dataset)
    if arrays is not None:
        center, scale = (np.array(arrays[name], np.float32) for name in ("mean", "std"))
        return _small_preprocessing(dataset, basics)._replace(
            scale_on_host=lambda images: (as_float(images) - center) / scale,
            scale_on_device=lambda images: (images.astype(jnp.float32) - center) / scale,
        )
    if has_small_images(dataset):
        steps = _small_preprocessing(dataset, basics)
        if not by_channel:
            return steps
        statistics = {"mean": CATALOG[dataset].mean, "std": CATALOG[dataset].std}
        return steps._replace(
            scale_on_host=functools.partial(on_host.normalize, **statistics),
            scale_on_device=functools.partial(on_device.normalize, **statistics),
        )
    # The host has already cropped these images, and flipped them if it scales them.
    flip = on_device.random_flip if basics.flip else None
    if normalize:
        return Preprocessing(
            functools.partial(on_host.normalize, **_IMAGENET),
            functools.partial(on_device.normalize, **_IMAGENET),
            augment_on_device=flip,
        )
    mean = np.array(_IMAGENET_BYTES_MEAN, np.float32)
    return Preprocessing(
        lambda images: as_float(images) - mean,
        lambda images: images.astype(jnp.float32) - jnp.array(mean),
        augment_on_device=flip,
    )


def describe_scaling(
    dataset: str,
    *,
    normalize: bool = True,
    by_channel: bool = False,
    arrays: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the scaling of a dataset as numbers: ``(pixel * scale - mean) / std``.

    Images of CIFAR have no fixed mean and standard deviation, unless they are scaled
    `by_channel`: each is scaled by its own. The arguments are those of
    ``get_preprocessing``.
    """
    if arrays is not None:
        return {"scale": 1.0, "mean": list(arrays["mean"]), "std": list(arrays["std"])}
    if by_channel:
        known = CATALOG[dataset]
        return {"scale": 1 / 255, "mean": list(known.mean), "std": list(known.std)}
    if dataset.startswith("cifar"):
        return {"scale": 1 / 255, "mean": None, "std": None, "standardize_each_image": True}
    if has_small_images(dataset):
        largest = DIGITS_MAX_PIXEL if dataset == "digits" else 255
        return {"scale": 1 / largest, "mean": [0.0], "std": [1.0]}
    mean, std = _IMAGENET["mean"], _IMAGENET["std"]
    if not normalize:
        mean, std = tuple(m / 255 for m in _IMAGENET_BYTES_MEAN), (1 / 255,) * 3
    return {"scale": 1 / 255, "mean": list(mean), "std": list(std)}


def _small_preprocessing(dataset: str, basics: Basics) -> Preprocessing:
    padding, largest = basics.padding, DIGITS_MAX_PIXEL if dataset == "digits" else 255
    pad_and_crop = functools.partial(
        on_host.pad_and_crop, padding=padding, reflect=basics.reflect
    )
    on_host_steps = [
        *([on_host.by_sample(pad_and_crop)] if basics.crop else []),
        *([on_host.random_flip] if basics.flip else []),
    ]
    crop_and_flip = None
    flips_at_random = basics.flip and not basics.alternates
    if basics.crop or flips_at_random:
        crop_and_flip = functools.partial(
            on_device.random_crop_and_flip,
            padding=padding,
            crop=basics.crop,
            flip=flips_at_random,
            reflect=basics.reflect,
        )
    steps = Preprocessing(
        lambda images: as_float(images) / largest,
        lambda images: images.astype(jnp.float32) / largest,
        tuple(on_host_steps),
        crop_and_flip,
        largest,
    )
    if not dataset.startswith("cifar"):
        return steps
    return steps._replace(
        scale_on_host=on_host.standardize, scale_on_device=on_device.standardize
    )


def change_pixels(
    images: jax.Array,  # (batch, height, width, channels), not scaled
    key: jax.Array,
    options: AugmentationOptions,
    max_pixel: int,
) -> jax.Array:
    """Apply RandAugment or TrivialAugment, and color jitter, to images as bytes."""
    factor = 255 / max_pixel
    pixels = images
    if images.dtype != jnp.uint8 or max_pixel != 255:
        pixels = jnp.round(images.astype(jnp.float32) * factor).astype(jnp.uint8)
    if options.augment in ("randaugment", "trivialaugment"):
        choices = auto_augment.choose_operations(
            options.augment,
            key,
            magnitude=options.magnitude,
            shape=images.shape,
            num_ops=options.num_ops,
        )
        pixels = auto_augment.apply_operations(pixels, choices)
    if options.color_jitter > 0:
        pixels = auto_augment.color_jitter(pixels, key, options.color_jitter)
    return pixels if max_pixel == 255 else pixels.astype(jnp.float32) / factor


def as_float(images: np.ndarray) -> np.ndarray:
    """Convert bytes to float32."""
    return images.astype(np.float32)
