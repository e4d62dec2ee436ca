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

from millrace.data.catalog import CATALOG, dataset_not_found
from millrace.data.source import ArraySource, DatasetError

_PLANES = (3, 32, 32)
_NUM_PIXELS = math.prod(_PLANES)

Arrays = tuple[np.ndarray, np.ndarray]
"""Pixels (samples, 3072) and labels (samples,), both uint8."""


@dataclass(frozen=True)
class _Release:
    """One form in which the dataset is published."""

    folder: str
    archive: str
    training: tuple[str, ...]
    test: str
    parse: Callable[[bytes], Arrays]

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.training, self.test)


def load_cifar10(path: str | Path) -> tuple[ArraySource, ArraySource]:
    """Return training and validation images from a folder or a .tar.gz at `path`.

    A sample has ``image`` uint8[32, 32, 3] and ``label`` int32.
    """
    batches = tuple(f"data_batch_{number}" for number in range(1, 6))
    binary = _Release(
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        tuple(f"{batch}.bin" for batch in batches),
        "test_batch.bin",
        functools.partial(_parse_binary, num_labels=1),
    )
    pickled = _Release(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        batches,
        "test_batch",
        functools.partial(_parse_pickle, label_key="labels"),
    )
    return _load("cifar10", Path(path), (binary, pickled))


def load_cifar100(path: str | Path) -> tuple[ArraySource, ArraySource]:
    """Return CIFAR-100 with its fine labels, in the form of `load_cifar10`."""
    binary = _Release(
        "cifar-100-binary",
        "cifar-100-binary.tar.gz",
        ("train.bin",),
        "test.bin",
        functools.partial(_parse_binary, num_labels=2),
    )
    pickled = _Release(
        "cifar-100-python",
        "cifar-100-python.tar.gz",
        ("train",),
        "test",
        functools.partial(_parse_pickle, label_key="fine_labels"),
    )
    return _load("cifar100", Path(path), (binary, pickled))


def _load(
    name: str, path: Path, releases: Sequence[_Release]
) -> tuple[ArraySource, ArraySource]:
    release, contents = _find(name, path, releases)
    parts = {}
    for file, content in contents:
        try:
            pixels, labels = release.parse(content)
            if len(labels) and labels.max() >= CATALOG[name].num_classes:
                raise ValueError(f"it has the label {labels.max()}")
            expected = _num_images(name, release, Path(file).name)
            if len(labels) != expected:
                raise ValueError(f"it has {len(labels):,} images, expected {expected:,}")
        except ValueError as error:
            raise DatasetError(f"{file} is not a file of {name}: {error}.") from error
        parts[Path(file).name] = pixels, labels
    training = [parts[file] for file in release.training]
    return _concatenate(training), _concatenate([parts[release.test]])


def _num_images(name: str, release: _Release, file: str) -> int:
    """Return the number of images in a published file."""
    known = CATALOG[name]
    if file == release.test:
        return known.num_validation
    return known.num_training // len(release.training)


def _concatenate(parts: Sequence[Arrays]) -> ArraySource:
    pixels = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, *_PLANES)
    labels = np.concatenate([labels for _, labels in parts])
    return ArraySource(
        {
            "image": np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)),
            "label": labels.astype(np.int32),
        }
    )


def _find(
    name: str, path: Path, releases: Sequence[_Release]
) -> tuple[_Release, Iterator[tuple[str, bytes]]]:
    """Return the release found at `path`, and its files as (name, content)."""
    if path.is_file():
        return _find_in_archive(path, releases)
    for release in releases:
        for folder in (path, path / release.folder):
            if all((folder / file).is_file() for file in release.files):
                return release, (
                    (str(folder / file), (folder / file).read_bytes())
                    for file in release.files
                )
    for release in releases:
        if (path / release.archive).is_file():
            return _find_in_archive(path / release.archive, (release,))
    wanted = [
        f"{release.folder}/{{{','.join(release.files)}}} or {release.archive}"
        for release in releases
    ]
    raise dataset_not_found(name, path, wanted)


def _find_in_archive(
    path: Path, releases: Sequence[_Release]
) -> tuple[_Release, Iterator[tuple[str, bytes]]]:
    """Read an archive in one pass and in memory; nothing is unpacked to disk."""
    wanted = {f"{release.folder}/{file}" for release in releases for file in release.files}
    contents = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = str(PurePosixPath(member.name))
                if name in wanted and (file := archive.extractfile(member)):
                    contents[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DatasetError(f"{path} is a damaged archive: {error}.") from error
    for release in releases:
        names = [f"{release.folder}/{file}" for file in release.files]
        if all(name in contents for name in names):
            return release, ((f"{path}/{name}", contents[name]) for name in names)
    raise DatasetError(f"{path} does not contain {', '.join(sorted(wanted))}.")


def _parse_binary(content: bytes, num_labels: int) -> Arrays:
    """Parse records of one or two label bytes (the last is the fine label) and pixels."""
    size = num_labels + _NUM_PIXELS
    if len(content) == 0 or len(content) % size:
        raise ValueError(f"{len(content)} bytes are not whole records of {size}")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, num_labels:], records[:, num_labels - 1]


def _parse_pickle(content: bytes, label_key: str) -> Arrays:
    try:
        batch = _SafeUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"it cannot be read as a pickle ({error})") from error
    if not isinstance(batch, dict) or not {"data", label_key} <= batch.keys():
        raise ValueError(f"it has no 'data' and {label_key!r}")
    labels = batch[label_key]
    if not isinstance(labels, list) or not all(
        type(label) is int and 0 <= label < 256 for label in labels
    ):
        raise ValueError(f"{label_key!r} is not a list of integers from 0 to 255")
    pixels = _rebuild_array(batch["data"])
    if pixels.shape != (len(labels), _NUM_PIXELS):
        raise ValueError(
            f"its pixels have the shape {pixels.shape}, expected "
            f"{(len(labels), _NUM_PIXELS)}"
        )
    return pixels, np.array(labels, np.uint8)


class _Placeholder:
    """Stands for an object of a pickle; records how it would be built."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _SafeUnpickler(pickle.Unpickler):
    """Reads lists, numbers, strings and NumPy arrays, and executes nothing.

    A pickle is a program that may call any function it names. The names that an array
    needs resolve to a placeholder; every other name is rejected.
    """

    _ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),  # written by NumPy 2
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }
    )

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in self._ALLOWED:
            return _Placeholder
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _rebuild_array(placeholder: Any) -> np.ndarray:
    """Build the array that a placeholder describes, if it is one of uint8."""
    try:
        _, shape, dtype, is_fortran, data = placeholder.state
        if dtype.arguments[0] != "u1" or is_fortran:
            raise ValueError(dtype.arguments)
        # The str of Python 2 is read as latin1 text.
        data = data.encode("latin1") if isinstance(data, str) else data
        return np.frombuffer(data, np.uint8).reshape(shape)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ValueError("its 'data' is not an array of unsigned bytes") from error
