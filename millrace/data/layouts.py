"""Recognizes how the files of an image dataset are laid out. Imports nothing heavy."""

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

Layout = Literal["packed", "huggingface", "folders", "webdataset", "tfrecord"]

MANIFEST = "dataset.json"
"""The file that describes a dataset written by ``millrace data pack``."""
VALIDATION_NAMES = ("val", "validation", "test")
"""Names of a validation split, in the order of preference."""

_TFRECORD = re.compile(r"\d$|\.tfrecords?$")
_OTHER_SUFFIXES = (
    *(".tar", ".parquet", ".idx", ".json", ".arrow"),
    *(".md", ".txt", ".csv", ".log", ".yml", ".yaml", ".py", ".sh"),
)
"""Ends of names of files that are no TFRecord files, in layouts or next to them."""

LAYOUTS = (
    "train/<class>/*.jpg and val/<class>/*.jpg (or .jpeg, .png, .webp)",
    "train*.tar and val*.tar (WebDataset)",
    f"{MANIFEST} (millrace data pack)",
    "dataset_dict.json or train*.parquet (Hugging Face)",
    "train-* and validation-* (TFRecord files of ImageNet)",
)
"""What is looked for, in words."""


def find_layout(folder: Path) -> Layout | None:
    """Return how a folder holds images; None if it does not look like any layout."""
    if (folder / MANIFEST).is_file():
        return "packed"
    if (folder / "dataset_dict.json").is_file():
        return "huggingface"
    if has_subfolders(folder / "train"):
        return "folders"
    if find_shards(folder, ("train",), ".tar"):
        return "webdataset"
    if find_shards(folder, ("train",), ".parquet"):
        return "huggingface"
    # Other datasets have files that begin with train as well, such as MNIST.
    if any(_TFRECORD.search(path.name) for path in find_shards(folder, ("train",))):
        return "tfrecord"
    return None


TFDS_NAMES = {
    "mnist": "mnist",
    "fashion-mnist": "fashion_mnist",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "imagenet": "imagenet2012",
}
"""What TensorFlow Datasets calls our datasets."""
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def find_tfds(folder: Path, name: str) -> Path | None:
    """Return where TensorFlow Datasets has written a dataset, if it has.

    Args:
        folder: Its data directory, the folder of the dataset, or that of a version. The
            newest version is taken.
        name: The dataset, as we call it.
    """
    if (tfds_name := TFDS_NAMES.get(name)) is None:
        return None
    candidates = [folder, *_versions(folder), *_versions(folder / tfds_name)]
    return next(
        (path for path in candidates if find_tfds_shards(path, name, "train")), None
    )


def find_tfds_shards(folder: Path, name: str, split: str) -> list[Path]:
    """Return the files of a split in the folder of a version, sorted."""
    return sorted(folder.glob(f"{TFDS_NAMES[name]}-{split}.tfrecord-*-of-*"))


def _versions(folder: Path) -> list[Path]:
    """Return the folders of versions, the newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _VERSION.fullmatch(path.name)]
    return sorted(found, key=lambda p: [int(n) for n in p.name.split(".")], reverse=True)


def count_images(folder: Path, *, at_most: int) -> int | None:
    """Count the training images in class folders or in a packed dataset.

    Args:
        folder: The folder of the dataset.
        at_most: Stop counting files here.

    Returns:
        The number of images, or None for other layouts.
    """
    layout = find_layout(folder)
    if layout == "packed":
        try:
            shards = json.loads((folder / MANIFEST).read_bytes())["shards"]["train"]
            return sum(shard[1] for shard in shards)
        except (OSError, ValueError, LookupError, TypeError):
            return None  # the reader of the dataset has a better message
    if layout != "folders":
        return None
    images = (path for path in (folder / "train").glob("*/*") if path.is_file())
    return sum(1 for _ in itertools.islice(images, at_most))


def has_subfolders(folder: Path) -> bool:
    """Whether a folder contains other folders."""
    return folder.is_dir() and any(entry.is_dir() for entry in folder.iterdir())


def find_shards(folder: Path, names: Iterable[str], suffix: str = "") -> list[Path]:
    """Return the files of a split, sorted: ``NAME*`` in the folder, in NAME or in data.

    Args:
        folder: The folder of the dataset.
        names: Names of the split; the first one with files counts.
        suffix: The end of the names of the files. By default, files of the other layouts,
            indices, texts and programs such as ``train.py`` are left out.
    """
    for name in names:
        for parent in (folder, folder / name, folder / "data"):
            is_split = parent == folder / name
            pattern = f"*{suffix}" if is_split and suffix else f"{name}*"
            found = [path for path in parent.glob(pattern) if path.is_file()]
            if suffix:
                found = [path for path in found if path.suffix == suffix]
            else:
                found = [path for path in found if path.suffix not in _OTHER_SUFFIXES]
            if found:
                return sorted(found)
    return []
