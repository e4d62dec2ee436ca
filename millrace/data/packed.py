"""Packed image datasets: written once by ``millrace data pack``, then read at any position.

A packed dataset is a folder of TFRecord files with the features of ImageNet's, an index
next to each (as DALI uses it), and ``dataset.json`` with the classes and the checksum of
every file. Other tools can read the records.
"""

import contextlib
import hashlib
import io
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from millrace.config import ConfigurationError
from millrace.data.decode_pool import WorkerPool
from millrace.data.decode_worker import ReadSample
from millrace.data.decoding import (
    DECODE_ERRORS,
    CorruptSample,
    Crop,
    Encoded,
    open_image,
    to_rgb,
)
from millrace.data.image_source import ImageSource, TooManyCorrupt
from millrace.data.layouts import MANIFEST
from millrace.data.source import DatasetError
from millrace.data.tfrecord import TFRecords, frame_record, index_path, make_example
from millrace.durable import (
    clear_leftovers,
    locked,
    make_folder,
    replacing,
    write_atomically,
)

_PROGRESS = "packing.json"
_FORMAT = "millrace packed images 1"
_SHARD_SAMPLES = 8192  # about 1 GB of photographs as published, 0.2 GB at 256 pixels
_TASK_SAMPLES = 16
_TASKS_PER_WORKER = 3

Progress = Callable[[str, int, int], None]
"""Called with the name of a split, the samples done, and their number."""


# Reading


class Shard(NamedTuple):
    """One TFRecord file."""

    name: str
    num_samples: int
    num_bytes: int
    sha256: str
    skipped: dict[str, str]
    """Samples that could not be read and were left out: name and reason."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What ``dataset.json`` says."""

    num_classes: int
    classes: list[str] | None
    """Their names in the order of the labels, if they have names."""
    shards: dict[str, list[Shard]]
    """The files of each split: train and validation."""
    plan: dict[str, Any]
    """What was packed, and how."""

    def num_samples(self, split: str) -> int:
        """Return the number of samples in a split."""
        return sum(shard.num_samples for shard in self.shards.get(split, ()))


def read_manifest(folder: Path) -> Manifest:
    """Read ``dataset.json``."""
    try:
        fields = json.loads((folder / MANIFEST).read_text())
        if fields.pop("format") != _FORMAT:
            raise ValueError("another format")
        shards = {
            split: [Shard(*shard) for shard in found]
            for split, found in fields.pop("shards").items()
        }
        return Manifest(**fields, shards=shards)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            f"{folder / MANIFEST} is damaged or was not written by millrace data pack: "
            f"{error}."
        ) from error


class PackedImages(TFRecords):
    """One split of a packed dataset.

    Args:
        folder: Where the dataset is.
        manifest: What its ``dataset.json`` says.
        split: train or validation.
        crop: How images are cropped.
        options: Further arguments of `TFRecords`.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, split: str, crop: Crop, **options: Any
    ) -> None:
        self.folder = folder
        encoding = manifest.plan.get("encoding", {})
        self.is_packed = bool(encoding.get("short_side") or encoding.get("raw"))
        self.shards = manifest.shards[split]
        for shard in self.shards:
            path = folder / shard.name
            if not path.is_file() or path.stat().st_size != shard.num_bytes:
                raise DatasetError(
                    f"{path} is missing or incomplete; it should have "
                    f"{shard.num_bytes:,} bytes. Copy or pack the dataset again."
                )
        if manifest.classes is not None:
            self.classes = tuple(manifest.classes)
        files = [folder / shard.name for shard in self.shards if shard.num_samples]
        super().__init__(files, crop, **options)

    def damaged_files(self) -> Iterator[str]:
        """Yield the files whose checksum is wrong; reads all of them."""
        for shard in self.shards:
            with (self.folder / shard.name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    yield str(self.folder / shard.name)


# Writing


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How packed images are stored."""

    short_side: int | None = None
    """Larger images are resized to this length of their shorter side; None keeps them as
    they are, byte for byte."""
    quality: int = 90
    """Quality of the JPEGs that resized images are stored as."""
    raw: bool = False
    """Store pixels instead of JPEGs: larger, and nothing to decode."""

    def encode(self, content: Encoded | np.ndarray) -> Encoded | np.ndarray:
        """Return an image as it is stored; raise CorruptSample if it cannot be read."""
        if self.short_side is None and not self.raw:
            return content
        try:
            return self._convert(content)
        except UnidentifiedImageError as error:
            raise CorruptSample("not a JPEG, PNG or WebP image") from error
        except DECODE_ERRORS as error:
            raise CorruptSample(str(error) or type(error).__name__) from error

    def _convert(self, content: Encoded | np.ndarray) -> Encoded | np.ndarray:
        is_raw = isinstance(content, np.ndarray)
        opened = Image.fromarray(content) if is_raw else open_image(io.BytesIO(content))
        with opened as image:
            short, target = min(image.size), self.short_side or min(image.size)
            is_jpeg = image.format == "JPEG" and image.mode == "RGB"
            if short <= target and is_jpeg and not self.raw:
                return content  # encoding it again would only lose quality
            width, height = (max(1, round(x * target / short)) for x in image.size)
            size = width, height
            if short > target:
                image.draft(None, size)  # a JPEG is decoded at a fraction of its size
            pixels = to_rgb(image)
            if short > target:
                pixels = pixels.resize(size, Image.Resampling.BICUBIC)
        if self.raw:
            return np.asarray(pixels)
        out = io.BytesIO()
        pixels.save(out, "JPEG", quality=self.quality)
        return out.getvalue()


