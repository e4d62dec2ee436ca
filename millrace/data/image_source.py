"""Encoded images, decoded in threads when requested; corrupt ones are replaced.

A sample goes through these steps, each in one place: `read_encoded` reads its bytes,
`open_image` parses the header, `prepare` decodes, crops and flips it, and `_stack` makes
the batch. A batch transform, if any, comes after that.
"""

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

PrepareImage = Callable[[Image.Image, np.random.Generator | None], np.ndarray]
"""Decodes one opened image and returns an array, for example `augment.prepare_image`.

With a generator the result is random, without one it is always the same. All arrays must
have one shape."""

# `open_image` rejects images with too many pixels itself, and names the file.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_FORMATS = ("JPEG", "PNG", "WEBP")  # some other readers of Pillow start programs
_MAX_PIXELS = 64_000_000  # 0.2 GB in RGB; the largest image of ImageNet has 50 million
_MAX_JPEG_PIXELS = 160_000_000  # more than any camera produces
_MIN_MAX_CORRUPT = 10
_MAX_NAMES_SHOWN = 3
# What Pillow raises for damaged files. It has no common base class for them.
_DECODE_ERRORS = (
    *(OSError, EOFError, SyntaxError, ValueError, IndexError, struct.error, zlib.error),
    Image.DecompressionBombError,
)


class CorruptSample(ValueError):
    """One sample cannot be read and will be replaced by another."""


class TooManyCorrupt(RuntimeError):
    """More samples are corrupt than `max_corrupt` allows."""

    def __init__(self, reasons: Mapping[str, str], num_samples: int, limit: int) -> None:
        lines = [f"  {name}: {reason}" for name, reason in reasons.items()]
        if len(lines) > _MAX_NAMES_SHOWN:
            hidden = len(lines) - _MAX_NAMES_SHOWN
            lines = [*lines[:_MAX_NAMES_SHOWN], f"  and {hidden} more"]
        super().__init__(
            f"{len(reasons)} of {num_samples} samples cannot be read; at most {limit} "
            "may be replaced by others (max_corrupt):\n" + "\n".join(lines)
        )
        self.names = tuple(reasons)


