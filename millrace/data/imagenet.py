"""ImageNet and datasets in its layout: class folders, or TFRecord files."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.data.catalog import CATALOG, DatasetNotFound, dataset_not_found
from millrace.data.image_source import ImageSource, PrepareImage
from millrace.data.source import DatasetError
from millrace.data.tfrecord import TFRecords

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
_VALIDATION_FOLDERS = ("val", "validation", "test")
_NUM_SHARDS = {"train": 1024, "validation": 128}  # of the usual TFRecord conversion


class ImageSplits(NamedTuple):
    """Training and validation images, and facts about them."""

    training: ImageSource
    validation: ImageSource | None
    num_classes: int
    warning: str | None = None
    """What is unusual about the files, or None."""


def load_imagenet(
    path: str | Path,
    prepare: PrepareImage,
    *,
    needs_validation: bool = True,
    **options: Any,
) -> ImageSplits:
    """Return images from TFRecord files or from class folders at `path`.

    Args:
        path: Holds ``train-*`` and ``validation-*`` (TFRecord files of 1000 classes), or
            ``train/<class>/`` and ``val/<class>/`` (one class per folder).
        prepare: Decodes an image into an array, in both splits.
        needs_validation: Whether missing validation images are an error.
        options: ``num_threads`` and ``max_corrupt`` of `ImageSource`.
    """
    folder = Path(path)
    if _has_subfolders(folder / "train"):
        options["needs_validation"] = needs_validation
        return load_image_folder(folder, prepare, **options)
    shards = {split: _find_shards(folder, split) for split in ("train", "validation")}
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
        TFRecords(files, prepare, **options) if files else None for files in shards.values()
    )
    assert training is not None
    gaps = [gap for split, files in shards.items() for gap in _missing_shards(split, files)]
    warning = f"{folder} is not all of ImageNet: {'; '.join(gaps)}." if gaps else None
    return ImageSplits(training, validation, num_classes, warning)


def _find_shards(folder: Path, split: str) -> list[Path]:
    for parent in (folder, folder / split):
        if shards := sorted(path for path in parent.glob(f"{split}*") if path.is_file()):
            return shards
    return []


def _missing_shards(split: str, shards: Sequence[Path]) -> list[str]:
    """Compare the shards with the count in their names (``-of-01024``) or the usual one."""
    counts = [re.search(r"-of-(\d+)", shard.name) for shard in shards]
    totals = {int(count[1]) for count in counts if count is not None}
    expected = totals.pop() if len(totals) == 1 and all(counts) else _NUM_SHARDS[split]
    if not shards or len(shards) == expected:
        return []
    return [f"{len(shards)} of {expected} {split} files are present"]


def load_image_folder(
    path: str | Path,
    prepare: PrepareImage,
    *,
    needs_validation: bool = True,
    **options: Any,
) -> ImageSplits:
    """Return images from the class folders in ``train`` and ``val`` at `path`.

    Args:
        path: Holds ``train/<class>/`` and one of ``val``, ``validation`` or ``test``.
        prepare: Decodes an image into an array, in both splits.
        needs_validation: Whether missing validation images are an error.
        options: ``num_threads`` and ``max_corrupt`` of `ImageSource`.
    """
    folder = Path(path)
    validation_folder = next(
        (folder / split for split in _VALIDATION_FOLDERS if (folder / split).is_dir()), None
    )
    if not _has_subfolders(folder / "train"):
        files = ["train/<class>/*.jpg", "val/<class>/*.jpg (or .jpeg, .png, .webp)"]
        raise dataset_not_found("imagefolder", folder, files)
    if validation_folder is None and needs_validation:
        raise DatasetNotFound(
            f"{folder.resolve()} has train/, but no val/ (or validation/, or test/) with "
            "validation images. Use --no-validation to train without them."
        )
    if validation_folder is not None and not _has_subfolders(validation_folder):
        raise DatasetError(
            f"{validation_folder} has no class folders. Sort its images into them."
        )
    training = ImageFolder(folder / "train", prepare, **options)
    validation = None
    if validation_folder is not None:
        classes = training.classes
        validation = ImageFolder(validation_folder, prepare, classes=classes, **options)
    return ImageSplits(training, validation, len(training.classes))


class ImageFolder(ImageSource):
    """JPEG, PNG and WebP files, labeled by the folder they are in.

    Args:
        path: The folder of class folders. Images may be in subfolders of a class folder.
        prepare: Decodes an image into an array, for example `augment.prepare_image`.
        classes: The classes in the order of their labels; by default the folders in
            alphabetical order.
        options: ``num_threads`` and ``max_corrupt`` of `ImageSource`.
    """

    def __init__(
        self,
        path: str | Path,
        prepare: PrepareImage,
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
        super().__init__(len(self._files), prepare, **options)

    def name(self, index: int) -> str:
        return str(self.path / self._files[index])

    def read_encoded(self, index: int) -> tuple[bytes, int]:
        return (self.path / self._files[index]).read_bytes(), int(self.labels[index])


def _has_subfolders(folder: Path) -> bool:
    return folder.is_dir() and any(entry.is_dir() for entry in folder.iterdir())


def _find_images(folder: Path) -> Iterator[str]:
    """Yield the images in a folder, sorted: the order of the disk is not reproducible."""
    for root, subfolders, files in os.walk(folder):
        subfolders.sort()
        relative = os.path.relpath(root, folder)
        for file in sorted(files):
            if file.lower().endswith(_EXTENSIONS) and not file.startswith("."):
                yield file if relative == "." else f"{relative}/{file}"
