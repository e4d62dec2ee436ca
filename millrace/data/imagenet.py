"""Opens image datasets: class folders, and every other layout of `layouts`."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from millrace.data.catalog import CATALOG, DatasetNotFound, dataset_not_found
from millrace.data.decode_worker import ReadSample
from millrace.data.decoding import Crop
from millrace.data.huggingface import HuggingFaceImages, open_splits
from millrace.data.image_source import ImageSource
from millrace.data.layouts import (
    LAYOUTS,
    VALIDATION_NAMES,
    Layout,
    find_layout,
    find_shards,
    find_tfds,
    find_tfds_shards,
    has_subfolders,
)
from millrace.data.packed import PackedImages, read_manifest
from millrace.data.source import DatasetError
from millrace.data.tfrecord import TFDS, TFRecords
from millrace.data.webdataset import WebDataset

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
_NUM_SHARDS = {"train": 1024, "validation": 128}  # of the usual TFRecord conversion


class ImageSplits(NamedTuple):
    """Training and validation images, and facts about them."""

    training: ImageSource
    validation: ImageSource | None
    num_classes: int
    warning: str | None = None
    """What is unusual about the files, or None."""


def load_imagenet(
    path: str | Path, crop: Crop, *, needs_validation: bool = True, **options: Any
) -> ImageSplits:
    """Return images from TFRecord files of 1000 classes, or as `load_images` does.

    Args:
        path: Holds ``train-*`` and ``validation-*``, or another layout.
        crop: How images are cropped, in both splits.
        needs_validation: Whether missing validation images are an error.
        options: ``num_workers`` and ``max_corrupt`` of `ImageSource`.
    """
    folder = Path(path)
    options["needs_validation"] = needs_validation
    if (version := find_tfds(folder, "imagenet")) is not None:
        return _load_tfds(version, crop, **options)
    if find_layout(folder) not in (None, "tfrecord"):
        return load_images(folder, crop, **options)
    return _load_tfrecords(folder, crop, **options)


def load_images(
    path: str | Path, crop: Crop, *, needs_validation: bool = True, **options: Any
) -> ImageSplits:
    """Return images from a folder in any of the layouts of `layouts.LAYOUTS`.

    Args:
        path: The folder.
        crop: How images are cropped, in both splits.
        needs_validation: Whether missing validation images are an error.
        options: ``num_workers`` and ``max_corrupt`` of `ImageSource`.
    """
    folder = Path(path)
    layout = find_layout(folder)
    if layout is None:
        raise dataset_not_found("imagefolder", folder, LAYOUTS)
    splits = _LOADERS[layout](folder, crop, needs_validation=needs_validation, **options)
    if splits.validation is None and needs_validation:
        raise DatasetNotFound(
            f"{folder.resolve()} has training images, but none for validation (val, "
            "validation or test). Use --no-validation to train without them."
        )
    return splits


def _load_tfrecords(
    folder: Path, crop: Crop, *, needs_validation: bool, **options: Any
) -> ImageSplits:
    shards = {split: find_shards(folder, (split,)) for split in ("train", "validation")}
    if not shards["train"] or (needs_validation and not shards["validation"]):
        raise dataset_not_found(
            "imagenet",
            folder,
            [
                "train-* and validation-* (TFRecord files)",
                "or train/<class>/*.JPEG and val/<class>/*.JPEG",
            ],
        )
    options["num_classes"] = num_classes = CATALOG["imagenet"].num_classes
    training, validation = (
        TFRecords(files, crop, **options) if files else None for files in shards.values()
    )
    assert training is not None
    gaps = [gap for split, files in shards.items() for gap in _missing_shards(split, files)]
    warning = f"{folder} is not all of ImageNet: {'; '.join(gaps)}." if gaps else None
    return ImageSplits(training, validation, num_classes, warning)


def _load_tfds(
    folder: Path, crop: Crop, *, needs_validation: bool, **options: Any
) -> ImageSplits:
    """Return ImageNet as TensorFlow Datasets has written it."""
    splits = ("train", "validation")
    shards = {split: find_tfds_shards(folder, "imagenet", split) for split in splits}
    if needs_validation and not shards["validation"]:
        raise DatasetNotFound(
            f"{folder.resolve()} has no validation images. Use --no-validation to train "
            "without them."
        )
    options |= {"num_classes": CATALOG["imagenet"].num_classes, "features": TFDS}
    training, validation = (
        TFRecords(files, crop, **options) if files else None for files in shards.values()
    )
    assert training is not None, "checked by find_tfds"
    gaps = [gap for split, files in shards.items() for gap in _missing_shards(split, files)]
    warning = f"{folder} is not all of ImageNet: {'; '.join(gaps)}." if gaps else None
    return ImageSplits(training, validation, options["num_classes"], warning)


def _missing_shards(split: str, shards: Sequence[Path]) -> list[str]:
    """Compare the shards with the count in their names (``-of-01024``) or the usual one."""
    counts = [re.search(r"-of-(\d+)", shard.name) for shard in shards]
    totals = {int(count[1]) for count in counts if count is not None}
    expected = totals.pop() if len(totals) == 1 and all(counts) else _NUM_SHARDS[split]
    if not shards or len(shards) == expected:
        return []
    return [f"{len(shards)} of {expected} {split} files are present"]


def _load_folders(
    folder: Path, crop: Crop, *, needs_validation: bool, **options: Any
) -> ImageSplits:
    """Return images from class folders in ``train`` and ``val``."""
    del needs_validation
    validation_folder = next(
        (folder / split for split in VALIDATION_NAMES if (folder / split).is_dir()), None
    )
    if validation_folder is not None and not has_subfolders(validation_folder):
        raise DatasetError(
            f"{validation_folder} has no class folders. Sort its images into them."
        )
    training = ImageFolder(folder / "train", crop, **options)
    validation = None
    if validation_folder is not None:
        classes = training.classes
        validation = ImageFolder(validation_folder, crop, classes=classes, **options)
    return ImageSplits(training, validation, len(training.classes))


def _load_webdataset(
    folder: Path, crop: Crop, *, needs_validation: bool, **options: Any
) -> ImageSplits:
    del needs_validation
    training = WebDataset(find_shards(folder, ("train",), ".tar"), crop, **options)
    num_classes = int(training.labels.max()) + 1
    files = find_shards(folder, VALIDATION_NAMES, ".tar")
    if not files:
        return ImageSplits(training, None, num_classes)
    validation = WebDataset(files, crop, **options)
    if (largest := int(validation.labels.max())) >= num_classes:
        raise DatasetError(
            f"{folder} has the class {largest} in validation, but training has only the "
            f"classes 0 to {num_classes - 1}."
        )
    return ImageSplits(training, validation, num_classes)


def _load_huggingface(
    folder: Path, crop: Crop, *, needs_validation: bool, **options: Any
) -> ImageSplits:
    del needs_validation
    training, validation = (
        None if split is None else HuggingFaceImages(split, crop, **options)
        for split in open_splits(folder)
    )
    assert training is not None
    return ImageSplits(training, validation, len(training.classes))


def _load_packed(
    folder: Path, crop: Crop, *, needs_validation: bool, **options: Any
) -> ImageSplits:
    del needs_validation
    manifest = read_manifest(folder)
    options["num_classes"] = manifest.num_classes
    training, validation = (
        PackedImages(folder, manifest, split, crop, **options)
        if manifest.num_samples(split)
        else None
        for split in ("train", "validation")
    )
    if training is None:
        raise DatasetError(f"{folder} has no training images.")
    return ImageSplits(training, validation, manifest.num_classes)


_LOADERS: dict[Layout, Callable[..., ImageSplits]] = {
    "folders": _load_folders,
    "webdataset": _load_webdataset,
    "huggingface": _load_huggingface,
    "packed": _load_packed,
    "tfrecord": _load_tfrecords,
}


class ImageFolder(ImageSource):
    """JPEG, PNG and WebP files, labeled by the folder they are in.

    Args:
        path: The folder of class folders. Images may be in subfolders of a class folder.
        crop: How images are cropped.
        classes: The classes in the order of their labels; by default the folders in
            alphabetical order.
        options: ``num_workers`` and ``max_corrupt`` of `ImageSource`.
    """

    def __init__(
        self,
        path: str | Path,
        crop: Crop,
        *,
        classes: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self.path = Path(path)
        folders = sorted(entry.name for entry in self.path.iterdir() if entry.is_dir())
        self.classes = tuple(folders if classes is None else classes)
        if unknown := sorted(set(folders) - set(self.classes)):
            raise DatasetError(
                f"{self.path} has the class {unknown[0]}, which training does not have."
            )
        files = {name: list(_find_images(self.path / name)) for name in folders}
        if empty := [name for name, images in files.items() if not images]:
            raise DatasetError(
                f"The class folder {self.path / empty[0]} has no images, which are files "
                f"that end in {', '.join(_EXTENSIONS[:-1])} or {_EXTENSIONS[-1]}."
            )
        # Strings, because 1.3 million Path objects would take half a gigabyte.
        self._files = [f"{name}/{file}" for name in folders for file in files[name]]
        label = {name: number for number, name in enumerate(self.classes)}
        self.labels = np.repeat(
            np.array([label[name] for name in folders], np.int32),
            [len(files[name]) for name in folders],
        )
        super().__init__(len(self._files), crop, **options)

    def name(self, index: int) -> str:
        return str(self.path / self._files[index])

    @property
    def reader(self) -> ReadSample:
        return _read_file

    def locate(self, index: int) -> tuple[str, int]:
        return f"{self.path}/{self._files[index]}", int(self.labels[index])


def _read_file(location: tuple[str, int]) -> tuple[bytes, int]:
    path, label = location
    with open(path, "rb", buffering=0) as file:
        return file.read(), label


def _find_images(folder: Path) -> Iterator[str]:
    """Yield the images in a folder, sorted: the order of the disk is not reproducible."""

    def fail(error: OSError) -> NoReturn:
        raise error  # by default, a folder that cannot be read counts as empty

    for root, subfolders, files in os.walk(folder, onerror=fail):
        subfolders.sort()
        relative = os.path.relpath(root, folder)
        for file in sorted(files):
            if file.lower().endswith(_EXTENSIONS) and not file.startswith("."):
                yield file if relative == "." else f"{relative}/{file}"
