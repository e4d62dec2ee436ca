"""Drawings as PNG, with Pillow and the font that comes with it."""

from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from millrace.drawing.svg import Circle, Drawing, Label, Line, Rect

SCALE = 2
"""Pixels per unit of the drawing, for dense screens and for zooming in."""

_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def write_png(drawing: Drawing, colors: Mapping[str, str], path: Path) -> None:
    """Write a drawing without opacity, dashes or vertical labels, such as a timeline."""
    size = (round(drawing.width * SCALE), round(drawing.height * SCALE))
    image = Image.new("RGB", size, colors["surface"])
    hatching = _draw_hatching(size, colors)
    pen = ImageDraw.Draw(image)
    for shape in drawing.shapes:
        if isinstance(shape, Label):
            _draw_label(pen, shape, colors)
        elif isinstance(shape, Line):
            points = [(SCALE * x, SCALE * y) for x, y in shape.points]
            pen.line(points, fill=colors[shape.color], width=round(SCALE * shape.width))
        elif isinstance(shape, Circle):
            center = (SCALE * shape.x, SCALE * shape.y)
            pen.circle(center, SCALE * shape.radius, fill=colors[shape.fill])
        elif shape.fill == "idle":
            box = _pixels(shape)
            image.paste(hatching.crop(box), box)
        else:
            _draw_rect(pen, shape, colors)
    image.save(path, optimize=True)


def _draw_hatching(size: tuple[int, int], colors: Mapping[str, str]) -> Image.Image:
    image = Image.new("RGB", size, colors["idle"])
    pen, (width, height) = ImageDraw.Draw(image), size
    for x in range(0, width + height, 6 * SCALE):
        pen.line([x, 0, x - height, height], fill=colors["hatch"], width=SCALE)
    return image


def _draw_rect(pen: ImageDraw.ImageDraw, rect: Rect, colors: Mapping[str, str]) -> None:
    # Pillow draws an outline inside the box, SVG half of it outside.
    reach = rect.outline_width / 2 if rect.outline else 0.0
    left, top, right, bottom = _pixels(rect, reach)
    if right <= left or bottom <= top:
        return  # thinner than a pixel
    pen.rectangle(
        (left, top, right - 1, bottom - 1),
        fill=colors[rect.fill],
        outline=colors[rect.outline] if rect.outline else None,
        width=round(2 * reach * SCALE),
    )


def _pixels(rect: Rect, reach: float = 0.0) -> tuple[int, int, int, int]:
    return (
        round(SCALE * (rect.x - reach)),
        round(SCALE * (rect.y - reach)),
        round(SCALE * (rect.x + rect.width + reach)),
        round(SCALE * (rect.y + rect.height + reach)),
    )


def _draw_label(pen: ImageDraw.ImageDraw, label: Label, colors: Mapping[str, str]) -> None:
    pen.text(
        (SCALE * label.x, SCALE * label.y),
        label.text,
        fill=colors[label.color],
        font=ImageFont.load_default(label.size * SCALE),
        anchor=_ANCHORS[label.anchor],
        stroke_width=SCALE / 4 if label.bold else 0,  # the font has no bold face
    )
