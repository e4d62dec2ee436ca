"""Augmented training images to look at: in the report, and ``cnn show-augmentation``."""

from pathlib import Path

import jax
import numpy as np

from millrace.apps.cnn import data
from millrace.apps.cnn.augment import get_preprocessing
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.commands import ShowAugmentationConfig
from millrace.apps.cnn.data import ImageData
from millrace.apps.cnn.mistakes import class_names
from millrace.apps.cnn.models.spec import has_small_images
from millrace.apps.cnn.program import build_inputs
from millrace.config import writing
from millrace.data.catalog import CATALOG
from millrace.data.decoding import NUM_DRAWS
from millrace.data.image_source import ImageSource
from millrace.durable import replacing
from millrace.program.compiling import jit
from millrace.report.sections import Gallery, encode_png, save_section
from millrace.run.run import Run

NUM_SHOWN = 16
"""Augmented images in a report."""

_SMALLEST_SHOWN = 64  # pixels; smaller images are enlarged
_LARGEST_SHOWN = 160
_GAP = 4


def report_augmented(config: CnnConfig, run: Run, images: ImageData) -> None:
    """Add augmented training images to the report, unless nothing is augmented."""
    description = data.describe_augmentation(config)
    if description == "none" or config.data.synthetic or jax.process_index():
        return
    run.console.status("augmenting images for the report")
    indices = np.linspace(0, len(images.training) - 1, NUM_SHOWN).round().astype(int)
    shown, labels = augment_samples(config, images, indices, config.run.seed)
    names = class_names(images, config.resolved_dataset)
    pictures = [
        {"png": encode_png(image, most=_LARGEST_SHOWN), "caption": names[label]}
        for image, label in zip(shown, labels, strict=True)
    ]
    gallery = Gallery(
        title="What the network sees",
        note=f"Training images after augmentation: {description}.",
        pictures=pictures,
    )
    save_section(run.directory.path, "3-augmented", gallery)


def show_augmentation(config: ShowAugmentationConfig) -> None:
    """Write a grid: each row has an original image and augmented versions of it."""
    train_config = config.train_config
    images = data.load(train_config)
    number = min(config.num_images, len(images.training))
    chosen = np.random.default_rng(config.seed).choice(
        len(images.training), number, replace=False
    )
    # Versions of one image are not neighbors, because mixup blends neighbors.
    versions, _ = augment_samples(
        train_config, images, np.tile(chosen, config.num_versions), config.seed
    )
    versions = versions.reshape(config.num_versions, number, *versions.shape[1:])
    originals = _enlarge(_original_bytes(train_config, images, chosen))
    _save_grid(np.concatenate([originals[None], versions]), config.output)
    print(data.describe(images, train_config))
    print(f"augmentation: {data.describe_augmentation(train_config)}")
    print(f"{config.output}: {number} images, each with {config.num_versions} versions")


def augment_samples(
    config: CnnConfig, images: ImageData, indices: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return training samples as the network gets them, to look at, and their labels.

    Args:
        config: Says how they are augmented.
        images: The dataset.
        indices: The samples, which are blended as one micro-batch.
        seed: For the random numbers.

    Returns:
        The images, uint8 (samples, height, width, channels), and the labels.
    """
    batch = _read_training(images, indices, np.random.default_rng(seed))
    device = jax.local_devices()[0]
    given = {"image": batch["image"]}
    if config.augmentation.alternating_flip:
        given |= data.flips_by_epoch(len(images.training), seed)(indices, 0)
    given, key = jax.device_put((given, jax.random.key(seed)), device)
    inputs = jit(build_inputs(config, images))(given, key)
    values = np.asarray(jax.device_get(inputs), np.float32)
    return _enlarge(_to_bytes(values, config)), batch["label"]


def _read_training(
    images: ImageData, indices: np.ndarray, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return training samples with the random crops and flips of the host."""
    if isinstance(images.training, ImageSource):
        draws = generator.random((len(indices), NUM_DRAWS), np.float32)
        return images.training.read(indices, draws)
    batch = images.training[indices]
    return batch if images.transform is None else images.transform(batch, generator)


def _to_bytes(values: np.ndarray, config: CnnConfig) -> np.ndarray:
    """Undo the scaling; images with mean 0 and deviation 1 get a mean of 128 instead."""
    dataset, arrays = config.resolved_dataset, config.data.arrays
    if arrays is not None:
        values = values * np.array(arrays["std"]) + np.array(arrays["mean"])
        if arrays["types"]["image"] != "uint8":  # of any scale
            values = 255 * (values - values.min()) / max(np.ptp(values), 1e-9)
    elif dataset.startswith("cifar"):
        values = 128 + 64 * values
    elif has_small_images(dataset):
        values = 255 * values
    else:
        steps = get_preprocessing(dataset, **config.data.scaling)
        black, white = steps.scale_on_host(np.array([[[[0] * 3]], [[[255] * 3]]], np.uint8))
        values = (values - black) / (white - black) * 255
    return np.clip(np.round(values), 0, 255).astype(np.uint8)


def _original_bytes(
    config: CnnConfig, images: ImageData, indices: np.ndarray
) -> np.ndarray:
    """Return unchanged images; those of files are cropped at the center."""
    dataset = config.resolved_dataset
    pixels = images.training[indices]["image"].astype(np.float32)
    largest = get_preprocessing(dataset).max_pixel if dataset in CATALOG else 255
    return np.round(pixels * (255 / largest)).astype(np.uint8)


def _enlarge(
    pixels: np.ndarray,  # (samples, height, width, channels)
) -> np.ndarray:
    factor = max(1, _SMALLEST_SHOWN // pixels.shape[2])
    return pixels.repeat(factor, 1).repeat(factor, 2)


def _save_grid(
    pixels: np.ndarray,  # (columns, rows, height, width, channels)
    path: Path,
) -> None:
    """Write images as one file, with white gaps; large ones are scaled down."""
    from PIL import Image

    columns, rows, height, width, channels = pixels.shape
    largest = max(height, width)
    scale = min(1.0, _LARGEST_SHOWN / largest)
    size = round(width * scale), round(height * scale)
    step = size[0] + _GAP, size[1] + _GAP
    mode = "L" if channels == 1 else "RGB"
    grid = Image.new(mode, (columns * step[0] - _GAP, rows * step[1] - _GAP), "white")
    for column in range(columns):
        for row in range(rows):
            image = pixels[column, row]
            shown = Image.fromarray(image[..., 0] if channels == 1 else image)
            grid.paste(shown.resize(size), (column * step[0], row * step[1]))
    kind = Image.registered_extensions().get(path.suffix.lower(), "PNG")
    with writing(path), replacing(path, binary=True) as file:
        grid.save(file, kind)
