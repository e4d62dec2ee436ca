"""Drawings as lists of shapes in named colors, and their one SVG writer."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal, NamedTuple
from xml.etree import ElementTree

from millrace.drawing.style import PAGE_COLORS

FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
FONT_SIZE = 12.0

Point = tuple[float, float]


class Rect(NamedTuple):
    """A filled box; pointing at it shows `hint`."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    opacity: float = 1.0
    outline: str = ""
    outline_width: float = 1.0
    hint: str = ""


class Circle(NamedTuple):
    """A filled circle; with opacity 0 it only shows `hint` when pointed at."""

    x: float
    y: float
    radius: float
    fill: str
    opacity: float = 1.0
    hint: str = ""


class Line(NamedTuple):
    """A line through two or more points."""

    points: Sequence[Point]
    color: str = "grid"
    width: float = 1.0
    dashed: bool = False
    hint: str = ""


class Label(NamedTuple):
    """A line of text with its middle at height `y`."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    color: str = "muted"
    size: float = FONT_SIZE
    bold: bool = False
    vertical: bool = False


Shape = Rect | Circle | Line | Label


class Drawing(NamedTuple):
    """A page size and its shapes, in drawing order."""

    title: str
    width: float
    height: float
    shapes: Sequence[Shape]


def estimate_width(text: str, size: float = FONT_SIZE) -> float:
    """Return about how wide a text is, without knowing the reader's font."""
    narrow = sum(text.count(letter) for letter in "fijlrt.,()' ")
    return size * (0.62 * len(text) - 0.25 * narrow)


def to_svg(
    drawing: Drawing, colors: Mapping[str, str] | None = None, *, css_class: str = ""
) -> str:
    """Return a drawing as SVG.

    Args:
        drawing: The shapes.
        colors: Fixed colors, for a file of its own with a background. If None, the SVG
            is a part of a page and takes the colors of the page.
        css_class: The class of the SVG in a page.
    """
    width, height = _number(drawing.width), _number(drawing.height)
    head = f' class="{css_class}"' if css_class else f' width="{width}" height="{height}"'
    if colors is not None:
        head = f' xmlns="http://www.w3.org/2000/svg"{head}'
    palette = PAGE_COLORS if colors is None else colors
    parts = [
        f'<svg{head} viewBox="0 0 {width} {height}" role="img" font-family="{FONT}" '
        f'font-size="{_number(FONT_SIZE)}" aria-label="{escape(drawing.title)}">'
    ]
    if any(isinstance(shape, Rect) and shape.fill == "idle" for shape in drawing.shapes):
        parts.append(_hatching(palette))
    if colors is not None:
        parts.append(_rect(Rect(0, 0, drawing.width, drawing.height, "surface"), palette))
    parts += [_element(shape, palette) for shape in drawing.shapes]
    return "\n".join([*parts, "</svg>"])


def _hatching(colors: Mapping[str, str]) -> str:
    # Idle time is hatched as well as gray: it is not one more color to tell apart.
    return (
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{colors["idle"]}"/>'
        f'<path d="M-1 1l2 -2M0 6l6 -6M5 7l2 -2" stroke="{colors["hatch"]}"/>'
        "</pattern></defs>"
    )


def _element(shape: Shape, colors: Mapping[str, str]) -> str:
    if isinstance(shape, Rect):
        return _rect(shape, colors)
    if isinstance(shape, Label):
        return _label(shape, colors)
    if isinstance(shape, Line):
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
        dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
        return _with_hint(
            "polyline",
            f'points="{points}" fill="none" stroke="{colors[shape.color]}" '
            f'stroke-width="{_number(shape.width)}" stroke-linejoin="round"{dashes}',
            shape.hint,
        )
    x, y, radius = map(_number, shape[:3])
    fill = _fill(colors[shape.fill], shape.opacity)
    return _with_hint("circle", f'cx="{x}" cy="{y}" r="{radius}" {fill}', shape.hint)


def _rect(rect: Rect, colors: Mapping[str, str]) -> str:
    x, y, width, height = map(_number, rect[:4])
    color = "url(#idle)" if rect.fill == "idle" else colors[rect.fill]
    attributes = f'x="{x}" y="{y}" width="{width}" height="{height}" '
    attributes += _fill(color, rect.opacity)
    if rect.outline:
        attributes += (
            f' stroke="{colors[rect.outline]}" stroke-width="{_number(rect.outline_width)}"'
        )
    return _with_hint("rect", attributes, rect.hint)


def _label(label: Label, colors: Mapping[str, str]) -> str:
    # Digits and capitals are about 0.72 of the size high.
    x, y = _number(label.x), _number(label.y + 0.36 * label.size)
    place = f'x="{x}" y="{y}"'
    if label.vertical:
        # Turned around its start, the text has its middle at `x`.
        x, y = _number(label.x + 0.36 * label.size), _number(label.y)
        place = f'transform="translate({x} {y}) rotate(-90)"'
    size = f' font-size="{_number(label.size)}"' if label.size != FONT_SIZE else ""
    weight = ' font-weight="600"' if label.bold else ""
    anchor = f' text-anchor="{label.anchor}"' if label.anchor != "start" else ""
    return (
        f'<text {place} fill="{colors[label.color]}"{size}{weight}{anchor}>'
        f"{escape(label.text)}</text>"
    )


def _fill(color: str, opacity: float) -> str:
    shown = f' fill-opacity="{_number(opacity)}"' if opacity != 1 else ""
    return f'fill="{color}"{shown}'


def _with_hint(tag: str, attributes: str, hint: str) -> str:
    if not hint:
        return f"<{tag} {attributes}/>"
    return f"<{tag} {attributes}><title>{escape(hint)}</title></{tag}>"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


_SVG = "{http://www.w3.org/2000/svg}"
_TAGS = {
    *("svg", "defs", "pattern", "g", "rect", "path", "polyline", "line", "circle"),
    *("text", "tspan", "title"),
}
_ATTRIBUTES = {
    *("viewBox", "width", "height", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "d"),
    *("role", "aria-label", "id", "class", "patternUnits", "transform", "points"),
    *("fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray"),
    *("stroke-linejoin", "font-family", "font-size", "font-weight", "text-anchor"),
    "dominant-baseline",
}


def check_svg(text: str) -> None:
    """Reject SVG from a file that is more than shapes: links, scripts, other files."""
    if "<!" in text or "<?" in text:
        raise ValueError("A drawing cannot have declarations.")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"A drawing must be SVG: {error}.") from error
    if root.tag.removeprefix(_SVG) != "svg":
        raise ValueError(f"A drawing must be SVG, got {root.tag}.")
    for element in root.iter():
        if element.tag.removeprefix(_SVG) not in _TAGS:
            raise ValueError(f"A drawing cannot have the element {element.tag}.")
        for name, value in element.attrib.items():
            if name not in _ATTRIBUTES or "url(" in value.replace("url(#", ""):
                raise ValueError(f"A drawing cannot have the attribute {name}={value}.")