class PackJob(NamedTuple):
    """Reads samples and encodes them as records, in a worker process."""

    read: ReadSample
    encoding: Encoding
    memory_bytes: int = 0

    def open(self, memory: Any) -> "Callable[[list[Any]], list[bytes | str]]":
        """Return the function that runs a task."""
        del memory
        return self.run

    def run(self, locations: list[Any]) -> list[bytes | str]:
        """Return a record for every location, or the reason why there is none."""
        results: list[bytes | str] = []
        for location in locations:
            try:
                content, label = self.read(location)
                example = make_example(self.encoding.encode(content), label)
                results.append(frame_record(example))
            except CorruptSample as error:
                results.append(str(error))
        return results


class Packed(NamedTuple):
    """What `pack` did."""

    manifest: Manifest
    num_written: int
    """Samples written now; the others were there from an earlier attempt."""
    seconds: float


def pack(
    splits: dict[str, ImageSource],
    folder: Path,
    encoding: Encoding,
    *,
    num_classes: int,
    source: str,
    num_workers: int,
    progress: Progress,
) -> Packed:
    """Write a packed dataset. An interrupted call is continued by the same call.

    Args:
        splits: The images: train and, where there is one, validation.
        folder: The folder to write; created if missing.
        encoding: How images are stored.
        num_classes: Number of classes.
        source: Where the images are from.
        num_workers: Worker processes.
        progress: Called after every few samples.
    """
    started = time.monotonic()
    plan = {
        "source": source,
        "samples": {split: len(images) for split, images in splits.items()},
        "names": _hash_names(splits),
        "encoding": asdict(encoding),
    }
    make_folder(folder)
    with _locked(folder):
        if (folder / MANIFEST).exists():
            return Packed(_check_complete(folder, plan), 0, 0.0)
        done = _read_progress(folder, plan)
        num_written = 0
        clear_leftovers(folder, ".*.partial")
        for split, images in splits.items():
            shards = list(_plan_shards(split, len(images)))
            missing = [shard for shard in shards if shard[0] not in done]
            if not missing:
                continue
            pool = WorkerPool(PackJob(images.reader, encoding), num_workers)
            try:
                for name, indices in missing:
                    shard = _write_shard(folder / name, images, indices, pool, progress)
                    done[name] = shard
                    num_written += shard.num_samples
                    _check_limit(images, _shards_of(split, done))
                    _write_progress(folder, plan, done)
                    progress(split, indices.stop, len(images))
            finally:
                pool.close()
        names = getattr(splits["train"], "classes", None)
        manifest = Manifest(
            num_classes=num_classes,
            classes=None if names is None else list(names),
            shards={split: _shards_of(split, done) for split in splits},
            plan=plan,
        )
        fields = {"format": _FORMAT, **asdict(manifest)}
        write_atomically(folder / MANIFEST, json.dumps(fields, indent=1) + "\n")
        (folder / _PROGRESS).unlink(missing_ok=True)
    return Packed(manifest, num_written, time.monotonic() - started)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        with locked(folder):
            yield
    except BlockingIOError as error:
        raise ConfigurationError(f"Another process is packing {folder}.") from error


