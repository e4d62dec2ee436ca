"""Small images as TensorFlow Datasets has written them, read without TensorFlow."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from millrace.data.catalog import CATALOG, Dataset
from millrace.data.decoding import CorruptSample
from millrace.data.layouts import find_tfds_shards
from millrace.data.source import ArraySource, DatasetError
from millrace.data.tfrecord import TFDS, RecordReader, locate_records


def load_tfds(folder: Path, name: str) -> tuple[ArraySource, ArraySource]:
    """Return training and validation images from the folder of a version.

    A sample has ``image`` uint8[height, width, channels] and ``label`` int32, in the order
    of the files.

    Args:
        folder: From ``layouts.find_tfds``.
        name: The dataset, as we call it.
    """
    known = CATALOG[name]
    counts = {"train": known.num_training, "test": known.num_validation}
    training, validation = (
        _load_split(known, find_tfds_shards(folder, name, split), f"{folder}, {split}", n)
        for split, n in counts.items()
    )
    return training, validation


def _load_split(
    known: Dataset, files: Sequence[Path], where: str, expected: int
) -> ArraySource:
    _check_complete(files, where)
    reader = RecordReader([str(file) for file in files], known.num_classes, TFDS)
    spans = [(n, *span) for n, file in enumerate(files) for span in locate_records(file)]
    if len(spans) != expected:
        raise DatasetError(
            f"{where}: {known.name} has {expected:,} images, but there are {len(spans):,}."
        )
    images = np.empty((expected, *known.image_shape), np.uint8)
    labels = np.empty(expected, np.int32)
    for row, (number, offset, length) in enumerate(spans):
        try:
            content, labels[row] = reader((number, int(offset), int(length)))
            images[row] = _decode(content, known.image_shape)
        except CorruptSample as error:
            place = f"{files[number]}, byte {offset}"
            raise DatasetError(f"{place} cannot be read: {error}.") from error
    return ArraySource({"image": images, "label": labels})


def _check_complete(files: Sequence[Path], where: str) -> None:
    total = re.search(r"-of-(\d+)$", files[0].name) if files else None
    if total is None or len(files) != int(total[1]):
        raise DatasetError(
            f"{where}: {len(files)} of {int(total[1]) if total else 1} files are present."
        )


def _decode(content: object, shape: tuple[int, int, int]) -> np.ndarray:
    assert isinstance(content, bytes | bytearray | memoryview)
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("RGB" if shape[2] == 3 else "L"))
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        raise CorruptSample(str(error)) from error
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    if pixels.shape != shape:
        raise CorruptSample(f"it has the shape {pixels.shape}, not {shape}")
    return pixels
