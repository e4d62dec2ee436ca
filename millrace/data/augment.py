"""What happens to pictures on the host: crops, flips and scaling, in NumPy and Pillow.

Batches are arrays (samples, height, width, channels); single pictures are Pillow images,
not yet decoded where that saves work. Chance comes from the given generator only.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from millrace.data.stream import Transform

T = TypeVar("T", bound=Callable[..., Any])

_CROP_ATTEMPTS = 100
_SHORT_SIDE_RATIO = 256 / 224  # short side after resizing to side of the crop

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge, in pixels."""

# ---------------------------------------------------------------------------- batches


def on_images(*functions: Callable[[np.ndarray, np.random.Generator], Any]) -> Transform:
    """Make a stream's transform that applies these functions to ``batch["image"]``.

    >>> from millrace.data.source import ArraySource
    >>> from millrace.data.stream import Stream
    >>> source = ArraySource({"image": np.zeros((8, 32, 32, 3)), "label": np.arange(8)})
    >>> stream = Stream(source, 4, transform=on_images(random_flip, pad_and_crop))
    >>> next(iter(stream))["image"].shape
    (4, 32, 32, 3)
    """

    def transform(batch: Any, generator: np.random.Generator) -> dict[str, Any]:
        images = batch["image"]
        for function in functions:
            images = function(images, generator)
        return {**batch, "image": images}

    alone = all(getattr(function, "by_sample", False) for function in functions)
    return by_sample(transform) if alone else transform


def by_sample(function: T) -> T:
    """Mark a function of a batch that treats each of its samples by itself."""
    function.by_sample = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


@by_sample
def random_flip(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Mirror each picture, left to right, with probability one half."""
    flipped = generator.random(len(images)) < 0.5
    mirrored = images.copy()
    mirrored[flipped] = images[flipped, :, ::-1]
    return mirrored


@by_sample
def pad_and_crop(
    images: np.ndarray, generator: np.random.Generator, padding: int = 4
) -> np.ndarray:
    """Put `padding` zeros around each picture and cut its size out somewhere."""
    count, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    places = generator.integers(0, 2 * padding + 1, (2, count)).T
    cropped = np.empty_like(images)
    # One copy per picture takes a quarter of the time of one index for all.
    for new, old, (top, left) in zip(cropped, padded, places, strict=True):
        new[:] = old[top : top + height, left : left + width]
    return cropped


def standardize(images: np.ndarray) -> np.ndarray:
    """Give each picture mean 0 and standard deviation 1, over pixels and channels.

    The deviation counts as at least 1/√(number of values), so that an even picture
    becomes zeros and not a division by zero.
    """
    pixels = images.reshape(*images.shape[:-3], -1).astype(np.float32)
    pixels -= pixels.mean(-1, keepdims=True)
    # The sum of the squares as a product: no array of squares.
    squares = pixels[..., None, :] @ pixels[..., None]
    std = np.sqrt(squares[..., 0] / pixels.shape[-1])
    pixels /= np.maximum(std, np.float32(1 / math.sqrt(pixels.shape[-1])))
    return pixels.reshape(images.shape)


def normalize(
    images: np.ndarray, mean: Sequence[float], std: Sequence[float]
) -> np.ndarray:
    """Scale bytes to 0–1, then subtract `mean` and divide by `std`, per channel."""
    scale = 1 / (255 * np.asarray(std))
    offset = np.asarray(mean) / np.asarray(std)
    return images * scale.astype(np.float32) - offset.astype(np.float32)


# --------------------------------------------------------------------- single pictures


def imagenet_image(
    image: Image.Image,
    generator: np.random.Generator | None,
    *,
    size: int = 224,
    flip: bool = True,
) -> np.ndarray:
    """Return uint8 (size, size, 3): with a generator for training, without for validation.

    Training takes a random resized crop and, with `flip`, mirrors every other; validation
    resizes the short side to 256/224 of `size` and takes the center.
    """
    if generator is None:
        return np.asarray(centre_crop(image, size))
    image = random_resized_crop(image, generator, size)
    if flip and generator.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def random_resized_crop(
    image: Image.Image, generator: np.random.Generator, size: int
) -> Image.Image:
    """Cut out a random part and bring it to `size` x `size`."""
    return _decode_part(image, random_box(image.width, image.height, generator), size)


def centre_crop(
    image: Image.Image, size: int, short_side: int | None = None
) -> Image.Image:
    """Resize so that the short side is `short_side`, and cut out the center.

    Both happen in one step. `short_side` is 256/224 of `size` where not given.
    """
    short_side = short_side or int(size * _SHORT_SIDE_RATIO)
    side = min(image.size) * size / short_side
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return _decode_part(image, (left, top, left + side, top + side), size)


def random_box(
    width: int,
    height: int,
    generator: np.random.Generator,
    *,
    area: tuple[float, float] = (0.05, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Draw a part of a picture by its share of the area and its width over height.

    Both are drawn evenly. What does not fit into the picture is drawn again, up to 100
    times; then it is the whole picture.
    """
    for _ in range(_CROP_ATTEMPTS):
        pixels = generator.uniform(*area) * width * height
        ratio = generator.uniform(*aspect)
        box_width = round(math.sqrt(pixels * ratio))
        box_height = round(math.sqrt(pixels / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(generator.integers(width - box_width + 1))
            top = int(generator.integers(height - box_height + 1))
            return (left, top, left + box_width, top + box_height)
    return (0, 0, width, height)


def to_rgb(image: Image.Image) -> Image.Image:
    """Bring a picture of any mode (gray, CMYK, palette, 16 bits) to RGB."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):  # Pillow would clip 16 bits, not scale them
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P":  # a palette with transparency goes by way of RGBA
        image = image.convert("RGBA")
    return image.convert("RGB")


def _decode_part(image: Image.Image, box: Box, size: int) -> Image.Image:
    """Decode a picture and resize the part in `box` to `size` x `size`."""
    left, top, right, bottom = box
    scale = _draft(image, min(right - left, bottom - top) / size)
    box = (left / scale, top / scale, right / scale, bottom / scale)
    return to_rgb(image).resize((size, size), Image.Resampling.BILINEAR, box=box)


def _draft(image: Image.Image, excess: float) -> int:
    """Have a JPEG decoded at 1/2, 1/4 or 1/8 where `excess` times too many pixels remain.

    The decoder then skips most of the work. Other formats are left as they are.
    """
    scale = next(scale for scale in (8, 4, 2, 1) if excess >= scale or scale == 1)
    if scale > 1 and image.format == "JPEG":
        width = image.width
        image.draft(None, (width // scale, image.height // scale))
        if image.width != width:
            return scale
    return 1
