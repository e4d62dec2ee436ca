"""Curves as SVG, drawn for a phone's width so that their text stays readable there."""

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from millrace.drawing.numbers import log_ticks, nice_ticks, tick_text
from millrace.drawing.style import NUM_COLORS

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 24, 36
_LOG_FROM = 100.0
"""From this ratio of the largest to the smallest value on, an axis is logarithmic."""
_MOST_DOTS, _MOST_HOVERS = 40, 150
_START, _FLATTENED, _FEWEST_LATER = 0.05, 12.0, 20
"""The first part of the x axis may run out of the picture where the values there would make
that of the others so many times smaller, and these are not few."""

Point = tuple[float, float]


class Series(NamedTuple):
    """A curve: its name and its points from left to right."""

    name: str
    points: list[Point]

    @property
    def finite(self) -> list[Point]:
        """The points that can be drawn."""
        return [(x, y) for x, y in self.points if math.isfinite(y)]


def thinned(points: Sequence[Point], most: int = 400) -> list[Point]:
    """Keep a curve's shape with fewer points: the lowest and highest of each stretch."""
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


class Band(NamedTuple):
    """A stretch of the x axis that is marked, and what it was."""

    start: float
    end: float
    name: str


class Axis(NamedTuple):
    """Where values lie on the picture."""

    place: Callable[[float], float]
    ticks: list[float]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str = "epoch",
    bands: Sequence[Band] = (),
    level: tuple[str, float] | None = None,
    from_zero: bool = False,
    colors: Sequence[int] | None = None,
) -> str:
    """Draw curves over one pair of axes.

    Args:
        title: For those who hear the page.
        series: Drawn in the order of the palette; what is not finite is left out.
        x_name: Under the x axis.
        bands: Stretches to mark; the name of each is written once.
        level: A horizontal line: its name and its height.
        from_zero: Whether the y axis begins at 0, and single points are not marked.
        colors: Of each curve, by number (default: in order).
    """
    numbers = list(range(len(series))) if colors is None else list(colors)
    drawn = [Series(s.name, thinned(s.finite)) for s in series]
    points = [point for s in drawn for point in s.points]
    marked = [x for band in bands for x in (band.start, band.end)]
    x = linear_axis([p[0] for p in points] + marked, LEFT, WIDTH - RIGHT, pad=0.0)
    more = ([level[1]] if level else []) + ([0.0] if from_zero else [])
    heights = ([p[1] for p in points] if from_zero else settled(points)) + more
    y = value_axis(heights, HEIGHT - BOTTOM, TOP)
    cut = len(heights) < len(points) + len(more)
    parts = [
        *_bands(bands, x),
        *axes(x, y, x_name),
        *_level(level, y),
        *(
            part
            for number, each in zip(numbers, drawn, strict=True)
            for part in _curve(number, each, x, y, dots=not from_zero)
        ),
        _legend([s.name for s in drawn], numbers) if len(drawn) > 1 else "",
        text(WIDTH - RIGHT, 13, "the start is cut off", "end") if cut else "",
    ]
    return svg(title, parts)


def settled(points: Sequence[Point]) -> list[float]:
    """Return the heights that the y axis is for: all, or those after a steep start."""
    heights = [height for _, height in points]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    begun = first + _START * (last - first)
    later = [height for x, height in points if x >= begun]
    if len(later) < _FEWEST_LATER:
        return heights
    logarithmic = _is_logarithmic(min(heights), max(heights))

    def spread(values: Sequence[float]) -> float:
        low, high = min(values), max(values)
        return math.log(high / low) if logarithmic else high - low

    return later if spread(heights) > _FLATTENED * spread(later) > 0 else heights


def svg(title: str, parts: Sequence[str], width: int = WIDTH, height: int = HEIGHT) -> str:
    """Put the parts of a chart into a picture that grows and shrinks with the page."""
    label = html.escape(title)
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def linear_axis(
    values: Sequence[float], start: float, end: float, *, pad: float = 0.06, most: int = 5
) -> Axis:
    """Return an axis from `start` to `end` pixels that has room for all values."""
    low, high = min(values), max(values)
    if high == low:  # a single place, in the middle
        return Axis(lambda _: (start + end) / 2, [float(f"{low:.4g}")])
    room = pad * (high - low)
    low, high = low - (room if low else 0.0), high + room  # no room below 0
    ticks = nice_ticks(low, high, most)
    return Axis(lambda v: start + (v - low) / (high - low) * (end - start), ticks)


