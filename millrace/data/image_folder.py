"""Pictures in class folders: ``train/<class>/*.jpg`` and ``val/<class>/*.jpg``."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.data.catalog import DatasetNotFound, not_found
from millrace.data.image_source import ImageSource, PerImage
from millrace.data.source import DatasetError

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
_VALIDATION_FOLDERS = ("val", "validation", "test")


class ImageFolder(ImageSource):
    """JPEG, PNG and WebP files, labeled by the folder they lie in.

    Args:
        path: The folder of class folders. Files may lie deeper in a class folder.
        prepare: Makes the array of each picture, for example `augment.imagenet_image`.
        classes: The classes in the order of their labels; the folders in alphabetical
            order where not given.
        options: ``num_threads`` and ``max_corrupt`` of `ImageSource`.
    """

    def __init__(
        self,
        path: str | Path,
        prepare: PerImage,
        *,
        classes: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self.path = Path(path)
        found = sorted(entry.name for entry in self.path.iterdir() if entry.is_dir())
        self.classes = tuple(found if classes is None else classes)
        if unknown := sorted(set(found) - set(self.classes)):
            raise DatasetError(
                f"{self.path} has the class {unknown[0]}, which training has not."
            )
        files = {name: list(_pictures(self.path / name)) for name in found}
        if empty := [name for name, pictures in files.items() if not pictures]:
            raise DatasetError(
                f"The class folder {self.path / empty[0]} has no pictures, which are files "
                f"that end in {', '.join(_EXTENSIONS[:-1])} or {_EXTENSIONS[-1]}."
            )
        # Texts, not paths: of 1.3 million, paths would take half a gigabyte.
        self._files = [f"{name}/{file}" for name in found for file in files[name]]
        number = {name: label for label, name in enumerate(self.classes)}
        self.labels = np.repeat(
            np.array([number[name] for name in found], np.int32),
            [len(files[name]) for name in found],
        )
        super().__init__(len(self._files), prepare, **options)

    def name(self, index: int) -> str:
        return str(self.path / self._files[index])

    def encoded(self, index: int) -> tuple[bytes, int]:
        return (self.path / self._files[index]).read_bytes(), int(self.labels[index])


def load_image_folder(
    path: str | Path,
    prepare: PerImage,
    *,
    name: str = "imagenet",
    needs_validation: bool = True,
    **options: Any,
) -> tuple[ImageFolder, ImageFolder | None]:
    """Return training and validation pictures from ``train`` and ``val`` in `path`.

    Args:
        path: Holds ``train/<class>/`` and one of ``val``, ``validation`` or ``test``.
        prepare: Makes the array of each picture of either.
        name: What to call the data set if it is not there.
        needs_validation: Whether it is an error that there are no validation pictures.
        options: ``num_threads`` and ``max_corrupt`` of `ImageSource`.
    """
    folder = Path(path)
    held_out = next(
        (folder / split for split in _VALIDATION_FOLDERS if (folder / split).is_dir()), None
    )
    if not has_classes(folder / "train"):
        raise not_found(
            name,
            folder,
            ["train/<class>/*.jpg", "val/<class>/*.jpg (or .jpeg, .png, .webp)"],
        )
    if held_out is None and needs_validation:
        raise DatasetNotFound(
            f"{folder.resolve()} has train/, but not val/ (or validation/, or test/) with "
            "pictures to validate with. --no-validation trains without."
        )
    if held_out is not None and not has_classes(held_out):
        raise DatasetError(f"{held_out} has no class folders; sort its pictures into them.")
    training = ImageFolder(folder / "train", prepare, **options)
    if held_out is None:
        return training, None
    validation = ImageFolder(held_out, prepare, classes=training.classes, **options)
    return training, validation


def has_classes(folder: Path) -> bool:
    """Whether a folder has folders in it."""
    return folder.is_dir() and any(entry.is_dir() for entry in folder.iterdir())


def _pictures(folder: Path) -> Iterator[str]:
    """Yield the pictures in a folder, in an order that does not depend on the disk."""
    for root, subfolders, files in os.walk(folder):
        subfolders.sort()
        relative = os.path.relpath(root, folder)
        for file in sorted(files):
            if file.lower().endswith(_EXTENSIONS) and not file.startswith("."):
                yield file if relative == "." else f"{relative}/{file}"
