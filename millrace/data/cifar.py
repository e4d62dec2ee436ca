"""CIFAR-10 and CIFAR-100, from either form they are published in: binary or pickle."""

import functools
import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from millrace.data.catalog import CATALOG, not_found
from millrace.data.source import ArraySource, DatasetError

_PLANES = (3, 32, 32)
_NUM_PIXELS = math.prod(_PLANES)

Arrays = tuple[np.ndarray, np.ndarray]
"""Pixels (samples, 3072) and labels (samples,), both unsigned bytes."""


@dataclass(frozen=True)
class _Layout:
    """One of the forms a data set is published in."""

    folder: str
    archive: str
    training: tuple[str, ...]
    test: str
    read: Callable[[bytes], Arrays]

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.training, self.test)


def load_cifar10(path: str | Path) -> tuple[ArraySource, ArraySource]:
    """Return training and validation pictures from a folder or a .tar.gz at `path`.

    A sample has ``image`` uint8[32, 32, 3] and ``label`` int32.
    """
    batches = tuple(f"data_batch_{number}" for number in range(1, 6))
    binary = _Layout(
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        tuple(f"{batch}.bin" for batch in batches),
        "test_batch.bin",
        functools.partial(_read_binary, num_labels=1),
    )
    pickled = _Layout(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        batches,
        "test_batch",
        functools.partial(_read_pickle, label_key="labels"),
    )
    return _load("cifar10", Path(path), (binary, pickled))


def load_cifar100(path: str | Path) -> tuple[ArraySource, ArraySource]:
    """Return CIFAR-100 with its fine labels, in the form of `load_cifar10`."""
    binary = _Layout(
        "cifar-100-binary",
        "cifar-100-binary.tar.gz",
        ("train.bin",),
        "test.bin",
        functools.partial(_read_binary, num_labels=2),
    )
    pickled = _Layout(
        "cifar-100-python",
        "cifar-100-python.tar.gz",
        ("train",),
        "test",
        functools.partial(_read_pickle, label_key="fine_labels"),
    )
    return _load("cifar100", Path(path), (binary, pickled))


def _load(
    name: str, path: Path, layouts: Sequence[_Layout]
) -> tuple[ArraySource, ArraySource]:
    layout, contents = _find(name, path, layouts)
    parts = {}
    for file, content in contents:
        try:
            pixels, labels = layout.read(content)
            if len(labels) and labels.max() >= CATALOG[name].num_classes:
                raise ValueError(f"it has the label {labels.max()}")
            wanted = _num_images(name, layout, Path(file).name)
            if len(labels) != wanted:
                raise ValueError(f"it has {len(labels):,} images, expected {wanted:,}")
        except ValueError as error:
            raise DatasetError(f"{file} is not a file of {name}: {error}.") from error
        parts[Path(file).name] = pixels, labels
    return _join([parts[file] for file in layout.training]), _join([parts[layout.test]])


def _num_images(name: str, layout: _Layout, file: str) -> int:
    """Return how many images a file has as it is published."""
    known = CATALOG[name]
    if file == layout.test:
        return known.num_validation
    return known.num_training // len(layout.training)


def _join(parts: Sequence[Arrays]) -> ArraySource:
    pixels = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, *_PLANES)
    labels = np.concatenate([labels for _, labels in parts])
    return ArraySource(
        {
            "image": np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)),
            "label": labels.astype(np.int32),
        }
    )


def _find(
    name: str, path: Path, layouts: Sequence[_Layout]
) -> tuple[_Layout, Iterator[tuple[str, bytes]]]:
    """Return the layout that is there, and its files as (name, content)."""
    if path.is_file():
        return _find_in_archive(path, layouts)
    for layout in layouts:
        for folder in (path, path / layout.folder):
            if all((folder / file).is_file() for file in layout.files):
                return layout, (
                    (str(folder / file), (folder / file).read_bytes())
                    for file in layout.files
                )
    for layout in layouts:
        if (path / layout.archive).is_file():
            return _find_in_archive(path / layout.archive, (layout,))
    wanted = [
        f"{layout.folder}/{{{','.join(layout.files)}}} or {layout.archive}"
        for layout in layouts
    ]
    raise not_found(name, path, wanted)


def _find_in_archive(
    path: Path, layouts: Sequence[_Layout]
) -> tuple[_Layout, Iterator[tuple[str, bytes]]]:
    """Read an archive in one pass and in memory: nothing is unpacked onto the disk."""
    wanted = {f"{layout.folder}/{file}" for layout in layouts for file in layout.files}
    contents = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = str(PurePosixPath(member.name))
                if name in wanted and (file := archive.extractfile(member)):
                    contents[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DatasetError(f"{path} is a damaged archive: {error}.") from error
    for layout in layouts:
        names = [f"{layout.folder}/{file}" for file in layout.files]
        if all(name in contents for name in names):
            return layout, ((f"{path}/{name}", contents[name]) for name in names)
    raise DatasetError(f"{path} does not hold the files {', '.join(sorted(wanted))}.")


def _read_binary(content: bytes, num_labels: int) -> Arrays:
    """Read records of one or two label bytes (the last is the fine one) and pixels."""
    size = num_labels + _NUM_PIXELS
    if len(content) == 0 or len(content) % size:
        raise ValueError(f"{len(content)} bytes are not whole records of {size}")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, num_labels:], records[:, num_labels - 1]


def _read_pickle(content: bytes, label_key: str) -> Arrays:
    try:
        batch = _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"it cannot be read as a pickle ({error})") from error
    if not isinstance(batch, dict) or not {"data", label_key} <= batch.keys():
        raise ValueError(f"it has no 'data' and {label_key!r}")
    labels = batch[label_key]
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < 256 for label in labels
    ):
        raise ValueError(f"{label_key!r} is not a list of small whole numbers")
    pixels = _as_bytes(batch["data"])
    if pixels.shape != (len(labels), _NUM_PIXELS):
        raise ValueError(
            f"its pixels have the shape {pixels.shape}, expected "
            f"{(len(labels), _NUM_PIXELS)}"
        )
    return pixels, np.array(labels, np.uint8)


class _Pickled:
    """Stands for what a pickle wants made, and only remembers how."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, numbers, texts and NumPy arrays, and runs nothing.

    A pickle is a program that may call any function it names. The names that an array
    needs are admitted, but get a stand-in; every other name is refused.
    """

    _ADMITTED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),  # written by NumPy 2
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
    )

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in self._ADMITTED:
            return _Pickled
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _as_bytes(array: Any) -> np.ndarray:
    """Make the array that a stand-in describes, if it is one of unsigned bytes."""
    try:
        _, shape, dtype, is_fortran, data = array.state
        if dtype.arguments[0] != "u1" or is_fortran:
            raise ValueError(dtype.arguments)
        # What Python 2 called a str is read as latin1 text.
        data = data.encode("latin1") if isinstance(data, str) else data
        return np.frombuffer(data, np.uint8).reshape(shape)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ValueError("its 'data' is not an array of unsigned bytes") from error