class ImageSource(ABC):
    """Images and labels by index, read and decoded each time they are requested.

    A sample that cannot be decoded is recorded and replaced by the next good one of the
    dataset. The replacement does not depend on the batch, so a batch is the same however
    often, and in however many parts, it is read. A read error of the disk is raised.

    Args:
        num_samples: Number of samples.
        prepare: Decodes an image into an array.
        num_threads: Images decoded at a time; by default one per core.
        max_corrupt: Corrupt samples allowed before an error is raised; by default 0.1 %
            of the samples, and at least 10.
    """

    def __init__(
        self,
        num_samples: int,
        prepare: PrepareImage,
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
        if max_corrupt is None:
            max_corrupt = max(_MIN_MAX_CORRUPT, num_samples // 1000)
        self.max_corrupt = max_corrupt
        self._corrupt: dict[int, str] = {}
        self._corrupt_lock = threading.Lock()

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a sample for messages: its file, and the offset in it."""

    @abstractmethod
    def read_encoded(self, index: int) -> tuple[bytes, int]:
        """Return the encoded image and the label; raise CorruptSample if damaged."""

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return self.read(indices, None)

    @property
    def corrupt(self) -> dict[str, str]:
        """The corrupt samples found so far: name and reason."""
        with self._corrupt_lock:
            return {self.name(index): reason for index, reason in self._corrupt.items()}

    def is_corrupt(self, indices: np.ndarray) -> np.ndarray:
        """Return which of these samples have been found corrupt and replaced."""
        with self._corrupt_lock:
            return np.array([int(index) in self._corrupt for index in indices], bool)

    def read(
        self, indices: np.ndarray, generator: np.random.Generator | None
    ) -> dict[str, np.ndarray]:
        """Return ``image`` and ``label`` at `indices`, prepared with `generator`.

        Each image has its own generator, so the number of threads changes nothing.
        """
        numbers = [int(index) for index in indices]
        generators: list[np.random.Generator | None] = [None] * len(numbers)
        if generator is not None:
            generators = list(generator.spawn(len(numbers)))
        samples = list(self._threads.map(self._decode, numbers, generators))
        self._check_limit()
        return _stack(
            self._find_replacement(number, generator) if sample is None else sample
            for number, generator, sample in zip(numbers, generators, samples, strict=True)
        )

    def stream(
        self, batch_size: int, *, transform: Transform | None = None, **options: Any
    ) -> Stream:
        """Return a `Stream` whose generator reaches the preparation of every image.

        Args:
            batch_size: Samples per batch.
            transform: Changes each batch after decoding.
            options: Further arguments of `Stream`.
        """

        def decode(batch: Any, generator: np.random.Generator) -> Any:
            decoded = self.read(batch["index"], generator)
            return decoded if transform is None else transform(decoded, generator)

        # Decoding is by sample; a further transform may not be.
        decode.by_sample = transform is None  # pyright: ignore[reportFunctionMemberAccess]
        # The stream shuffles indices and decodes in its transform, because only the
        # transform is given the generator of the batch.
        indices = ArraySource({"index": np.arange(len(self))})
        return Stream(indices, batch_size, transform=decode, **options)

    def _decode(
        self, index: int, generator: np.random.Generator | None
    ) -> tuple[np.ndarray, int] | None:
        try:
            content, label = self.read_encoded(index)
        except CorruptSample as error:
            return self._record_corrupt(index, str(error))
        try:
            with open_image(io.BytesIO(content)) as image:
                return self._prepare(image, generator), label
        except UnidentifiedImageError:
            return self._record_corrupt(index, "not a JPEG, PNG or WebP image")
        except _DECODE_ERRORS as error:
            return self._record_corrupt(index, str(error) or type(error).__name__)

    def _record_corrupt(self, index: int, reason: str) -> None:
        with self._corrupt_lock:
            self._corrupt[index] = reason

    def _check_limit(self) -> None:
        if len(self._corrupt) > self.max_corrupt:
            raise TooManyCorrupt(self.corrupt, len(self), self.max_corrupt)

    def _find_replacement(
        self, index: int, generator: np.random.Generator | None
    ) -> tuple[np.ndarray, int]:
        """Return the first good sample after `index` in the dataset.

        It depends on nothing else, so processes that each read a part of a batch agree
        with one that reads all of it.
        """
        for step in range(1, len(self)):
            # A fresh generator per attempt: how much a failed attempt has drawn may
            # depend on where the file is damaged.
            fresh = None if generator is None else generator.spawn(1)[0]
            sample = self._decode((index + step) % len(self), fresh)
            self._check_limit()
            if sample is not None:
                return sample
        raise TooManyCorrupt(self.corrupt, len(self), self.max_corrupt)


def open_image(
    file: BinaryIO | Path | str, formats: tuple[str, ...] | None = _FORMATS
) -> Image.Image:
    """Open an image without decoding it; reject one that would fill the memory.

    A file of half a megabyte can hold hundreds of millions of pixels. A JPEG may have
    more than other formats because it is decoded at a fraction of its size, unless it is
    progressive.
    """
    image = Image.open(file, formats=formats)
    is_reduced = image.format == "JPEG" and "progressive" not in image.info
    limit = _MAX_JPEG_PIXELS if is_reduced else _MAX_PIXELS
    if image.width * image.height > limit:
        size = f"{image.width} x {image.height}"
        image.close()
        raise ValueError(f"it has {size} pixels, more than {limit // 10**6} million")
    return image


def num_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _stack(samples: Iterable[tuple[np.ndarray, int]]) -> dict[str, np.ndarray]:
    images, labels = zip(*samples, strict=True)
    shapes = sorted({image.shape for image in images})
    if len(shapes) > 1:
        raise ValueError(
            f"`prepare` returned images of different shapes in one batch: {shapes}. It "
            "must bring all images to one shape."
        )
    return {"image": np.stack(images), "label": np.array(labels, np.int32)}
