"""One curve as an SVG file: an error over the exponent of the learning rate."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 52, 64
_TICKS = 5
_FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def draw_points(
    title: str, x_name: str, y_name: str, points: Sequence[tuple[float, float]]
) -> str:
    """Return the points, joined by a line, as an SVG document.

    A y that is not finite is a cross at the top, outside the scale. The lowest point is
    emphasised.
    """
    points = sorted(points)
    xs = [x for x, _ in points]
    ys = [y for _, y in points if math.isfinite(y)]
    x_scale = _Scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    y_scale = _Scale(*_padded(ys), _HEIGHT - _BOTTOM, _TOP + 16)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" font-family="{_FONT}" '
        f'font-size="13" fill="#1f2328" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 28, title, "start", 'font-size="16" font-weight="600"'),
        *_axes(xs, x_scale, y_scale, x_name, y_name),
        *_curve(points, x_scale, y_scale),
    ]
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Values to places on the picture."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self._start + self._end) / 2
        share = (value - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    @property
    def ticks(self) -> list[float]:
        step = (self.high - self.low) / (_TICKS - 1)
        return [self.low + step * number for number in range(_TICKS)]


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """Leave some room around the values; without any, a scale from 0 to 1."""
    if not values:
        return 0.0, 1.0
    room = 0.08 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 1.0
    return min(values) - room, max(values) + room


def _axes(
    xs: Sequence[float], x_scale: _Scale, y_scale: _Scale, x_name: str, y_name: str
) -> list[str]:
    base = _HEIGHT - _BOTTOM
    parts = [
        f'<path d="M{_LEFT} {y_scale(tick):.1f}H{_WIDTH - _RIGHT}" stroke="#d8dee4"/>'
        + _text(_LEFT - 8, y_scale(tick) + 4, f"{tick:.4f}", "end")
        for tick in y_scale.ticks
    ]
    every = -(-len(xs) // 16)  # as many numbers as there is room for
    parts += [_text(x_scale(x), base + 20, f"{x:g}", "middle") for x in sorted(xs)[::every]]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(_text(middle, _HEIGHT - 18, x_name, "middle"))
    upright = f'transform="rotate(-90 18 {_HEIGHT / 2})"'
    parts.append(_text(18, _HEIGHT / 2, y_name, "middle", upright))
    return parts


def _curve(
    points: Sequence[tuple[float, float]], x_scale: _Scale, y_scale: _Scale
) -> list[str]:
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    line = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in finite)
    parts = [f'<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="2"/>']
    best = min(finite, key=lambda point: point[1], default=None)
    for x, y in points:
        if not math.isfinite(y):
            place = f"M{x_scale(x) - 5:.1f} {_TOP - 5}l10 10m0 -10l-10 10"
            parts.append(
                f'<path d="{place}" stroke="#cf222e" stroke-width="2">'
                f"<title>{x:g}: diverged</title></path>"
            )
            continue
        size, colour = (6, "#1a7f37") if (x, y) == best else (4, "#0969da")
        parts.append(
            f'<circle cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="{size}" '
            f'fill="{colour}"><title>{x:g}: {y:.4f}</title></circle>'
        )
    return parts


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
    )