def _hash_names(splits: dict[str, ImageSource]) -> str:
    digest = hashlib.sha256()
    for images in splits.values():
        for index in range(len(images)):
            # File names may be any bytes.
            digest.update(images.name(index).encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()


def _check_complete(folder: Path, plan: dict[str, Any]) -> Manifest:
    manifest = read_manifest(folder)
    if manifest.plan != plan:
        raise ConfigurationError(
            f"{folder} already holds another packed dataset, from "
            f"{manifest.plan.get('source')}. Choose another folder, or delete it."
        )
    return manifest


def _read_progress(folder: Path, plan: dict[str, Any]) -> dict[str, Shard]:
    """Return the shards that an earlier attempt has finished."""
    if not (folder / _PROGRESS).exists():
        if any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ConfigurationError(f"{folder} is not empty. Choose another folder.")
        _write_progress(folder, plan, {})
        return {}
    found = json.loads((folder / _PROGRESS).read_text())
    if found["plan"] != plan:
        raise ConfigurationError(
            f"{folder} holds an unfinished dataset from other files or options. Repeat "
            "that command to continue it, or delete the folder."
        )
    shards = (Shard(*shard) for shard in found["shards"])
    return {s.name: s for s in shards if _has_size(folder / s.name, s.num_bytes)}


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _write_progress(folder: Path, plan: dict[str, Any], done: dict[str, Shard]) -> None:
    text = json.dumps({"plan": plan, "shards": list(done.values())})
    write_atomically(folder / _PROGRESS, text + "\n")


def _plan_shards(split: str, num_samples: int) -> Iterator[tuple[str, range]]:
    """Yield the name of every file and the samples in it."""
    count = -(-num_samples // _SHARD_SAMPLES)
    for number in range(count):
        first = number * _SHARD_SAMPLES
        indices = range(first, min(num_samples, first + _SHARD_SAMPLES))
        yield f"{split}-{number:05d}-of-{count:05d}", indices


def _shards_of(split: str, done: dict[str, Shard]) -> list[Shard]:
    return sorted(shard for name, shard in done.items() if _split(name) == split)


def _split(name: str) -> str:
    return name.split("-")[0]


def _write_shard(
    path: Path, images: ImageSource, indices: range, pool: WorkerPool, progress: Progress
) -> Shard:
    digest, position = hashlib.sha256(), 0
    skipped: dict[str, str] = {}
    lines = []
    with replacing(path, binary=True) as file:
        for index, result in _encode_ahead(images, indices, pool):
            if isinstance(result, str):
                skipped[images.name(index)] = result
                continue
            file.write(result)
            digest.update(result)
            lines.append(f"{position} {len(result)}\n")
            position += len(result)
            if len(lines) % 64 == 0:
                progress(_split(path.name), index + 1, len(images))
    write_atomically(index_path(path), "".join(lines))
    return Shard(path.name, len(lines), position, digest.hexdigest(), skipped)


def _check_limit(images: ImageSource, shards: list[Shard]) -> None:
    """Raise TooManyCorrupt if too many samples of a split were left out."""
    skipped = {name: why for shard in shards for name, why in shard.skipped.items()}
    if len(skipped) > images.max_corrupt:
        raise TooManyCorrupt(skipped, len(images), images.max_corrupt)


def _encode_ahead(
    images: ImageSource, indices: range, pool: WorkerPool
) -> Iterator[tuple[int, bytes | str]]:
    """Yield the records of a shard in order, while the workers prepare the next ones."""
    pending: deque[tuple[range, Future[list[bytes | str]]]] = deque()
    firsts = iter(range(indices.start, indices.stop, _TASK_SAMPLES))
    while True:
        while len(pending) < _TASKS_PER_WORKER * pool.num_workers:
            if (first := next(firsts, None)) is None:
                break
            some = range(first, min(indices.stop, first + _TASK_SAMPLES))
            task = pool.submit([images.locate(index) for index in some])
            pending.append((some, task))
        if not pending:
            return
        some, task = pending.popleft()
        yield from zip(some, task.result(), strict=True)
