"""Drawings as SVG."""

from collections.abc import Mapping
from xml.sax.saxutils import escape, quoteattr

from millrace.drawing.canvas import Drawing, Label, Rect, Shape

FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def as_svg(drawing: Drawing, colors: Mapping[str, str]) -> str:
    """Return `drawing` as an SVG document in `colors`."""
    width, height = _number(drawing.width), _number(drawing.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        f'aria-label={quoteattr(drawing.title)} font-family="{FONT}">',
        # Idle time is hatched as well as gray: it is not one more color to tell apart.
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{colors["idle"]}"/>'
        f'<path d="M-1 1l2 -2M0 6l6 -6M5 7l2 -2" stroke="{colors["hatch"]}"/>'
        "</pattern></defs>",
        f'<rect width="{width}" height="{height}" fill="{colors["surface"]}"/>',
    ]
    parts += [_shape(shape, colors) for shape in drawing.shapes]
    return "\n".join([*parts, "</svg>", ""])


def _shape(shape: Shape, colors: Mapping[str, str]) -> str:
    if isinstance(shape, Rect):
        return _rect(shape, colors)
    if isinstance(shape, Label):
        return _label(shape, colors)
    x1, y1, x2, y2 = map(_number, shape[:4])
    return f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{colors[shape.color]}"/>'


def _rect(rect: Rect, colors: Mapping[str, str]) -> str:
    x, y, width, height = map(_number, rect[:4])
    fill = "url(#idle)" if rect.fill == "idle" else colors[rect.fill]
    # A line of the background's color parts neighbors; it thins with the box.
    line, weight = colors["surface"], min(1.0, rect.width / 8)
    if rect.outlined:
        line, weight = colors["ink"], 2.0
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" '
    box += f'stroke="{line}" stroke-width="{_number(weight)}"'
    return f"{box}><title>{escape(rect.hint)}</title></rect>" if rect.hint else f"{box}/>"


def _label(label: Label, colors: Mapping[str, str]) -> str:
    weight = ' font-weight="600"' if label.bold else ""
    anchor = "" if label.anchor == "start" else f' text-anchor="{label.anchor}"'
    # Its middle at y: digits and capitals are about 0.72 of the size high.
    y = label.y + 0.36 * label.size
    return (
        f'<text x="{_number(label.x)}" y="{_number(y)}" '
        f'font-size="{_number(label.size)}" fill="{colors[label.color]}"'
        f"{anchor}{weight}>{escape(label.text)}</text>"
    )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
