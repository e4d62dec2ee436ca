"""The handwritten digits that scikit-learn carries: 1,797 pictures of 8 x 8."""

import numpy as np

from millrace.data.source import ArraySource

IMAGE_SHAPE = (8, 8, 1)
NUM_CLASSES = 10
LARGEST = 16
"""The value of a black pixel."""
_NUM_VALIDATION = 360


def load_digits() -> tuple[ArraySource, ArraySource]:
    """Return training (1,437) and validation (360) digits, split at random once.

    A sample has ``image`` uint8[8, 8, 1], from 0 to `LARGEST`, and ``label`` int32.
    """
    from sklearn import datasets  # half a second, and only this function wants it

    pixels, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    image = pixels[order].reshape(-1, *IMAGE_SHAPE).astype(np.uint8)
    label = labels[order].astype(np.int32)
    held_out, rest = slice(None, _NUM_VALIDATION), slice(_NUM_VALIDATION, None)
    return (
        ArraySource({"image": image[rest], "label": label[rest]}),
        ArraySource({"image": image[held_out], "label": label[held_out]}),
    )
