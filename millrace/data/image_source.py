"""Encoded pictures that are decoded when asked for, in threads, sparing damaged ones."""

import io
import os
import struct
import threading
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from millrace.data.source import ArraySource
from millrace.data.stream import Stream, Transform

PerImage = Callable[[Image.Image, np.random.Generator | None], np.ndarray]
"""Makes the array of one picture, at random with a generator and always the same without.

The image is opened but not decoded. Every array must have the same shape."""

# ``open_image`` refuses images of too many pixels itself, in a line that names the file.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_FORMATS = ("JPEG", "PNG", "WEBP")  # some of Pillow's other readers start programs
_MOST_PIXELS = 64_000_000  # 0.2 GB in RGB; the largest picture of ImageNet has 50 million
_MOST_JPEG_PIXELS = 160_000_000  # more than any camera's
_MIN_CORRUPT = 10
_MAX_NAMES_SHOWN = 3
_DECODE_ERRORS = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class CorruptSample(ValueError):
    """One sample cannot be read; another takes its place."""


class TooManyCorrupt(RuntimeError):
    """More samples cannot be read than one may overlook."""

    def __init__(self, reasons: Mapping[str, str], num_samples: int, limit: int) -> None:
        lines = [f"  {name}: {why}" for name, why in reasons.items()]
        if len(lines) > _MAX_NAMES_SHOWN:
            hidden = len(lines) - _MAX_NAMES_SHOWN
            lines = [*lines[:_MAX_NAMES_SHOWN], f"  and {hidden} more"]
        super().__init__(
            f"{len(reasons)} of {num_samples} samples cannot be read; at most {limit} "
            "may be replaced by others (max_corrupt):\n" + "\n".join(lines)
        )
        self.names = tuple(reasons)


