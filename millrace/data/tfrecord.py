"""Pictures in TFRecord files of tf.Example, read at random and without TensorFlow."""

import os
import struct
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from millrace.data.catalog import not_found
from millrace.data.crc32c import masked_crc32c
from millrace.data.image_source import CorruptSample, ImageSource, PerImage, num_cores
from millrace.data.source import DatasetError

_HEADER = struct.Struct("<QI")  # the length of the data, and that length's checksum
_CHECKSUM = struct.Struct("<I")
_IMAGE, _LABEL = "image/encoded", "image/class/label"

Values = list[bytes] | list[int]


class TFRecords(ImageSource):
    """The records of TFRecord files, in the order of the files.

    Where each record lies is found once, by going through the files from length to
    length, and kept in memory. Labels in the files count from 1, ours from 0.

    Args:
        files: One file or more.
        prepare: Makes the array of each picture, for example `augment.imagenet_image`.
        num_classes: Labels above it are refused.
        options: ``num_threads`` and ``max_corrupt`` of `ImageSource`.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        prepare: PerImage,
        *,
        num_classes: int = 1000,
        **options: Any,
    ) -> None:
        self.files = [Path(file) for file in files]
        with ThreadPoolExecutor(2 * num_cores()) as threads:  # they mostly wait
            spans = list(threads.map(record_spans, self.files))
        self._file = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
        self._span = np.concatenate(spans)
        self._num_classes = num_classes
        super().__init__(len(self._span), prepare, **options)

    def name(self, index: int) -> str:
        return f"{self.files[self._file[index]]}, byte {self._span[index, 0]}"

    def encoded(self, index: int) -> tuple[bytes, int]:
        offset, length = (int(number) for number in self._span[index])
        with self.files[self._file[index]].open("rb") as file:
            file.seek(offset)
            record = file.read(length + _CHECKSUM.size)
        data = memoryview(record)[:length]
        if record[length:] != _CHECKSUM.pack(masked_crc32c(data)):
            raise CorruptSample("its checksum does not match")
        try:
            features = parse_example(data, (_IMAGE, _LABEL))
            (content,), (label,) = features[_IMAGE], features[_LABEL]
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptSample(f"no tf.Example of {_IMAGE} and {_LABEL}") from error
        if not (isinstance(content, bytes) and isinstance(label, int)):
            raise CorruptSample(f"{_IMAGE} or {_LABEL} has the wrong type")
        if not 1 <= label <= self._num_classes:
            raise DatasetError(
                f"{self.name(index)} has the label {label}; labels go from 1 to "
                f"{self._num_classes}."
            )
        return content, label - 1


def load_tfrecords(
    path: str | Path,
    prepare: PerImage,
    *,
    name: str = "imagenet",
    needs_validation: bool = True,
    **options: Any,
) -> tuple[TFRecords, TFRecords | None]:
    """Return training and validation pictures from ``train*`` and ``validation*``.

    Args:
        path: The folder with the files, or with a folder of them for each split.
        prepare: Makes the array of each picture of either.
        name: What to call the data set if it is not there.
        needs_validation: Whether there must be some to validate with.
        options: ``num_classes`` of `TFRecords`; ``num_threads`` and ``max_corrupt`` of
            `ImageSource`.
    """
    folder = Path(path)
    training, validation = _shards(folder, "train"), _shards(folder, "validation")
    if not training or (needs_validation and not validation):
        raise not_found(name, folder, ["train*", "validation* (TFRecord files)"])
    held_out = TFRecords(validation, prepare, **options) if validation else None
    return TFRecords(training, prepare, **options), held_out


def _shards(folder: Path, split: str) -> list[Path]:
    for place in (folder, folder / split):
        if shards := sorted(path for path in place.glob(f"{split}*") if path.is_file()):
            return shards
    return []


def record_spans(path: Path) -> np.ndarray:
    """Return where the data of each record lies: int64 (records, 2), offset and length."""
    spans = []
    with path.open("rb", buffering=0) as file:  # a buffer would read far too much
        end, size = 0, os.fstat(file.fileno()).st_size
        while end < size:
            file.seek(end)
            header = file.read(_HEADER.size)
            if len(header) == _HEADER.size:
                length, checksum = _HEADER.unpack(header)
                if masked_crc32c(header[:8]) != checksum:
                    raise DatasetError(
                        f"{path} is no TFRecord file, or damaged: the record at byte {end} "
                        "has a wrong checksum for its length."
                    )
                spans.append((end + _HEADER.size, length))
                end += _HEADER.size + length + _CHECKSUM.size
            if len(header) < _HEADER.size or end > size:
                raise DatasetError(f"{path} ends in the middle of record {len(spans)}.")
    if not spans:
        raise DatasetError(f"{path} is empty.")
    return np.array(spans, np.int64)


def parse_example(data: memoryview, wanted: Collection[str]) -> dict[str, Values]:
    """Return the bytes or whole numbers of the wanted features of a tf.Example.

    An Example holds Features, which hold entries of a name and a Feature, which holds
    one list: of bytes (1), floats (2, passed over here) or whole numbers (3).
    """
    found: dict[str, Values] = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            name = b"".join(bytes(text) for text in _messages(entry, 1)).decode()
            if name in wanted:
                for feature in _messages(entry, 2):
                    found[name] = _values(feature)
    return found


def _values(feature: memoryview) -> Values:
    for kind, part in _fields(feature):
        if kind == 1 and isinstance(part, memoryview):
            return [bytes(value) for value in _messages(part, 1)]
        if kind == 3 and isinstance(part, memoryview):
            return list(_whole_numbers(part))
    raise ValueError("neither bytes nor whole numbers")


def _whole_numbers(numbers: memoryview) -> Iterator[int]:
    """Yield int64 values, packed into one field or not."""
    for _, part in _fields(numbers):
        if isinstance(part, int):
            yield _signed(part)
            continue
        at = 0
        while at < len(part):
            value, at = _varint(part, at)
            yield _signed(value)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _messages(data: memoryview, number: int) -> Iterator[memoryview]:
    for found, part in _fields(data):
        if found == number and isinstance(part, memoryview):
            yield part


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield a protocol buffer's fields as (number, bytes or whole number)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"field of the unknown kind {kind}")
        if at + length > len(data):
            raise ValueError("field longer than its message")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read a whole number of seven bits per byte; return it and where it ends."""
    value = 0
    for place in range(10):
        if at + place >= len(data):
            raise ValueError("number cut short")
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    raise ValueError("number of more than ten bytes")
