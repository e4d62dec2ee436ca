"""Images in TFRecord files of tf.Example, read in any order, without TensorFlow."""

import os
import struct
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from millrace.data.decode_worker import ReadSample
from millrace.data.decoding import CorruptSample, Crop, Encoded
from millrace.data.image_source import ImageSource, num_cores
from millrace.data.source import DatasetError

_HEADER = struct.Struct("<QI")  # length of the data, and the checksum of that length
_CHECKSUM = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8  # from the TFRecord format
_IMAGE, _LABEL = "image/encoded", "image/class/label"
_RAW, _HEIGHT, _WIDTH = "image/raw", "image/height", "image/width"

Values = list[memoryview] | list[int]


class Features(NamedTuple):
    """The names of features in a file, and the number of the first class."""

    image: str = _IMAGE
    label: str = _LABEL
    first_label: int = 1


_USUAL = Features()
TFDS = Features("image", "label", 0)
"""As TensorFlow Datasets writes them."""


class TFRecords(ImageSource):
    """The records of TFRecord files, in the order of the files.

    The position of every record is kept in memory. It comes from an index next to the file
    (``FILE.idx``, as for DALI) or else from a scan of the file. Labels start at 0 here,
    whatever they are in the files.

    Args:
        files: One file or more.
        crop: How images are cropped.
        num_classes: Number of classes in the files.
        features: What the features are called.
        options: ``num_workers`` and ``max_corrupt`` of `ImageSource`.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        crop: Crop,
        *,
        num_classes: int = 1000,
        features: Features = _USUAL,
        **options: Any,
    ) -> None:
        self._features = features
        self.files = [Path(file) for file in files]
        with ThreadPoolExecutor(
            2 * num_cores()
        ) as threads:  # they mostly wait for the disk
            spans = list(threads.map(locate_records, self.files))
        self._file = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
        self._span = np.concatenate(spans)
        self._num_classes = num_classes
        super().__init__(len(self._span), crop, **options)

    def name(self, index: int) -> str:
        return f"{self.files[self._file[index]]}, byte {self._span[index, 0]}"

    @property
    def reader(self) -> ReadSample:
        files = [str(file) for file in self.files]
        return RecordReader(files, self._num_classes, self._features)

    def locate(self, index: int) -> tuple[int, int, int]:
        offset, length = self._span[index]
        return int(self._file[index]), int(offset), int(length)


class RecordReader:
    """Reads records of TFRecord files, which it opens once per process.

    Args:
        files: The files.
        num_classes: Number of classes in them.
        features: What the features are called.
    """

    def __init__(
        self, files: list[str], num_classes: int, features: Features = _USUAL
    ) -> None:
        self._files = files
        self._features = features
        self._num_classes = num_classes
        self._opened = FileCache()

    def __call__(self, location: tuple[int, int, int]) -> tuple[Encoded | np.ndarray, int]:
        number, offset, length = location
        path = self._files[number]
        data = self._opened.read(path, offset, length)
        checksum = self._opened.read(path, offset + length, _CHECKSUM.size)
        # Checked before parsing: a flipped bit may still parse, as a wrong label or as
        # an image with a gray stripe.
        if checksum != _CHECKSUM.pack(masked_crc32c(data)):
            raise CorruptSample("its checksum does not match")
        names = self._features
        wanted = (names.image, names.label, _RAW, _HEIGHT, _WIDTH)
        both = f"{names.image} and {names.label}"
        try:
            features = parse_example(memoryview(data), wanted)
            content, (label,) = _image(features, names.image), features[names.label]
        except (KeyError, ValueError, TypeError) as error:
            raise CorruptSample(f"not a tf.Example with {both}") from error
        if not (isinstance(content, memoryview | np.ndarray) and isinstance(label, int)):
            raise CorruptSample(f"{both.replace('and', 'or')} has the wrong type")
        first, last = names.first_label, names.first_label + self._num_classes - 1
        if not first <= label <= last:
            raise DatasetError(
                f"{path}, byte {offset} has the label {label}; labels must be between "
                f"{first} and {last}."
            )
        return content, label - first


def _image(features: dict[str, Values], name: str) -> Any:
    """Return the encoded image, or its pixels."""
    if _RAW not in features:
        (content,) = features[name]
        return content
    (pixels,), (height,), (width,) = (features[x] for x in (_RAW, _HEIGHT, _WIDTH))
    assert isinstance(pixels, memoryview)
    return np.frombuffer(pixels, np.uint8).reshape(int(height), int(width), 3)


class FileCache:
    """Files that stay open, read at any offset by any thread; copies start empty."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def read(self, path: str, offset: int, length: int) -> bytes:
        """Return bytes of a file."""
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            # Another thread may have opened it meanwhile.
            descriptor = self._descriptors.setdefault(path, opened)
            if descriptor != opened:
                os.close(opened)
        return os.pread(descriptor, length, offset)

    def __getstate__(self) -> dict[str, Any]:
        return {"_descriptors": {}}

    def __del__(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def index_path(path: Path) -> Path:
    """Return the index of a TFRecord file: a line ``offset size`` for every record."""
    return path.with_name(f"{path.name}.idx")


def locate_records(path: Path) -> np.ndarray:
    """Return offset and length of the data of each record: int64 (records, 2)."""
    try:
        text = index_path(path).read_text()
        whole = np.array(text.split(), np.int64).reshape(-1, 2)
    except (OSError, ValueError):
        return find_records(path)
    # An index of another file, or of an unfinished one, is not used.
    ends = whole.sum(1)
    contiguous = len(whole) and not whole[0, 0] and (ends[:-1] == whole[1:, 0]).all()
    if not contiguous or ends[-1] != path.stat().st_size:
        return find_records(path)
    return whole + np.array([_HEADER.size, -_HEADER.size - _CHECKSUM.size])


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


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of `data` as TFRecord files store it."""
    crc = google_crc32c.value(bytes(data))
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def frame_record(data: bytes) -> bytes:
    """Return a record as it is written to a TFRecord file: length, data, checksums."""
    length = struct.pack("<Q", len(data))
    header = length + _CHECKSUM.pack(masked_crc32c(length))
    return b"".join([header, data, _CHECKSUM.pack(masked_crc32c(data))])


def make_example(content: Encoded | np.ndarray, label: int) -> bytes:
    """Return a tf.Example of an encoded image, or of pixels, and its label from 0 on."""
    features: dict[str, Encoded | int] = {_LABEL: label + 1}
    if isinstance(content, np.ndarray):
        height, width, _ = content.shape
        features |= {_RAW: content.tobytes(), _HEIGHT: height, _WIDTH: width}
    else:
        features[_IMAGE] = content
    return _field(1, b"".join(_field(1, _feature(*item)) for item in features.items()))


def _feature(name: str, value: Encoded | int) -> bytes:
    """Return an entry of a name and a list with one value."""
    if isinstance(value, int):
        values = _field(3, _field(1, _as_varint(value)))
    else:
        values = _field(1, _field(1, value))
    return _field(1, name.encode()) + _field(2, values)


def _field(number: int, content: Encoded) -> bytes:
    """Return a length-delimited field of a protocol buffer."""
    return b"".join([_as_varint(number << 3 | 2), _as_varint(len(content)), content])


def _as_varint(value: int) -> bytes:
    """Return a positive integer, seven bits per byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


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
            return list(_messages(part, 1))
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