class ImageSource(ABC):
    """Pictures and labels by index; each is read and decoded anew.

    A sample that cannot be decoded is remembered and replaced by the next good one of
    the data set, so the same batch comes out whenever, and in however many parts, it is
    read. An error of the disk is no damage, and is raised.

    Args:
        num_samples: How many there are.
        prepare: Makes the array of each picture.
        num_threads: How many pictures to decode at a time; as many as there are cores
            where not given.
        max_corrupt: Samples that may be damaged before it is an error; 0.1 % of them,
            and at least 10, where not given.
    """

    def __init__(
        self,
        num_samples: int,
        prepare: PerImage,
        *,
        num_threads: int | None = None,
        max_corrupt: int | None = None,
    ) -> None:
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}.")
        if max_corrupt is not None and max_corrupt < 0:
            raise ValueError(f"max_corrupt must not be negative, got {max_corrupt}.")
        self._num_samples = num_samples
        self._prepare = prepare
        self._threads = ThreadPoolExecutor(
            num_threads or num_cores(), thread_name_prefix="millrace-decode"
        )
        self.max_corrupt = (
            max(_MIN_CORRUPT, num_samples // 1000) if max_corrupt is None else max_corrupt
        )
        self._corrupt: dict[int, str] = {}
        self._corrupt_lock = threading.Lock()

    @abstractmethod
    def name(self, index: int) -> str:
        """Return what to call a sample in a message: its file, and where in it."""

    @abstractmethod
    def encoded(self, index: int) -> tuple[bytes, int]:
        """Return a sample's file content and label; raise CorruptSample if damaged."""

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return self.read(indices, None)

    @property
    def corrupt(self) -> dict[str, str]:
        """The damaged samples met so far, by name, with what is wrong."""
        with self._corrupt_lock:
            return {self.name(index): why for index, why in self._corrupt.items()}

    def unreadable(self, indices: np.ndarray) -> np.ndarray:
        """Say which of these samples have been found damaged, so others stand for them."""
        with self._corrupt_lock:
            return np.array([int(index) in self._corrupt for index in indices], bool)

    def read(
        self, indices: np.ndarray, generator: np.random.Generator | None
    ) -> dict[str, np.ndarray]:
        """Return ``image`` and ``label`` at `indices`, prepared with `generator`.

        Each picture gets a generator of its own, so the number of threads changes
        nothing.
        """
        places = [int(index) for index in indices]
        generators: list[np.random.Generator | None] = [None] * len(places)
        if generator is not None:
            generators = list(generator.spawn(len(places)))
        samples = list(self._threads.map(self._decode, places, generators))
        self._check_limit()
        return _stack(
            self._following(place, generator) if sample is None else sample
            for place, generator, sample in zip(places, generators, samples, strict=True)
        )

    def stream(
        self, batch_size: int, *, transform: Transform | None = None, **options: Any
    ) -> Stream:
        """Return a `Stream` whose generator reaches every picture's preparation.

        Args:
            batch_size: Samples per batch.
            transform: Changes each batch after decoding.
            options: The other arguments of `Stream`.
        """

        def decode(batch: Any, generator: np.random.Generator) -> Any:
            decoded = self.read(batch["index"], generator)
            return decoded if transform is None else transform(decoded, generator)

        # Every picture has a generator of its own; what else is done to them, we know not.
        decode.by_sample = transform is None  # pyright: ignore[reportFunctionMemberAccess]
        # The stream shuffles numbers; only its transform is given the generator.
        numbers = ArraySource({"index": np.arange(len(self))})
        return Stream(numbers, batch_size, transform=decode, **options)

    def _decode(
        self, index: int, generator: np.random.Generator | None
    ) -> tuple[np.ndarray, int] | None:
        try:
            content, label = self.encoded(index)
        except CorruptSample as error:
            return self._remember(index, str(error))
        try:
            with open_image(io.BytesIO(content)) as image:
                return self._prepare(image, generator), label
        except UnidentifiedImageError:
            return self._remember(index, "neither JPEG, PNG nor WebP")
        except _DECODE_ERRORS as error:
            return self._remember(index, str(error) or type(error).__name__)

    def _remember(self, index: int, reason: str) -> None:
        with self._corrupt_lock:
            self._corrupt[index] = reason

    def _check_limit(self) -> None:
        if len(self._corrupt) > self.max_corrupt:
            raise TooManyCorrupt(self.corrupt, len(self), self.max_corrupt)

    def _following(
        self, index: int, generator: np.random.Generator | None
    ) -> tuple[np.ndarray, int]:
        """Return the first good sample after `index` in the data set.

        It depends on nothing else, so that processes which read parts of a batch get what
        one that reads all of it gets.
        """
        for step in range(1, len(self)):
            # A fresh one each: what a failure has drawn may depend on how far it came.
            fresh = None if generator is None else generator.spawn(1)[0]
            sample = self._decode((index + step) % len(self), fresh)
            self._check_limit()
            if sample is not None:
                return sample
        raise TooManyCorrupt(self.corrupt, len(self), self.max_corrupt)


def open_image(
    file: BinaryIO | Path | str, formats: tuple[str, ...] | None = _FORMATS
) -> Image.Image:
    """Open a picture without decoding it; refuse one that would fill the memory.

    A file of half a megabyte can hold a picture of hundreds of millions of pixels. JPEG
    may have more of them, because it is decoded at a fraction of its size, unless it is
    progressive.
    """
    image = Image.open(file, formats=formats)
    is_shrunk = image.format == "JPEG" and "progressive" not in image.info
    most = _MOST_JPEG_PIXELS if is_shrunk else _MOST_PIXELS
    if image.width * image.height > most:
        size = f"{image.width} x {image.height}"
        image.close()
        raise ValueError(f"it has {size} pixels, more than {most // 10**6} million")
    return image


def num_cores() -> int:
    """Count the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _stack(samples: Iterable[tuple[np.ndarray, int]]) -> dict[str, np.ndarray]:
    images, labels = zip(*samples, strict=True)
    shapes = sorted({image.shape for image in images})
    if len(shapes) > 1:
        raise ValueError(
            f"The pictures of a batch were prepared to different shapes: {shapes}. "
            "`prepare` must bring them all to one."
        )
    return {"image": np.stack(images), "label": np.array(labels, np.int32)}
