"""Drawings as PNG, with Pillow and the font it carries."""

from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from millrace.drawing.canvas import Drawing, Label, Line, Rect

SCALE = 2
"""Pixels for each unit of the drawing: sharp on a dense screen, and when zoomed into."""

_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def write_png(drawing: Drawing, colors: Mapping[str, str], path: Path) -> None:
    """Draw into the file at `path`."""
    size = (round(drawing.width * SCALE), round(drawing.height * SCALE))
    image = Image.new("RGB", size, colors["surface"])
    hatched = _hatched(size, colors)
    pen = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        if isinstance(shape, Label):
            _label(pen, shape, colors)
        elif isinstance(shape, Line):
            ends = [SCALE * value for value in shape[:4]]
            pen.line(ends, fill=colors[shape.color], width=SCALE)
        elif shape.fill == "idle":
            box = _box(shape)
            image.paste(hatched.crop(box), box)
        else:
            _rect(pen, shape, colors)
    image.save(path, optimize=True)


def _hatched(size: tuple[int, int], colors: Mapping[str, str]) -> Image.Image:
    image = Image.new("RGB", size, colors["idle"])
    pen, (width, height) = ImageDraw.Draw(image), size
    for x in range(0, width + height, 6 * SCALE):
        pen.line([x, 0, x - height, height], fill=colors["hatch"], width=SCALE)
    return image


def _rect(pen: ImageDraw.ImageDraw, rect: Rect, colors: Mapping[str, str]) -> None:
    left, top, right, bottom = _box(rect)
    if right <= left or bottom <= top:
        return  # thinner than a pixel
    line, weight = colors["surface"], SCALE // 2 if right - left > 4 * SCALE else 0
    if rect.outlined:
        line, weight = colors["ink"], 2 * SCALE
    box = (left, top, right - 1, bottom - 1)
    pen.rectangle(box, fill=colors[rect.fill], outline=line, width=weight)


def _box(rect: Rect) -> tuple[int, int, int, int]:
    right, bottom = rect.x + rect.width, rect.y + rect.height
    left, top, right, bottom = (
        round(SCALE * value) for value in (rect.x, rect.y, right, bottom)
    )
    return left, top, right, bottom


def _label(pen: ImageDraw.ImageDraw, label: Label, colors: Mapping[str, str]) -> None:
    font = ImageFont.load_default(label.size * SCALE)
    pen.text(
        (SCALE * label.x, SCALE * label.y),
        label.text,
        fill=colors[label.color],
        font=font,
        anchor=_ANCHORS[label.anchor],
        stroke_width=SCALE / 4 if label.bold else 0,  # the font has no bold face
    )
