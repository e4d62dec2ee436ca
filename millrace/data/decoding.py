"""Decode, crop and resize one encoded image into a row of a batch.

A JPEG is decoded by libjpeg-turbo (its own library, else simplejpeg, else OpenCV) and
resized by OpenCV where they are installed: together they take half of the time of Pillow,
and neither holds the interpreter lock. Everything else, and every JPEG that they object to,
goes through Pillow, which alone decides whether a file is damaged.
"""

import functools
import io
import math
import struct
import time
import warnings
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from millrace.data.jpeg_header import Encoded, JpegHeader, parse_jpeg_header, shorten
from millrace.data.turbojpeg import TurboJpeg, load

cv2: Any = None
turbojpeg: TurboJpeg | None = None
simplejpeg: Any = None
try:  # the extra "images" may not be installed, or only a part of it
    import cv2  # pyright: ignore[reportMissingImports]

    cv2.setNumThreads(1)  # workers are parallel already
    turbojpeg = load()
    import simplejpeg  # pyright: ignore[reportMissingImports]
except ImportError:
    pass

# `open_image` rejects images with too many pixels itself, and names the file.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_FORMATS = ("JPEG", "PNG", "WEBP")  # some other readers of Pillow start programs
_MAX_PIXELS = 64_000_000  # 0.2 GB in RGB; the largest image of ImageNet has 50 million
_MAX_JPEG_PIXELS = 160_000_000  # more than any camera produces
# What Pillow raises for damaged files. It has no common base class for them.
DECODE_ERRORS = (
    *(OSError, EOFError, SyntaxError, ValueError, IndexError, struct.error, zlib.error),
    Image.DecompressionBombError,
)

_ATTEMPTS = 10  # a random box fits an image of 4:3 at the first attempt 4 times in 5
NUM_DRAWS = 1 + 4 * _ATTEMPTS
"""Random numbers that one image may need: for the flip and for each attempt at a box."""
SHORT_SIDE_RATIO = 256 / 224
"""Short side after resizing for validation, relative to the crop."""
# Below, a blur before the resize changes pixels by less than the rounding of the resize.
_MIN_BLUR_SCALE = 1.15
# Three pixels cannot blur more than that, and five not much more than needed up to here:
# 2 times the longest aspect of a random crop.
_MAX_SMALL_BLUR_SCALE, _MAX_BLUR_SCALE = 2.2, 2.7
_NEWTON_STEPS = 6
Box = tuple[int, int, int, int]
"""Left and upper edge, width and height, in pixels."""


class CorruptSample(ValueError):
    """One sample cannot be read and will be replaced by another."""


