"""MNIST, Fashion-MNIST, binarized MNIST, and the digits of the package."""

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from millrace.data.catalog import CATALOG, dataset_not_found
from millrace.data.source import ArraySource, DatasetError

DIGITS_MAX_PIXEL = 16
"""The value of a black pixel in `load_digits`."""

_DIGITS_FILE = Path(__file__).with_name("digits.npz")
_IMAGES_MAGIC, _LABELS_MAGIC = 0x803, 0x801  # uint8 in three dims, in one dim
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MNIST_FOLDERS = ("", "raw", "mnist", "mnist/raw", "MNIST", "MNIST/raw")
_FASHION_FOLDERS = (
    *("", "raw", "fashion_mnist", "fashion-mnist", "fashion-mnist/data/fashion"),
    *("data/fashion", "FashionMNIST", "FashionMNIST/raw"),
)

_BINARIZED = "binarized-mnist"
_AMAT_FILES = ("binarized_mnist_train.amat", "binarized_mnist_test.amat")
_AMAT_FOLDERS = ("", "binarized_mnist", "binarized-mnist", "MNIST_static", "mnist")
_ZERO, _ONE, _SPACE, _NEWLINE = b"01 \n"


def load_digits() -> tuple[ArraySource, ArraySource]:
    """Return training (1,437) and validation (360) digits, always split the same way.

    A sample has ``image`` uint8[8, 8, 1], from 0 to `DIGITS_MAX_PIXEL`, and ``label``
    int32.
    """
    known = CATALOG["digits"]
    images, labels = read_digits()
    order = np.random.default_rng(0).permutation(len(labels))
    image = images[order].reshape(-1, *known.image_shape)
    label = labels[order].astype(np.int32)
    count = known.num_validation
    return (
        ArraySource({"image": image[count:], "label": label[count:]}),
        ArraySource({"image": image[:count], "label": label[:count]}),
    )


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 (1797, 8, 8), and int64 labels in their published order.

    ``digits.txt`` has their source and license.
    """
    with np.load(_DIGITS_FILE, allow_pickle=False) as arrays:
        return arrays["image"], arrays["label"].astype(np.int64)


def load_mnist(path: str | Path) -> tuple[ArraySource, ArraySource]:
    """Return training and validation digits from the IDX files in the folder `path`.

    The files may be gzipped, and may be in the usual subfolders. A sample has ``image``
    uint8[28, 28, 1] and ``label`` int32.
    """
    return _load_idx("mnist", Path(path), _MNIST_FOLDERS)


def load_fashion_mnist(path: str | Path) -> tuple[ArraySource, ArraySource]:
    """Return training and validation images of clothes, in the form of `load_mnist`."""
    return _load_idx("fashion-mnist", Path(path), _FASHION_FOLDERS)


def load_binarized_mnist(path: str | Path) -> tuple[ArraySource, ArraySource]:
    """Return the 50,000 training and 10,000 test images from the folder `path`.

    Every pixel is 0 or 1, as binarized by Salakhutdinov and Murray and published as text
    by Hugo Larochelle. A sample has ``image`` uint8[28, 28, 1]; there are no labels.
    """
    known, folder = CATALOG[_BINARIZED], Path(path)
    for subfolder in _AMAT_FOLDERS:
        training, test = (folder / subfolder / file for file in _AMAT_FILES)
        if training.is_file() and test.is_file():
            return (
                _read_binarized(training, known.num_training),
                _read_binarized(test, known.num_validation),
            )
    raise dataset_not_found(_BINARIZED, folder, _AMAT_FILES)


# -------------------------------------------------------------------------- IDX files


def _load_idx(
    name: str, folder: Path, subfolders: Sequence[str]
) -> tuple[ArraySource, ArraySource]:
    files = _find_idx(name, folder, subfolders)
    return _read_split(name, *files[:2]), _read_split(name, *files[2:])


def _find_idx(name: str, folder: Path, subfolders: Sequence[str]) -> list[Path]:
    """Return the four files of the first subfolder that has all of them."""
    for subfolder in subfolders:
        present = [
            path
            for file in _FILES
            for path in (folder / subfolder / file, folder / subfolder / f"{file}.gz")
            if path.is_file()
        ]
        # Reversed, so that the plain file wins over the gzipped one.
        by_name = {path.name.removesuffix(".gz"): path for path in reversed(present)}
        if len(by_name) == len(_FILES):
            return [by_name[file] for file in _FILES]
    raise dataset_not_found(name, folder, [f"{file}[.gz]" for file in _FILES])


def _read_split(name: str, images_file: Path, labels_file: Path) -> ArraySource:
    known = CATALOG[name]
    image = _read_idx(images_file, _IMAGES_MAGIC, name)
    label = _read_idx(labels_file, _LABELS_MAGIC, name)
    if len(image) != len(label):
        raise DatasetError(
            f"{images_file} has {len(image)} images, but {labels_file} has {len(label)} "
            "labels."
        )
    if label.max() >= known.num_classes:
        raise DatasetError(
            f"{labels_file} has the label {label.max()}; the largest label of {name} is "
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
            actual, *shape = struct.unpack(f">{1 + num_dims}I", header)
            if actual != magic:
                raise DatasetError(
                    f"{path} starts with the magic number {actual:#x}; expected {magic:#x}."
                )
            _check_shape(path, shape, name)
            size = math.prod(shape)
            data = file.read(size + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DatasetError(f"{path} is a damaged gzip file: {error}.") from error
    if len(data) != size:
        raise DatasetError(
            f"{path} should have {size} bytes after its header, but has "
            f"{'more' if len(data) > size else len(data)}."
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _check_shape(path: Path, shape: Sequence[int], name: str) -> None:
    """Reject an impossible header before allocating what it claims."""
    known = CATALOG[name]
    height, width, _ = known.image_shape
    count, *image = shape
    if image and image != [height, width]:
        raise DatasetError(
            f"{path} has images of {image[0]} x {image[1]}; {name} has {height} x {width}."
        )
    if not 0 < count <= known.num_training:
        raise DatasetError(
            f"{path} claims to have {count:,} samples; {name} has at most "
            f"{known.num_training:,}."
        )


def _open(path: Path) -> BinaryIO:
    opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    return cast(BinaryIO, opened)


# ------------------------------------------------------------------------- AMAT files


def _read_binarized(path: Path, num_rows: int) -> ArraySource:
    shape = CATALOG[_BINARIZED].image_shape
    rows = read_amat(path, shape[0] * shape[1])
    if len(rows) != num_rows:
        raise DatasetError(
            f"{path} has {len(rows):,} images, expected {num_rows:,}: it is incomplete."
        )
    return ArraySource({"image": rows.reshape(-1, *shape)})


def read_amat(path: Path, num_columns: int) -> np.ndarray:
    """Read a text file of zeros and ones, `num_columns` per line, as uint8."""
    data = np.fromfile(path, np.uint8)
    width = 2 * num_columns  # a space or a newline follows each digit
    if not data.size or data.size % width:
        return _read_amat_slowly(path, num_columns)
    text = data.reshape(-1, width)
    separators = np.full(num_columns, _SPACE)
    separators[-1] = _NEWLINE
    if (text[:, 1::2] != separators).any():
        return _read_amat_slowly(path, num_columns)
    digits = text[:, ::2]
    wrong = np.argwhere((digits != _ZERO) & (digits != _ONE))
    if len(wrong):
        row, column = wrong[0]
        raise _bad_pixel(path, row, column, chr(digits[row, column]))
    return digits - np.uint8(_ZERO)


def _read_amat_slowly(path: Path, num_columns: int) -> np.ndarray:
    """Accept any spacing, and ``0.0`` as well; name the first line that is wrong."""
    rows = []
    with path.open(encoding="ascii", errors="replace") as file:
        for number, line in enumerate(file):
            words = line.split()
            if len(words) != num_columns:
                raise DatasetError(
                    f"{path} has {len(words)} numbers in line {number + 1:,}, expected "
                    f"{num_columns}: the file is truncated, or it is a different file."
                )
            rows.append(
                [_parse_pixel(path, number, at, word) for at, word in enumerate(words)]
            )
    if not rows:
        raise DatasetError(f"{path} is empty.")
    return np.array(rows, np.uint8)


def _parse_pixel(path: Path, row: int, column: int, word: str) -> int:
    try:
        value = float(word)
    except ValueError:
        value = None
    if value not in (0.0, 1.0):
        raise _bad_pixel(path, row, column, word)
    return int(value)


def _bad_pixel(path: Path, row: int, column: int, word: str) -> DatasetError:
    return DatasetError(
        f"{path} has {word!r} in line {row + 1:,}, column {column + 1}; pixels of binary "
        "images are 0 or 1."
    )
