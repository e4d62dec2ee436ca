"""MNIST and Fashion-MNIST, from the IDX files they are published as."""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from millrace.data.catalog import CATALOG, not_found
from millrace.data.source import ArraySource, DatasetError

_IMAGES_MAGIC, _LABELS_MAGIC = 0x803, 0x801  # unsigned bytes in three dims, in one
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MNIST_FOLDERS = ("", "raw", "mnist", "mnist/raw", "MNIST", "MNIST/raw")
_FASHION_FOLDERS = (
    "",
    "raw",
    "fashion_mnist",
    "fashion-mnist",
    "fashion-mnist/data/fashion",
    "data/fashion",
    "FashionMNIST",
    "FashionMNIST/raw",
)


def load_mnist(path: str | Path) -> tuple[ArraySource, ArraySource]:
    """Return training and validation digits from the folder at `path`.

    The files may be gzipped or not, and may lie in the usual subfolders. A sample has
    ``image`` uint8[28, 28, 1] and ``label`` int32.
    """
    return _load("mnist", Path(path), _MNIST_FOLDERS)


def load_fashion_mnist(path: str | Path) -> tuple[ArraySource, ArraySource]:
    """Return training and validation clothes, in the form of `load_mnist`."""
    return _load("fashion-mnist", Path(path), _FASHION_FOLDERS)


def _load(
    name: str, folder: Path, subfolders: Sequence[str]
) -> tuple[ArraySource, ArraySource]:
    training_images, training_labels, test_images, test_labels = _find(
        name, folder, subfolders
    )
    return (
        _read_split(name, training_images, training_labels),
        _read_split(name, test_images, test_labels),
    )


def _find(name: str, folder: Path, subfolders: Sequence[str]) -> list[Path]:
    """Return the four files of the first subfolder that has them all."""
    for subfolder in subfolders:
        found = [
            path
            for file in _FILES
            for path in (folder / subfolder / file, folder / subfolder / f"{file}.gz")
            if path.is_file()
        ]
        # Where both forms lie side by side, the plain one comes first.
        by_name = {path.name.removesuffix(".gz"): path for path in reversed(found)}
        if len(by_name) == len(_FILES):
            return [by_name[file] for file in _FILES]
    raise not_found(name, folder, [f"{file}[.gz]" for file in _FILES])


def _read_split(name: str, images_file: Path, labels_file: Path) -> ArraySource:
    known = CATALOG[name]
    image = _read_idx(images_file, _IMAGES_MAGIC, name)
    label = _read_idx(labels_file, _LABELS_MAGIC, name)
    if len(image) != len(label):
        raise DatasetError(
            f"{images_file} holds {len(image)} pictures, but {labels_file} "
            f"{len(label)} labels."
        )
    if label.max() >= known.num_classes:
        raise DatasetError(
            f"{labels_file} has the label {label.max()}; labels of {name} end at "
            f"{known.num_classes - 1}."
        )
    return ArraySource(
        {"image": image.reshape(-1, *known.image_shape), "label": label.astype(np.int32)}
    )


def _read_idx(path: Path, magic: int, name: str) -> np.ndarray:
    num_dims = magic & 0xFF
    try:
        with _open(path) as file:
            header = file.read(4 + 4 * num_dims)
            if len(header) < 4 + 4 * num_dims:
                raise DatasetError(f"{path} is too short to be an IDX file.")
            found, *shape = struct.unpack(f">{1 + num_dims}I", header)
            if found != magic:
                raise DatasetError(
                    f"{path} starts with the magic number {found:#x}; expected {magic:#x}."
                )
            _check_shape(path, shape, name)
            size = math.prod(shape)
            data = file.read(size + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DatasetError(f"{path} is a damaged gzip file: {error}.") from error
    if len(data) != size:
        raise DatasetError(
            f"{path} should hold {size} bytes after its header, but holds "
            f"{'more' if len(data) > size else len(data)}."
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _check_shape(path: Path, shape: Sequence[int], name: str) -> None:
    """Refuse sizes that cannot be true before as much as they claim is read."""
    known = CATALOG[name]
    height, width, _ = known.image_shape
    count, *image = shape
    if image and image != [height, width]:
        raise DatasetError(
            f"{path} holds pictures of {image[0]} x {image[1]}; {name} has "
            f"{height} x {width}."
        )
    if not 0 < count <= known.num_training:
        raise DatasetError(
            f"{path} says that it holds {count:,} samples; {name} has up to "
            f"{known.num_training:,}."
        )


def _open(path: Path) -> BinaryIO:
    opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    return cast(BinaryIO, opened)