class Crop(NamedTuple):
    """How images are cropped and resized."""

    size: int = 224
    """Side of the square result, in pixels."""
    flip: bool = True
    """Whether half of the training images are mirrored, left to right."""
    area: tuple[float, float] = (0.05, 1.0)
    """Share of the area that a random crop covers; uniform."""
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height of a random crop; uniform."""
    is_random: bool = True
    """Whether training images are cropped at random, or at the center."""

    def choose_box(self, width: int, height: int, draws: list[float] | None) -> Box:
        """Return the part of an image to take: random with `draws`, else the center.

        A random box that does not fit is drawn again; after 10 attempts the whole image is
        taken.
        """
        if draws is None or not self.is_random:
            side = max(1, round(min(width, height) / SHORT_SIDE_RATIO))
            return self._snap((width - side) // 2, (height - side) // 2, side, side)
        (low, high), (narrow, wide) = self.area, self.aspect
        for start in range(1, NUM_DRAWS, 4):
            area, aspect, x, y = draws[start : start + 4]
            pixels = (low + area * (high - low)) * width * height
            ratio = narrow + aspect * (wide - narrow)
            box_width = round(math.sqrt(pixels * ratio))
            box_height = round(math.sqrt(pixels / ratio))
            if 0 < box_width <= width and 0 < box_height <= height:
                left = int(x * (width - box_width + 1))
                top = int(y * (height - box_height + 1))
                return self._snap(left, top, box_width, box_height)
        return self._snap(0, 0, width, height)

    def _snap(self, *box: int) -> Box:
        """Return a box whose edges are whole pixels after a reduced decode, too."""
        scale = self.reduction(box[2], box[3])
        left, top, width, height = (edge - edge % scale for edge in box)
        return left, top, width, height

    def reduction(self, width: int, height: int) -> int:
        """Return by how much a JPEG may be reduced while it is decoded: 8, 4, 2 or 1."""
        excess = min(width, height) / self.size
        return next(scale for scale in (8, 4, 2, 1) if excess >= scale or scale == 1)

    def is_flipped(self, draws: list[float] | None) -> bool:
        """Whether to mirror the image that these random numbers belong to."""
        return self.flip and draws is not None and draws[0] < 0.5


class Times(NamedTuple):
    """Seconds that workers have spent on images."""

    reading: float = 0.0
    decoding: float = 0.0
    resizing: float = 0.0

    def plus(self, other: "Times") -> "Times":
        """Return the sum."""
        return Times(*(a + b for a, b in zip(self, other, strict=True)))


def decoder_name() -> str:
    """Return the library that decodes JPEGs."""
    if cv2 is None:
        return "Pillow"
    if turbojpeg is not None:
        return "libjpeg-turbo (crops)"
    return "OpenCV" if simplejpeg is None else "libjpeg-turbo (simplejpeg)"


def decode_into(
    out: np.ndarray,  # uint8 (size, size, 3)
    content: Encoded | np.ndarray,  # encoded, or uint8 (height, width, 3)
    crop: Crop,
    draws: list[float] | None,
    formats: tuple[str, ...] | None = _FORMATS,
) -> tuple[float, float]:
    """Decode an image into `out`; raise CorruptSample if that is impossible.

    Args:
        out: Where the pixels go.
        content: The encoded image, or its pixels.
        crop: How it is cropped.
        draws: NUM_DRAWS numbers in [0, 1) for a random crop; None for the center.
        formats: Formats that are accepted; None accepts all that Pillow reads.

    Returns:
        The seconds spent on decoding and on resizing.
    """
    started = time.perf_counter()
    decoded = _decode_quickly(content, crop, draws)
    if decoded is not None:
        middle = time.perf_counter()
        pixels, box = decoded
        _resize_into(out, pixels, box, flip=crop.is_flipped(draws))
        return middle - started, time.perf_counter() - middle
    try:
        with _open(content, formats) as image:
            box = crop.choose_box(image.width, image.height, draws)
            scale = _draft(image, crop.reduction(box[2], box[3]))
            image = to_rgb(image)
            middle = time.perf_counter()
            left, top, width, height = (edge / scale for edge in box)
            image = image.resize(
                (crop.size, crop.size),
                Image.Resampling.BILINEAR,
                box=(left, top, left + width, top + height),
            )
    except UnidentifiedImageError as error:
        kinds = "a JPEG, PNG or WebP image" if formats == _FORMATS else "an image"
        raise CorruptSample(f"not {kinds}") from error
    except DECODE_ERRORS as error:
        raise CorruptSample(str(error) or type(error).__name__) from error
    array = np.asarray(image)
    out[:] = array[:, ::-1] if crop.is_flipped(draws) else array
    return middle - started, time.perf_counter() - middle


def decode_file(path: Path | str, size: int) -> np.ndarray:
    """Return the center of an image of any format, as for validation: (size, size, 3)."""
    out = np.empty((size, size, 3), np.uint8)
    try:
        decode_into(out, Path(path).read_bytes(), Crop(size=size), None, formats=None)
    except CorruptSample as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    return out


def _open(content: Encoded | np.ndarray, formats: tuple[str, ...] | None) -> Image.Image:
    if isinstance(content, np.ndarray):
        return Image.fromarray(content)
    return open_image(io.BytesIO(content), formats)


# ---------------------------------------------------------------- libjpeg-turbo and OpenCV


def _decode_quickly(
    content: Encoded | np.ndarray, crop: Crop, draws: list[float] | None
) -> tuple[np.ndarray, Box] | None:
    """Decode a JPEG at full size, 1/2, 1/4 or 1/8; return it with the box in its pixels.

    The decoder then skips most of the inverse DCT. Ratios in between would be slower than
    full size, because libjpeg-turbo has no SIMD code for them. Returns None for everything
    that should go to Pillow.
    """
    if cv2 is None:
        return None
    if isinstance(content, np.ndarray):
        return content, crop.choose_box(content.shape[1], content.shape[0], draws)
    header = parse_jpeg_header(content)
    # Truncated files have no end marker: Pillow raises the error.
    if header is None or header.num_components == 4 or content[-2:] != b"\xff\xd9":
        return None
    if header.height * header.width > _MAX_PIXELS:
        return None
    box = crop.choose_box(header.width, header.height, draws)
    scale = crop.reduction(box[2], box[3])
    x = y = 0
    try:
        if turbojpeg is not None:
            pixels, (x, y) = turbojpeg.decode(content, header, box, scale)
        elif simplejpeg is not None:
            pixels = _decode_simplejpeg(content, header, box, scale)
        else:
            pixels = _decode_opencv(content, header, scale)
    except ValueError:
        return None
    left, top, width, height = (edge // scale for edge in box)
    return pixels, (left - x, top - y, width, height)


def _decode_simplejpeg(
    content: Encoded, header: JpegHeader, box: Box, scale: int
) -> np.ndarray:
    """Decode as few rows as the box needs."""
    content, height = shorten(content, header, box[1] + box[3])
    # Not strict: it then ignores what Pillow ignores as well, and the rows that are left.
    size = {"min_height": -(-height // scale), "min_width": -(-header.width // scale)}
    return simplejpeg.decode_jpeg(content, strict=False, **(size if scale > 1 else {}))


def _decode_opencv(content: Encoded, header: JpegHeader, scale: int) -> np.ndarray:
    reduced = {
        1: cv2.IMREAD_COLOR,
        2: cv2.IMREAD_REDUCED_COLOR_2,
        4: cv2.IMREAD_REDUCED_COLOR_4,
        8: cv2.IMREAD_REDUCED_COLOR_8,
    }[scale]
    flags = reduced | cv2.IMREAD_IGNORE_ORIENTATION
    pixels = cv2.imdecode(np.frombuffer(content, np.uint8), flags)
    expected = (-(-header.height // scale), -(-header.width // scale), 3)
    if pixels is None or pixels.shape != expected:
        raise ValueError("left to Pillow")
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels)


def _resize_into(out: np.ndarray, pixels: np.ndarray, box: Box, *, flip: bool) -> None:
    """Resize a part of an image, antialiased like Pillow's bilinear filter.

    OpenCV's bilinear resize skips pixels when it shrinks an image. A blur before it makes
    up for that, if it is shrunk by little, as is usual after a reduced decode.
    """
    left, top, width, height = box
    part = pixels[top : top + height, left : left + width]
    size = out.shape[0]
    horizontal, vertical = width / size, height / size
    largest = max(horizontal, vertical)
    if largest > _MAX_BLUR_SCALE:  # not a JPEG, or a long box
        resized = cv2.resize(part, (size, size), interpolation=cv2.INTER_AREA)
        out[:] = resized[:, ::-1] if flip else resized
        return
    if largest > _MIN_BLUR_SCALE:
        (columns, sigma_x), (rows, sigma_y) = map(_choose_blur, (horizontal, vertical))
        part = cv2.GaussianBlur(
            *(part, (columns, rows), sigma_x),
            sigmaY=sigma_y,
            borderType=cv2.BORDER_REPLICATE,
        )
    if flip:
        cv2.flip(cv2.resize(part, (size, size)), 1, dst=out)
    else:
        cv2.resize(part, (size, size), dst=out)


@functools.lru_cache(maxsize=4096)
def _choose_blur(scale: float) -> tuple[int, float]:
    """Return the size and the standard deviation of the blur before shrinking by `scale`.

    Pillow's filter is a triangle of variance scale² / 6, and a bilinear resize one of 1/6:
    the blur has the difference. It is a Gaussian because OpenCV has fixed-point code for
    that, but not for any kernel; it samples one at whole pixels.
    """
    variance = (scale * scale - 1) / 6
    if variance < 1e-6:
        return 1, 0.0
    # Both kernels by the weight q of the neighbors, relative to the center.
    if scale <= _MAX_SMALL_BLUR_SCALE:  # [q, 1, q]
        size, q = 3, variance / (2 - 2 * variance)
    else:  # [q⁴, q, 1, q, q⁴]
        size, q = 5, 0.5
        for _ in range(_NEWTON_STEPS):
            excess = 2 * q + 8 * q**4 - variance * (1 + 2 * q + 2 * q**4)
            q -= excess / (2 + 32 * q**3 - variance * (2 + 8 * q**3))
    return size, math.sqrt(-1 / (2 * math.log(q)))


# ------------------------------------------------------------------------------- Pillow


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


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode (gray, CMYK, palette, 16-bit) to RGB, decoded."""
    if image.mode == "RGB":
        image.load()
        return image
    if image.mode.startswith("I"):  # Pillow would clip 16 bits instead of scaling them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P":  # a palette with transparency must go through RGBA
        image = image.convert("RGBA")
    return image.convert("RGB")


def _draft(image: Image.Image, scale: int) -> int:
    """Ask for a JPEG at a fraction of its size; return the scale that was granted."""
    if scale > 1 and image.format == "JPEG":
        width = image.width
        image.draft(None, (width // scale, image.height // scale))
        if image.width != width:
            return scale
    return 1