def value_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return a linear axis, or a logarithmic one where values differ by much."""
    low, high = min(values), max(values)
    if not _is_logarithmic(low, high):
        return linear_axis(values, start, end)
    first, last = math.log10(low) - 0.06, math.log10(high) + 0.06
    ticks = log_ticks(10**first, 10**last)

    def place(value: float) -> float:
        return start + (math.log10(value) - first) / (last - first) * (end - start)

    return Axis(place, ticks)


def _is_logarithmic(low: float, high: float) -> bool:
    return low > 0 and high / low >= _LOG_FROM


def axes(x: Axis, y: Axis, x_name: str) -> list[str]:
    """Draw the grid, the numbers beside it and the name of the x axis."""
    right, base = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<path class="grid" d="M{LEFT} {y.place(t):.1f}H{right}"/>'
        + text(LEFT - 6, y.place(t) + 4, tick_text(t), "end")
        for t in y.ticks
    ]
    parts += [text(x.place(t), base + 15, tick_text(t), "middle") for t in x.ticks]
    parts.append(text((LEFT + right) / 2, HEIGHT - 5, x_name, "middle"))
    return parts


def text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    """Write some words; `kind` is their class."""
    named = f' class="{kind}"' if kind else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>'
        f"{html.escape(words)}</text>"
    )


def _curve(number: int, series: Series, x: Axis, y: Axis, *, dots: bool) -> list[str]:
    color = number % NUM_COLORS
    # What lies outside runs along the edge.
    places = [
        (x.place(px), min(max(y.place(py), TOP), HEIGHT - BOTTOM))
        for px, py in series.points
    ]
    path = " ".join(f"{right:.1f},{down:.1f}" for right, down in places)
    parts = [f'<polyline class="line c{color}" points="{path}"/>']
    if len(places) <= _MOST_HOVERS:
        shown = dots and len(places) <= _MOST_DOTS
        parts += [
            _dot(place, point, series.name, color, shown)
            for place, point in zip(places, series.points, strict=True)
        ]
    return parts


def _dot(place: Point, point: Point, name: str, color: int, shown: bool) -> str:
    right, down = (f"{value:.1f}" for value in place)
    seen = f'<circle class="f{color}" cx="{right}" cy="{down}" r="2.4"/>' if shown else ""
    told = html.escape(f"{name} at {point[0]:.6g}: {point[1]:.5g}")
    return (
        f'{seen}<circle class="hover" cx="{right}" cy="{down}" r="7">'
        f"<title>{told}</title></circle>"
    )


def _legend(names: Sequence[str], colors: Sequence[int]) -> str:
    room = max(4, 52 // len(names) - 3)  # as many letters as a line of them has
    spans = "".join(
        f'<tspan class="f{color % NUM_COLORS}" dx="{10 if n else 0}">● '
        f"{html.escape(name if len(name) <= room else name[: room - 1] + '…')}</tspan>"
        for n, (name, color) in enumerate(zip(names, colors, strict=True))
    )
    return f'<text x="{LEFT}" y="13">{spans}</text>'


def _bands(bands: Sequence[Band], x: Axis) -> list[str]:
    parts, said = [], set()
    for band in bands:
        left, right = x.place(band.start), x.place(band.end)
        name = html.escape(f"{band.name}: {band.end - band.start:.3g} s")
        parts.append(
            f'<rect class="band" x="{left:.1f}" y="{TOP}" height="{HEIGHT - BOTTOM - TOP}" '
            f'width="{max(1, right - left):.1f}"><title>{name}</title></rect>'
        )
        if band.name not in said and right - left > 40:
            parts.append(text((left + right) / 2, HEIGHT - BOTTOM - 6, band.name, "middle"))
            said.add(band.name)
    return parts


def _level(level: tuple[str, float] | None, y: Axis) -> list[str]:
    if level is None:
        return []
    name, height = level
    down = y.place(height)
    return [
        f'<path class="grid steady" d="M{LEFT} {down:.1f}H{WIDTH - RIGHT}"/>',
        text(WIDTH - RIGHT, down - 4, name, "end"),
    ]
