"""Arrays that a user passes from Python, and how a run records them.

A configuration is plain data, so it holds only a record of the arrays: shapes and a
checksum. The arrays themselves are found by the checksum as long as somebody uses them.
"""

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.config import ConfigurationError

_held: "weakref.WeakValueDictionary[str, HeldArrays]" = weakref.WeakValueDictionary()


class HeldArrays:
    """Named arrays in memory, with their record; ``find_held`` finds them.

    Args:
        arrays: The arrays by name.
        facts: More plain values for the record.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], **facts: Any) -> None:
        self.arrays = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
        checksum = hashlib.blake2b(digest_size=8)
        for name, array in self.arrays.items():
            checksum.update(f"{name} {array.dtype} {array.shape} ".encode())
            checksum.update(array.reshape(-1).view(np.uint8).data)
        self.record = {
            "checksum": checksum.hexdigest(),
            "shapes": {name: list(array.shape) for name, array in self.arrays.items()},
            "types": {name: str(array.dtype) for name, array in self.arrays.items()},
            **facts,
        }
        _held[self.record["checksum"]] = self


def find_held(record: Mapping[str, Any]) -> HeldArrays | None:
    """Return the arrays of a record; None if they are not in memory."""
    return _held.get(str(record.get("checksum")))


def require_held(record: Mapping[str, Any], function: str) -> HeldArrays:
    """Return the arrays of a record.

    Args:
        record: From ``HeldArrays``.
        function: The Python function that takes them, for the error message.
    """
    found = find_held(record)
    if found is None:
        raise ConfigurationError(
            f"This run was trained on arrays in memory. Pass the same arrays again: "
            f"{function}(data=…)."
        )
    return found


def as_numpy(name: str, value: Any) -> np.ndarray:
    """Return a value as an array, or raise an error of one sentence."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"{name} cannot be converted to an array: {error}"
        ) from None
    if array.dtype == object or array.ndim == 0:
        found = "one of objects" if array.ndim else type(value).__name__
        raise ConfigurationError(f"{name} must be an array, got {found}.")
    return array


def as_images(name: str, value: Any) -> np.ndarray:
    """Return images as uint8 or float32 of shape (images, height, width, channels)."""
    images = as_numpy(name, value)
    if images.ndim == 3:
        images = images[..., None]
    shape = images.shape
    if 0 in shape:
        raise ConfigurationError(f"{name} must not be empty, got the shape {shape}.")
    if images.ndim != 4:
        raise ConfigurationError(
            f"{name} must have the shape (images, height, width, channels) or (images, "
            f"height, width), got {shape}."
        )
    if shape[1] in (1, 3) and shape[3] > 4:
        raise ConfigurationError(
            f"{name} have the shape {shape}, with channels first: pass "
            "images.transpose(0, 2, 3, 1)."
        )
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind not in "biuf":
        raise ConfigurationError(f"{name} must be numbers, got {images.dtype}.")
    images = images.astype(np.float32)
    if not np.isfinite(images).all():
        raise ConfigurationError(f"{name} must be finite, but some are NaN or inf.")
    return images
