"""Images in WebDataset shards: tar files in which members of one sample share a name."""

import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.data.decode_worker import ReadSample
from millrace.data.decoding import Crop
from millrace.data.image_source import ImageSource, num_cores
from millrace.data.source import DatasetError
from millrace.data.tfrecord import FileCache

_IMAGES = ("jpg", "jpeg", "png", "webp")
_LABEL = "cls"
_MAX_LABEL_BYTES = 32


class _Samples(NamedTuple):
    """The samples of one shard."""

    names: list[str]
    spans: list[tuple[int, int]]
    """Offset and length of each image in the file."""
    labels: list[int]


class WebDataset(ImageSource):
    """The samples of tar files, in the order of the files.

    A sample is ``NAME.jpg`` (or .jpeg, .png, .webp) and ``NAME.cls``, the number of its
    class from 0 on. The headers of the files are read once, so that samples can be read in
    any order.

    Args:
        files: One uncompressed tar file or more.
        crop: How images are cropped.
        options: ``num_workers`` and ``max_corrupt`` of `ImageSource`.
    """

    def __init__(self, files: Sequence[Path], crop: Crop, **options: Any) -> None:
        self.files = [str(file) for file in files]
        with ThreadPoolExecutor(2 * num_cores()) as threads:
            shards = list(threads.map(_scan, self.files))
        self._file = np.repeat(range(len(shards)), [len(shard.names) for shard in shards])
        self._names = [name for shard in shards for name in shard.names]
        self._span = np.array([span for shard in shards for span in shard.spans], np.int64)
        self.labels = np.array([x for shard in shards for x in shard.labels], np.int32)
        super().__init__(len(self._names), crop, **options)

    @property
    def reader(self) -> ReadSample:
        return _Reader(self.files)

    def locate(self, index: int) -> tuple[int, int, int, int]:
        offset, length = self._span[index]
        return int(self._file[index]), int(offset), int(length), int(self.labels[index])

    def name(self, index: int) -> str:
        return f"{self.files[self._file[index]]}, {self._names[index]}"


class _Reader:
    """Reads images from tar files, which it opens once per process."""

    def __init__(self, files: list[str]) -> None:
        self._files = files
        self._opened = FileCache()

    def __call__(self, location: tuple[int, int, int, int]) -> tuple[bytes, int]:
        number, offset, length, label = location
        return self._opened.read(self._files[number], offset, length), label


def _scan(path: str) -> _Samples:
    """Read the headers of a tar file, and the labels."""
    samples = _Samples([], [], [])
    try:
        with tarfile.open(path, "r:") as archive:
            for name, members in _group(archive):
                image = next((members[k] for k in _IMAGES if k in members), None)
                if image is None:
                    continue  # for example a caption
                if _LABEL not in members:
                    raise DatasetError(f"{path}: {name} has no class ({name}.{_LABEL}).")
                if image.islnk():  # tar stores a file with several names only once
                    image = archive.getmember(image.linkname)
                samples.names.append(name)
                samples.spans.append((image.offset_data, image.size))
                samples.labels.append(_read_label(archive, members[_LABEL], path))
            _check_end(archive, path)
    except (tarfile.TarError, KeyError) as error:
        raise DatasetError(
            f"{path} is not an uncompressed tar file, or is damaged: {error}."
        ) from error
    if not samples.names:
        raise DatasetError(f"{path} has no images, which are members such as NAME.jpg.")
    return samples


def _check_end(archive: tarfile.TarFile, path: str) -> None:
    """Check that all members have been read; ``tarfile`` ignores half a header."""
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise DatasetError(f"{path} is incomplete: it has no end mark.")


def _group(archive: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield the members of each sample by extension; samples are contiguous."""
    current: tuple[str, dict[str, tarfile.TarInfo]] = ("", {})
    for member in archive:
        if not (member.isfile() or member.islnk()):
            continue
        # The name ends at the first dot of the file name.
        folder, _, file = member.name.rpartition("/")
        stem, _, extension = file.partition(".")
        name = f"{folder}/{stem}" if folder else stem
        if name != current[0]:
            if current[1]:
                yield current
            current = name, {}
        current[1][extension.lower()] = member
    if current[1]:
        yield current


def _read_label(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> int:
    file = archive.extractfile(member)
    text = file.read(_MAX_LABEL_BYTES) if file else b""
    try:
        label = int(text)
    except ValueError:
        label = -1
    if not 0 <= label <= np.iinfo(np.int32).max:
        raise DatasetError(
            f"{path}: {member.name} must hold the number of a class, 0 or more, got "
            f"{text.decode(errors='replace')!r}."
        )
    return label
