"""Decode, crop and resize one encoded image into a row of a batch.

A JPEG is decoded by libjpeg-turbo (simplejpeg, or else OpenCV) and resized by OpenCV where
they are installed: together they take two thirds of the time of Pillow, and neither holds
the interpreter lock. Everything else, and every JPEG that they object to, goes through
Pillow, which alone decides whether a file is damaged.
"""

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

cv2: Any = None
simplejpeg: Any = None
try:
    import cv2  # pyright: ignore[reportMissingImports]

    cv2.setNumThreads(1)  # workers are parallel already
    import simplejpeg  # pyright: ignore[reportMissingImports]
except ImportError:  # the extra "images" is not installed, or only a part of it
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
_SHORT_SIDE_RATIO = 256 / 224  # short side after resizing, relative to the crop
# Below, a blur before the resize changes pixels by less than the rounding of the resize.
_MIN_BLUR_SCALE = 1.15
_MARGIN_ROWS = 32  # decoded below the crop: chroma of the last row depends on the next MCU

Encoded = bytes | memoryview
"""The bytes of an image file."""
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

    def choose_box(self, width: int, height: int, draws: list[float] | None) -> Box:
        """Return the part of an image to take: random with `draws`, else the center.

        A random box that does not fit is drawn again; after 10 attempts the whole image is
        taken.
        """
        if draws is None:
            side = max(1, round(min(width, height) / _SHORT_SIDE_RATIO))
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


class JpegHeader(NamedTuple):
    """What the header of a JPEG says."""

    height: int
    width: int
    num_components: int
    is_sequential: bool
    """Whether rows are decoded as they are read: neither progressive nor with restarts."""
    height_at: int
    """Where in the file the height is."""


def parse_jpeg_header(content: Encoded) -> JpegHeader | None:
    """Parse the header of a JPEG; return None for anything unusual."""
    position, has_restarts = 2, False
    header = None
    if content[:2] != b"\xff\xd8":
        return None
    try:
        while True:
            if content[position] != 0xFF:
                return None
            marker = content[position + 1]
            if marker == 0xFF:  # padding
                position += 1
                continue
            if marker == 0xDA:  # the pixels begin
                break
            if marker in (0xC0, 0xC1, 0xC2):  # baseline, extended, progressive
                at = position + 5
                height, width, components = struct.unpack_from(">HHB", content, at)
                header = JpegHeader(height, width, components, marker == 0xC0, at)
            has_restarts |= marker == 0xDD
            position += 2 + (content[position + 2] << 8) + content[position + 3]
    except (IndexError, struct.error):
        return None
    if header is None or not (header.height and header.width):
        return None
    return header._replace(is_sequential=header.is_sequential and not has_restarts)


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
    try:
        pixels = (_decode_opencv if simplejpeg is None else _decode_turbo)(
            content, header, box, scale
        )
    except ValueError:
        return None
    left, top, width, height = (edge // scale for edge in box)
    return pixels, (left, top, width, height)


def _decode_turbo(content: Encoded, header: JpegHeader, box: Box, scale: int) -> np.ndarray:
    """Decode as few rows as the box needs.

    Files store rows from top to bottom, so a header that promises fewer of them makes the
    decoder stop early, with the same pixels in the rows that it does decode.
    """
    height = header.height
    needed = box[1] + box[3] + _MARGIN_ROWS
    if header.is_sequential and needed < height:
        patched = bytearray(content)
        struct.pack_into(">H", patched, header.height_at, needed)
        content, height = memoryview(patched), needed
    # Not strict: it then ignores what Pillow ignores as well, and the rows that are left.
    size = {"min_height": -(-height // scale), "min_width": -(-header.width // scale)}
    return simplejpeg.decode_jpeg(content, strict=False, **(size if scale > 1 else {}))


def _decode_opencv(
    content: Encoded, header: JpegHeader, box: Box, scale: int
) -> np.ndarray:
    del box
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

    OpenCV's bilinear resize skips pixels when it shrinks an image. Between 1 and 2, which
    is all that is left after a reduced decode, a blur of three pixels before it makes up
    for that: with [a, 1 - 2a, a] and a = (scale² - 1) / 12, the variances of blur and
    bilinear kernel add up to that of Pillow's triangle, which is `scale` pixels wide.
    """
    left, top, width, height = box
    part = pixels[top : top + height, left : left + width]
    size = out.shape[0]
    horizontal, vertical = width / size, height / size
    largest = max(horizontal, vertical)
    if largest >= 2:  # a reduced decode left it: not a JPEG, or a long box
        resized = cv2.resize(part, (size, size), interpolation=cv2.INTER_AREA)
        out[:] = resized[:, ::-1] if flip else resized
        return
    if largest > _MIN_BLUR_SCALE:
        part = _blur(part, horizontal, vertical)
    if flip:
        cv2.flip(cv2.resize(part, (size, size)), 1, dst=out)
    else:
        cv2.resize(part, (size, size), dst=out)


def _blur(pixels: np.ndarray, horizontal: float, vertical: float) -> np.ndarray:
    """Blur before an image is shrunk by these factors, between 1 and 2."""
    sigmas = []
    for scale in (horizontal, vertical):
        outer = (scale * scale - 1) / 12
        # The standard deviation for which OpenCV samples this kernel from a Gaussian: it
        # has fixed-point code for Gaussians, but not for any kernel.
        ratio = outer / (1 - 2 * outer)
        sigmas.append(math.sqrt(-1 / (2 * math.log(ratio))) if ratio > 1e-6 else 0.0)
    size = (3 if sigmas[0] else 1, 3 if sigmas[1] else 1)
    return cv2.GaussianBlur(
        pixels, size, sigmas[0], sigmaY=sigmas[1], borderType=cv2.BORDER_REPLICATE
    )


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
