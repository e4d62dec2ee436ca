"""What the CNN application can be told about its data. Imports nothing heavy."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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

DEFAULT_IMAGE_SIZE = 224
_PICTURES = ("imagenet", "imagefolder")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which samples, and how they reach the device."""

    dataset: DatasetName | None = None
    """Data set to train and validate on: digits (embedded), mnist, fashion-mnist, cifar10,
    cifar100, imagenet (TFRecord files or class folders; gc-imagenet is the same), or
    imagefolder (your own pictures in train/CLASS/ and val/CLASS/). Default: cifar10, or
    digits for digits_cnn."""
    dataset_path: Path = field(default=Path("."), metadata={"aliases": ("--data-dir",)})
    """Folder that holds the data set, or of imagenet also one that holds a folder
    imagenet-data. Where it has none, what millrace data fetch has downloaded is used."""
    image_size: int | None = None
    """Side of the square that pictures of imagenet and imagefolder are cropped to, in
    pixels (default: 224, of efficientnet what its size was made for)."""
    normalize_input: bool = field(
        default=True, metadata={"aliases": ("--normalise-input",)}
    )
    """Scale pictures of imagenet and imagefolder to mean 0 and standard deviation 1 in
    each channel; if not, only the mean is subtracted."""
    synthetic_data: Literal["host", "device", "ipu"] | None = field(
        default=None, metadata={"bare": "device"}
    )
    """Train on random pictures of the data set's shape, to measure speed; no files are
    needed. host: made once and sent like real ones; device (or ipu, or
    nothing said): made once on the device, and nothing is sent."""
    max_corrupt: int | None = field(default=None, metadata={"may_change": True})
    """Pictures of a split that may be unreadable before the run fails; others take their
    place (default: one in a thousand, at least 10)."""
    accelerator_side_preprocess: bool = False
    """Scale, crop and flip images on the device instead of the host. (Pictures of imagenet
    and imagefolder are always decoded and cropped on the host.)"""
    eight_bit_transfer: bool = False
    """Send images to the device as bytes; needs accelerator_side_preprocess."""
    pipeline_num_parallel: int = field(
        default=2, metadata={"may_change": True, "may_differ": True}
    )
    """Batches prepared at the same time on the host."""

    def check_data_options(self, dataset: str) -> None:
        """Raise on what cannot be, or does not go together."""
        if self.max_corrupt is not None and self.max_corrupt < 0:
            raise ValueError(f"max_corrupt must be 0 or more, got {self.max_corrupt}.")
        if self.eight_bit_transfer and not self.accelerator_side_preprocess:
            raise ValueError(
                "eight_bit_transfer leaves images as they are read for the device to "
                "prepare, so accelerator_side_preprocess must be on as well."
            )
        if not self.normalize_input and dataset not in _PICTURES:
            raise ValueError(
                f"normalize_input is for {' and '.join(_PICTURES)}; images of {dataset} "
                "are scaled in a way of their own."
            )
        if self.image_size is None:
            return
        if dataset not in _PICTURES:
            raise ValueError(
                f"image_size is for {' and '.join(_PICTURES)}; images of {dataset} keep "
                "their size."
            )
        if self.image_size < 8:
            raise ValueError(f"image_size must be at least 8, got {self.image_size}.")

    @property
    def synthetic(self) -> Literal["host", "device"] | None:
        """Where synthetic data are made, in one word each; None for real data."""
        return "device" if self.synthetic_data == "ipu" else self.synthetic_data
