"""MNIST with every pixel fixed to 0 or 1, from the text files it is published as.

The binarization is that of Salakhutdinov and Murray, released by Hugo Larochelle: one
picture a line, 784 numbers separated by spaces. There are no labels.
"""

from pathlib import Path

import numpy as np

from millrace.data.catalog import CATALOG, not_found
from millrace.data.source import ArraySource, DatasetError

NAME = "binarized-mnist"

_TRAIN, _TEST = "binarized_mnist_train.amat", "binarized_mnist_test.amat"
_FOLDERS = ("", "binarized_mnist", "binarized-mnist", "MNIST_static", "mnist")
_ZERO, _ONE, _SPACE, _NEWLINE = b"01 \n"


def load_binarized_mnist(path: str | Path) -> tuple[ArraySource, ArraySource]:
    """Return the 50,000 training and 10,000 test pictures from the folder at `path`.

    A sample has ``image`` uint8[28, 28, 1], each 0 or 1.
    """
    known = CATALOG[NAME]
    training, test = _find(Path(path))
    return (
        _split(training, known.num_training),
        _split(test, known.num_validation),
    )


def _find(folder: Path) -> tuple[Path, Path]:
    for subfolder in _FOLDERS:
        paths = folder / subfolder / _TRAIN, folder / subfolder / _TEST
        if all(path.is_file() for path in paths):
            return paths
    raise not_found(NAME, folder, (_TRAIN, _TEST))


def _split(path: Path, num_rows: int) -> ArraySource:
    shape = CATALOG[NAME].image_shape
    rows = read_amat(path, shape[0] * shape[1])
    if len(rows) != num_rows:
        raise DatasetError(
            f"{path} holds {len(rows):,} pictures, expected {num_rows:,}: it is not whole."
        )
    return ArraySource({"image": rows.reshape(-1, *shape)})


def read_amat(path: Path, num_columns: int) -> np.ndarray:
    """Read a text file of zeros and ones, `num_columns` a line, as uint8."""
    data = np.fromfile(path, np.uint8)
    width = 2 * num_columns  # each number has a space or the line's end behind it
    if not data.size or data.size % width:
        return _read_slowly(path, num_columns)
    text = data.reshape(-1, width)
    between = np.full(num_columns, _SPACE)
    between[-1] = _NEWLINE
    if (text[:, 1::2] != between).any():
        return _read_slowly(path, num_columns)
    digits = text[:, ::2]
    wrong = np.argwhere((digits != _ZERO) & (digits != _ONE))
    if len(wrong):
        row, column = wrong[0]
        raise _no_pixel(path, row, column, chr(digits[row, column]))
    return digits - np.uint8(_ZERO)


def _read_slowly(path: Path, num_columns: int) -> np.ndarray:
    """Read any spacing, and ``0.0`` too; say what is wrong with the first line that is."""
    rows = []
    with path.open(encoding="ascii", errors="replace") as file:
        for number, line in enumerate(file):
            words = line.split()
            if len(words) != num_columns:
                raise DatasetError(
                    f"{path} has {len(words)} numbers in line {number + 1:,}, expected "
                    f"{num_columns}: the file is cut off, or another one."
                )
            rows.append([_pixel(path, number, at, word) for at, word in enumerate(words)])
    if not rows:
        raise DatasetError(f"{path} is empty.")
    return np.array(rows, np.uint8)


def _pixel(path: Path, row: int, column: int, word: str) -> int:
    try:
        value = float(word)
    except ValueError:
        value = None
    if value not in (0.0, 1.0):
        raise _no_pixel(path, row, column, word)
    return int(value)


def _no_pixel(path: Path, row: int, column: int, word: str) -> DatasetError:
    return DatasetError(
        f"{path} has {word!r} in line {row + 1:,}, column {column + 1}; pixels of binary "
        "pictures are 0 or 1."
    )
