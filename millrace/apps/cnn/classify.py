"""Classes of image files: read in threads, classified in batches of one size."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from millrace.apps.cnn.models.spec import has_small_images
from millrace.data.decoding import DECODE_ERRORS, decode_file, open_image, to_rgb
from millrace.data.mnist import DIGITS_MAX_PIXEL

_BATCHES_AHEAD = 2
"""Batches that are read while another one is classified."""


class ClassifiedFile(NamedTuple):
    """An image file, and the probabilities of its classes or why it cannot be read."""

    path: Path
    probabilities: np.ndarray | None
    """float32 (classes,)"""
    error: str | None = None


def read_image(
    path: Path | str, shape: tuple[int, int, int], dataset: str
) -> np.ndarray:  # uint8 (height, width, channels)
    """Read an image file as the validation of a model does; raise ValueError if it cannot.

    Args:
        path: An image of any format that Pillow reads.
        shape: Height, width and channels of the images of the model.
        dataset: The dataset that the model was trained on. Its images are cropped to
            their center if they are large. Otherwise the largest square is resized, and
            for one channel it becomes gray.
    """
    try:
        if not has_small_images(dataset):
            return decode_file(path, shape[0])
        pixels = _read_square(Path(path), shape)
    except OSError as error:
        # Errors of the system name the file themselves; those of Pillow name no reason.
        reason = error.strerror or "it is not an image"
        raise ValueError(f"{path} cannot be read: {reason}.") from error
    if dataset == "digits":  # its pixels are from 0 to 16
        return np.round(pixels * (DIGITS_MAX_PIXEL / 255)).astype(np.uint8)
    return pixels


def _read_square(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    content = path.read_bytes()
    try:
        with open_image(BytesIO(content), None) as opened:
            image = to_rgb(opened)
    except DECODE_ERRORS as error:
        is_known = not isinstance(error, OSError) and str(error)
        reason = str(error) if is_known else "it is not a complete image"
        raise ValueError(f"{path} cannot be read: {reason}.") from error
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side))
    if shape[2] == 1:
        image = image.convert("L")
    image = image.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(shape)


def classify_files(
    paths: Sequence[Path],
    read: Callable[[Path], np.ndarray],
    classify: Callable[[np.ndarray], np.ndarray],
    shape: tuple[int, int, int],
    batch_size: int,
) -> Iterator[ClassifiedFile]:
    """Yield the probabilities of each file, in order.

    Args:
        paths: Image files.
        read: Reads a file as uint8 of `shape`; raises ValueError if it cannot.
        classify: Returns the probabilities of a batch. All batches have the same size.
        shape: Height, width and channels.
        batch_size: Images per batch.
    """
    batches = [paths[n : n + batch_size] for n in range(0, len(paths), batch_size)]
    size = min(batch_size, len(paths))
    num_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[list[Future[np.ndarray]]] = deque()
        for number, batch in enumerate(batches):
            for ahead in batches[number + len(waiting) : number + 1 + _BATCHES_AHEAD]:
                waiting.append([pool.submit(read, path) for path in ahead])
            yield from _classify_batch(batch, waiting.popleft(), classify, (size, *shape))


def _classify_batch(
    paths: Sequence[Path],
    futures: Sequence[Future[np.ndarray]],
    classify: Callable[[np.ndarray], np.ndarray],
    shape: tuple[int, ...],
) -> Iterator[ClassifiedFile]:
    images, errors = np.zeros(shape, np.uint8), {}
    for place, future in enumerate(futures):
        try:
            images[place] = future.result()
        except ValueError as error:
            errors[place] = str(error)
    # If nothing could be read, there is nothing to compute either.
    found = classify(images) if len(errors) < len(paths) else None
    for place, path in enumerate(paths):
        if found is None or place in errors:
            yield ClassifiedFile(path, None, errors[place])
        else:
            yield ClassifiedFile(path, found[place])
