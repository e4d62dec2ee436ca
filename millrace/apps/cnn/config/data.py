"""Options of the data. Imports nothing heavy."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from millrace.data.layouts import TFDS_NAMES, find_layout, find_tfds_shards

DatasetName = Literal[
    "digits",
    "mnist",
    "fashion-mnist",
    "cifar10",
    "cifar100",
    "imagenet",
    "gc-imagenet",
    "imagefolder",
]

IMAGE_FILES = ("imagenet", "imagefolder")
"""Datasets of image files, which are decoded when they are read."""
_PARALLEL_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Data options."""

    dataset: DatasetName | None = None
    """Dataset to use. The digits are bundled. imagenet: TFRecord files or class folders
    (gc-imagenet is the same). imagefolder: your own images in train/CLASS/ and val/CLASS/,
    packed by millrace data pack, in WebDataset shards, or a Hugging Face dataset. If not
    given: what is found in dataset_path, otherwise digits for digits_cnn and cifar10 for
    other models."""
    dataset_path: Path = field(default=Path("."), metadata={"aliases": ("--data-dir",)})
    """Folder of the dataset; for imagenet, the folder that contains imagenet-data works
    too, and so does a folder of TensorFlow Datasets. If the dataset is not there, the copy
    downloaded by millrace data fetch is used, or one in ~/tensorflow_datasets
    ($TFDS_DATA_DIR)."""
    fetch: bool = field(
        default=True,
        metadata={"negations": ("--no-fetch",), "may_change": True, "may_differ": True},
    )
    """Download mnist, fashion-mnist, cifar10 or cifar100 if it is nowhere to be found, as
    millrace data fetch does. MILLRACE_NO_FETCH=1 in the environment forbids it too."""
    image_size: int | None = None
    """Height and width that images of imagenet and imagefolder are cropped to (default:
    224, or the size that an efficientnet was designed for)."""
    normalize_input: bool = field(
        default=True, metadata={"aliases": ("--normalise-input",)}
    )
    """Normalize images of imagenet and imagefolder to mean 0 and standard deviation 1 per
    channel; if False, only subtract the mean."""
    normalize_channels: bool = False
    """Normalize images of cifar10 and cifar100 with the mean and standard deviation of each
    channel over all images, instead of each image with its own."""
    synthetic_data: Literal["host", "device", "ipu"] | None = field(
        default=None, metadata={"bare": "device"}
    )
    """Use random images in the shape of the dataset to measure speed; no files are
    needed. host: generated once and sent like real ones; device (or ipu, or no value):
    generated once on the device, and nothing is sent."""
    no_dataset_cache: bool | None = field(
        default=None, metadata={"may_change": True, "may_differ": True}
    )
    """Decode validation images of imagenet and imagefolder again each time. Otherwise they
    stay in memory once they are decoded and cropped, if all of them fit into
    dataset_cache_gib. (Small images are always in memory. Random crops of training images
    are decoded in every epoch, from files that the operating system keeps in memory.)"""
    dataset_cache_gib: float = field(
        default=2.0, metadata={"may_change": True, "may_differ": True}
    )
    """GiB of memory for decoded validation images. ImageNet at 224 x 224 takes 7.0."""
    max_corrupt: int | None = field(default=None, metadata={"may_change": True})
    """Unreadable images per split before the run fails; each one is replaced by another
    (default: one in a thousand, at least 10)."""
    accelerator_side_preprocess: bool = False
    """Scale, crop and flip images on the device instead of the host. (Images of imagenet
    and imagefolder are always decoded and cropped on the host, and scaled on the device;
    for them, only flips move.)"""
    eight_bit_transfer: bool = False
    """Send images to the device as bytes, as images of imagenet and imagefolder always are;
    needs accelerator_side_preprocess."""
    num_workers: int | None = field(
        default=None, metadata={"may_change": True, "may_differ": True}
    )
    """Processes that decode images of imagenet and imagefolder; 0 decodes in threads
    (default: one per core, less one from 4 cores on; threads for up to 5,000 images). The
    batches do not depend on it."""
    pipeline_num_parallel: int | None = field(
        default=None, metadata={"may_change": True, "may_differ": True}
    )
    """Images that the host prepares in parallel, rounded up to whole batches; at least
    twice that many for imagenet and imagefolder (default: two batches)."""

    arrays: dict[str, Any] | None = field(default=None, metadata={"hidden": True})
    """Record of arrays passed from Python: their shapes and a checksum."""

    def __post_init__(self) -> None:
        if self.arrays is not None and (self.dataset or self.synthetic_data):
            raise ValueError("Give data or dataset, not both.")
        if self.num_workers is not None and self.num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, got {self.num_workers}.")
        if not 0 <= self.dataset_cache_gib < math.inf:
            raise ValueError(
                f"dataset_cache_gib must be 0 or more, got {self.dataset_cache_gib:g}."
            )
        images = self.pipeline_num_parallel
        if images is not None and images < 1:
            raise ValueError(f"pipeline_num_parallel must be at least 1, got {images}.")
        if self.max_corrupt is not None and self.max_corrupt < 0:
            raise ValueError(f"max_corrupt must be 0 or more, got {self.max_corrupt}.")
        if self.eight_bit_transfer and not self.accelerator_side_preprocess:
            raise ValueError(
                "eight_bit_transfer sends unprocessed images to the device, so "
                "accelerator_side_preprocess must be on as well."
            )
        if self.image_size is not None and self.image_size < 8:
            raise ValueError(f"image_size must be at least 8, got {self.image_size}.")

    def parallel_batches(self, batch_size: int) -> int:
        """Return how many batches of this size the host prepares in parallel."""
        if (images := self.pipeline_num_parallel) is None:
            return _PARALLEL_BATCHES
        return -(-images // batch_size)

    @property
    def scaling(self) -> dict[str, Any]:
        """How images are scaled; see ``get_preprocessing``."""
        return {"normalize": self.normalize_input, "by_channel": self.normalize_channels}

    @property
    def synthetic(self) -> Literal["host", "device"] | None:
        """Where synthetic data are generated; None for real data."""
        return "device" if self.synthetic_data == "ipu" else self.synthetic_data


def find_dataset(values: dict[str, Any]) -> dict[str, Any]:
    """Add the dataset if only its folder is given, and the folder holds images."""
    folder = values.get("dataset_path")
    if folder is None or values.get("dataset") or values.get("synthetic_data"):
        return values
    for name in TFDS_NAMES:
        if find_tfds_shards(folder, name, "train"):
            return {**values, "dataset": name}
    layout = find_layout(folder)
    if layout is None:
        return values
    return {**values, "dataset": "imagenet" if layout == "tfrecord" else "imagefolder"}
