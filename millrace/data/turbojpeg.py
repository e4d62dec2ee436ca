"""Decodes a part of a JPEG with libjpeg-turbo's own library, called through ctypes.

Its TurboJPEG 3 interface can skip columns and rows outside a crop. None of the Python
packages for JPEGs offers that. Most of the time is Huffman decoding, which cannot be
skipped, so an image takes 2 to 5 % less than with simplejpeg. The library itself is in the
wheel of the package ``turbojpeg``, whose Python module is not needed, or is installed with
the system (version 3 or newer).
"""

import contextlib
import ctypes
import glob
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from millrace.data.jpeg_header import Encoded, JpegHeader, shorten

_SYSTEM_NAMES = ("libturbojpeg.so.0", "libturbojpeg.0.dylib")
_DECOMPRESS, _RGB, _FATAL = 1, 0, 1  # TJINIT_DECOMPRESS, TJPF_RGB, TJERR_FATAL
_KEPT_BYTES = 16 << 20  # most crops take less than 1 MB
_CONTEXT_ROWS = 2  # rows above that the first row of a crop may depend on, and one more


class _Region(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("x", "y", "width", "height"))


class _ScalingFactor(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("numerator", "denominator"))


_SCALING = {scale: _ScalingFactor(1, scale) for scale in (1, 2, 4, 8)}
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_SIGNATURES = {
    "tj3Init": (_POINTER, [_INT]),
    "tj3Destroy": (None, [_POINTER]),
    "tj3GetErrorCode": (_INT, [_POINTER]),
    "tj3DecompressHeader": (_INT, [_POINTER, _POINTER, ctypes.c_size_t]),
    "tj3SetScalingFactor": (_INT, [_POINTER, _ScalingFactor]),
    "tj3SetCroppingRegion": (_INT, [_POINTER, _Region]),
    "tj3Decompress8": (
        _INT,
        [_POINTER, _POINTER, ctypes.c_size_t, _POINTER, _INT, _INT],
    ),
}


class TurboJpeg:
    """The functions of a TurboJPEG 3 library; calls release the interpreter lock.

    Args:
        path: The library.

    Raises:
        OSError: It cannot be loaded.
        AttributeError: It is older than version 3.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        library = ctypes.CDLL(path)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        self._threads = threading.local()

    def decode(
        self, content: Encoded, header: JpegHeader, box: tuple[int, ...], scale: int
    ) -> tuple[np.ndarray, tuple[int, int]]:
        """Decode the part of a JPEG that a box needs.

        Args:
            content: The file.
            header: Its header.
            box: Left and upper edge, width and height: multiples of `scale`, in pixels of
                the file.
            scale: Decode at 1/scale of the size: 1, 2, 4 or 8.

        Returns:
            Pixels that contain the box, and where their left and upper edge is in the
            decoded image. The next call of this thread overwrites them.

        Raises:
            ValueError: The library objects to the file.
        """
        content, height = shorten(content, header, box[1] + box[3])
        region = _choose_region(header, height, box, scale)
        pixels = self._take_pixels(region.height, region.width)
        encoded = np.frombuffer(content, np.uint8)
        # A new handle every time, which costs little: an old one would lend its tables to
        # a file without any.
        handle = self._library.tj3Init(_DECOMPRESS)
        try:
            self._decompress(handle, encoded, scale, region, pixels)
        finally:
            self._library.tj3Destroy(handle)
        return pixels, (region.x, region.y)

    def _decompress(
        self,
        handle: Any,
        encoded: np.ndarray,
        scale: int,
        region: _Region,
        pixels: np.ndarray,
    ) -> None:
        library, file = self._library, (handle, encoded.ctypes.data, encoded.size)
        self._check(handle, library.tj3DecompressHeader(*file))
        self._check(handle, library.tj3SetScalingFactor(handle, _SCALING[scale]))
        self._check(handle, library.tj3SetCroppingRegion(handle, region))
        self._check(handle, library.tj3Decompress8(*file, pixels.ctypes.data, 0, _RGB))

    def _check(self, handle: Any, result: int) -> None:
        # Warnings are ignored, as Pillow does. A shortened file always causes one.
        if result and self._library.tj3GetErrorCode(handle) == _FATAL:
            raise ValueError("libjpeg-turbo objects to the file")

    def _take_pixels(self, height: int, width: int) -> np.ndarray:
        """Return an array (height, width, 3) in memory that this thread uses every time."""
        size = height * width * 3
        if size > _KEPT_BYTES:
            return np.empty((height, width, 3), np.uint8)
        memory = getattr(self._threads, "memory", None)
        if memory is None or memory.size < size:
            memory = self._threads.memory = np.empty(size, np.uint8)
        return memory[:size].reshape(height, width, 3)


def _choose_region(
    header: JpegHeader, height: int, box: tuple[int, ...], scale: int
) -> _Region:
    """Return the region to decode, in decoded pixels, for a box with the right pixels.

    Its left edge has to be that of an MCU. Interpolated color needs a neighbor on every
    side, which it gets from one MCU more to the left and to the right.
    """
    left, top, right, bottom = (
        edge // scale for edge in (box[0], box[1], box[0] + box[2], box[1] + box[3])
    )
    step = max(1, header.mcu[0] // scale)
    x = max(0, (left // step - 1) * step)
    y = max(0, top - _CONTEXT_ROWS)
    right = min(right + step, -(-header.width // scale))
    bottom = min(bottom + _CONTEXT_ROWS, -(-height // scale))
    return _Region(x, y, right - x, bottom - y)


def load() -> TurboJpeg | None:
    """Return the first TurboJPEG 3 library that is installed, or None."""
    for path in (*_find_in_wheel(), *_SYSTEM_NAMES):
        with contextlib.suppress(OSError, AttributeError):
            return TurboJpeg(path)
    return None


def _find_in_wheel() -> list[str]:
    """Return the libraries in the package ``turbojpeg``, which is not imported."""
    try:
        spec = importlib.util.find_spec("turbojpeg")
    except (ImportError, ValueError):
        return []
    if spec is None or spec.origin is None:
        return []
    folder = glob.escape(str(Path(spec.origin).parent))
    return sorted(glob.glob(os.path.join(folder, "turbojpeg.libs", "libturbojpeg*")))
