"""ImageNet, or anyone's pictures like it, in whichever of its two forms it lies there."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from millrace.data.catalog import CATALOG, DatasetNotFound, not_found
from millrace.data.image_folder import has_classes, load_image_folder
from millrace.data.image_source import ImageSource, PerImage
from millrace.data.tfrecord import load_tfrecords

_NUM_SHARDS = {"train": 1024, "validation": 128}


class Pictures(NamedTuple):
    """The two splits, and what there is to say of them."""

    training: ImageSource
    validation: ImageSource | None
    num_classes: int
    warning: str | None = None


def load_imagenet(
    path: str | Path, prepare: PerImage, *, needs_validation: bool = True, **options: Any
) -> Pictures:
    """Return pictures from TFRecord files or from class folders at `path`.

    Args:
        path: Holds ``train-*`` and ``validation-*`` (TFRecord files of 1000 classes), or
            ``train/<class>/`` and ``val/<class>/`` (as many classes as folders).
        prepare: Makes the array of each picture of either split.
        needs_validation: Whether there must be some to validate with.
        options: ``num_threads`` and ``max_corrupt`` of `ImageSource`.
    """
    folder = Path(path)
    options["needs_validation"] = needs_validation
    if has_classes(folder / "train"):
        return load_folders(folder, prepare, name="imagenet", **options)
    num_classes = CATALOG["imagenet"].num_classes
    try:
        splits = load_tfrecords(folder, prepare, num_classes=num_classes, **options)
    except DatasetNotFound:
        raise not_found(
            "imagenet",
            folder,
            [
                "train-* and validation-* (TFRecord files)",
                "or train/<class>/*.JPEG and val/<class>/*.JPEG",
            ],
        ) from None
    training, validation = splits
    gaps = _missing_shards("train", training.files)
    if validation is not None:
        gaps += _missing_shards("validation", validation.files)
    warning = f"{folder} is not all of ImageNet: {'; '.join(gaps)}." if gaps else None
    return Pictures(training, validation, num_classes, warning)


def load_folders(
    path: str | Path, prepare: PerImage, *, name: str = "imagefolder", **options: Any
) -> Pictures:
    """Return the pictures of class folders, as `load_image_folder` finds them."""
    training, validation = load_image_folder(path, prepare, name=name, **options)
    return Pictures(training, validation, len(training.classes))


def _missing_shards(split: str, shards: Sequence[Path]) -> list[str]:
    """Say what is missing by the files' own count, ``-of-01024``, or by the usual one."""
    counts = [re.search(r"-of-(\d+)", shard.name) for shard in shards]
    totals = {int(count[1]) for count in counts if count is not None}
    expected = totals.pop() if len(totals) == 1 and all(counts) else _NUM_SHARDS[split]
    if len(shards) == expected:
        return []
    return [f"{len(shards)} of {expected} {split} files are there"]
