"""Images in TFRecord files of tf.Example, with random access and without TensorFlow."""

import os
import struct
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from millrace.data.crc32c import masked_crc32c
from millrace.data.image_source import CorruptSample, ImageSource, PrepareImage, num_cores
from millrace.data.source import DatasetError

_HEADER = struct.Struct("<QI")  # length of the data, and the checksum of that length
_CHECKSUM = struct.Struct("<I")
_IMAGE, _LABEL = "image/encoded", "image/class/label"

Values = list[bytes] | list[int]


class TFRecords(ImageSource):
    """The records of TFRecord files, in the order of the files.

    The format has no index, so the files are scanned once, from length to length, and the
    position of every record is kept in memory. Labels start at 1 in the files, at 0 here.

    Args:
        files: One file or more.
        prepare: Decodes an image into an array, for example `augment.prepare_image`.
        num_classes: Largest label allowed in the files.
        options: ``num_threads`` and ``max_corrupt`` of `ImageSource`.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        prepare: PrepareImage,
        *,
        num_classes: int = 1000,
        **options: Any,
    ) -> None:
        self.files = [Path(file) for file in files]
        with ThreadPoolExecutor(
            2 * num_cores()
        ) as threads:  # they mostly wait for the disk
            spans = list(threads.map(find_records, self.files))
        self._file = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
        self._span = np.concatenate(spans)
        self._num_classes = num_classes
        super().__init__(len(self._span), prepare, **options)

    def name(self, index: int) -> str:
        return f"{self.files[self._file[index]]}, byte {self._span[index, 0]}"

    def read_encoded(self, index: int) -> tuple[bytes, int]:
        offset, length = (int(number) for number in self._span[index])
        with self.files[self._file[index]].open("rb") as file:
            file.seek(offset)
            record = file.read(length + _CHECKSUM.size)
        data = memoryview(record)[:length]
        # Checked before parsing: a flipped bit may still parse, as a wrong label or as
        # an image with a gray stripe.
        if record[length:] != _CHECKSUM.pack(masked_crc32c(data)):
            raise CorruptSample("its checksum does not match")
        try:
            features = parse_example(data, (_IMAGE, _LABEL))
            (content,), (label,) = features[_IMAGE], features[_LABEL]
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptSample(f"not a tf.Example with {_IMAGE} and {_LABEL}") from error
        if not (isinstance(content, bytes) and isinstance(label, int)):
            raise CorruptSample(f"{_IMAGE} or {_LABEL} has the wrong type")
        if not 1 <= label <= self._num_classes:
            raise DatasetError(
                f"{self.name(index)} has the label {label}; labels must be between 1 and "
                f"{self._num_classes}."
            )
        return content, label - 1


def find_records(path: Path) -> np.ndarray:
    """Return offset and length of the data of each record: int64 (records, 2)."""
    spans = []
    with path.open("rb", buffering=0) as file:  # a buffer would read the data, too
        end, size = 0, os.fstat(file.fileno()).st_size
        while end < size:
            file.seek(end)
            header = file.read(_HEADER.size)
            if len(header) == _HEADER.size:
                length, checksum = _HEADER.unpack(header)
                # A wrong length would send the scan anywhere in the file.
                if masked_crc32c(header[:8]) != checksum:
                    raise DatasetError(
                        f"{path} is not a TFRecord file or is damaged: the record at byte "
                        f"{end} has a wrong checksum for its length."
                    )
                spans.append((end + _HEADER.size, length))
                end += _HEADER.size + length + _CHECKSUM.size
            if len(header) < _HEADER.size or end > size:
                raise DatasetError(f"{path} ends in the middle of record {len(spans)}.")
    if not spans:
        raise DatasetError(f"{path} is empty.")
    return np.array(spans, np.int64)


def parse_example(data: memoryview, wanted: Collection[str]) -> dict[str, Values]:
    """Return the bytes or integers of the wanted features of a tf.Example.

    An Example contains Features, which contain entries of a name and a Feature, which
    contains one list: of bytes (field 1), floats (field 2, skipped here) or integers
    (field 3).
    """
    values: dict[str, Values] = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            name = b"".join(bytes(text) for text in _messages(entry, 1)).decode()
            if name in wanted:
                for feature in _messages(entry, 2):
                    values[name] = _parse_feature(feature)
    return values


def _parse_feature(feature: memoryview) -> Values:
    for number, part in _fields(feature):
        if number == 1 and isinstance(part, memoryview):
            return [bytes(value) for value in _messages(part, 1)]
        if number == 3 and isinstance(part, memoryview):
            return list(_integers(part))
    raise ValueError("neither bytes nor integers")


def _integers(data: memoryview) -> Iterator[int]:
    """Yield int64 values, packed into one field or not."""
    for _, part in _fields(data):
        if isinstance(part, int):
            yield _signed(part)
            continue
        position = 0
        while position < len(part):
            value, position = _varint(part, position)
            yield _signed(value)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _messages(data: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the length-delimited fields with this number."""
    for field_number, part in _fields(data):
        if field_number == number and isinstance(part, memoryview):
            yield part


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield the fields of a protocol buffer as (number, bytes or integer)."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire_type = key & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"field of unknown wire type {wire_type}")
        if position + length > len(data):
            raise ValueError("field longer than its message")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Read an integer of seven bits per byte; return it and the position after it."""
    value = 0
    for count in range(10):
        if position + count >= len(data):
            raise ValueError("truncated integer")
        byte = data[position + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position + count + 1
    raise ValueError("integer of more than ten bytes")
