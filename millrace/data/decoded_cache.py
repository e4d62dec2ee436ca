"""Decoded images in memory, so that a second pass over them need not decode again."""

import numpy as np

IMAGE_BYTES_PER_PIXEL = 3


class DecodedCache:
    """Images cropped at the center, and their labels, by index; empty at first.

    The memory is reserved at once, but the operating system provides it only as it is
    filled: a process that reads a tenth of the images uses a tenth of the memory.

    Args:
        num_samples: Samples of the source.
        size: Height and width of the crops.
    """

    def __init__(self, num_samples: int, size: int) -> None:
        shape = (num_samples, size, size, IMAGE_BYTES_PER_PIXEL)
        self._images = np.empty(shape, np.uint8)
        self._labels = np.empty(num_samples, np.int32)
        self._is_filled = np.zeros(num_samples, bool)

    @staticmethod
    def num_bytes(num_samples: int, size: int) -> int:
        """Return the memory of a full cache."""
        return num_samples * (size * size * IMAGE_BYTES_PER_PIXEL + 5)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray] | None:
        """Return copies of the samples; None unless all of them are there."""
        if not self._is_filled[indices].all():
            return None
        return {"image": self._images[indices], "label": self._labels[indices]}

    def store(self, indices: np.ndarray, batch: dict[str, np.ndarray]) -> None:
        """Keep the samples of a batch."""
        self._images[indices] = batch["image"]
        self._labels[indices] = batch["label"]
        self._is_filled[indices] = True  # last: another thread may be reading
