"""Charts of reports: curves, matrices, distributions and points.

Charts are drawn for the width of a phone, so that their text stays readable there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from millrace.drawing.style import NUM_SERIES_COLORS
from millrace.drawing.svg import (
    FONT_SIZE,
    Circle,
    Drawing,
    Label,
    Line,
    Point,
    Rect,
    Shape,
    estimate_width,
    to_svg,
)
from millrace.numbers import format_ticks, linear_ticks, log_ticks

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 50, WIDTH - 12, 24, HEIGHT - 36
"""The edges of the plot area."""
_LOG_RATIO = 100.0
"""The ratio of the largest to the smallest value from which an axis is logarithmic."""
MOST_CLASSES = 100
"""The most classes for which a confusion matrix is drawn."""
_MOST_COUNTED_CLASSES = 12
"""The most classes for which the counts are written into the matrix."""
_MOST_LETTERS = 12
"""The most letters of a class that a confusion matrix shows."""
_MOST_POINTS, _MOST_DOTS, _MOST_HINTS = 400, 40, 150
"""The most points of a curve, and of a curve with dots and with hints at its points."""
_MOST_NAMES = 6
"""The most curves whose names are shortened to fit; of more, the first are named."""
_START_SHARE, _FLATTENED, _FEWEST_LATER = 0.05, 12.0, 20
_CURVE_WIDTH = 1.75


class Axis(NamedTuple):
    """A scale from values to coordinates, and the values of its ticks."""

    place: Callable[[float], float]
    ticks: list[float]


def linear_axis(
    values: Sequence[float], start: float, end: float, *, padding: float = 0.06
) -> Axis:
    """Return an axis over all values from coordinate `start` to `end`."""
    low, high = min(values), max(values)
    if high == low:  # one value, in the middle
        return Axis(lambda _: (start + end) / 2, [float(f"{low:.4g}")])
    room = padding * (high - low)
    # An axis that starts at 0 stays there.
    low, high = low - (room if low else 0.0), high + room

    def place(value: float) -> float:
        return start + (value - low) / (high - low) * (end - start)

    return Axis(place, linear_ticks(low, high))


def value_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return a linear axis, or a logarithmic one if the values differ by much."""
    low, high = min(values), max(values)
    if not is_logarithmic(low, high):
        return linear_axis(values, start, end)
    first, last = math.log10(low) - 0.06, math.log10(high) + 0.06
    scale = (end - start) / (last - first)
    ticks = log_ticks(10**first, 10**last)
    return Axis(lambda value: start + (math.log10(value) - first) * scale, ticks)


def is_logarithmic(low: float, high: float) -> bool:
    """Whether an axis from `low` to `high` is logarithmic."""
    return low > 0 and high / low >= _LOG_RATIO


def draw_axes(x: Axis, y: Axis, x_name: str) -> list[Shape]:
    """Draw horizontal grid lines, the tick labels, and the name of the x axis."""
    shapes: list[Shape] = []
    for tick, text in zip(y.ticks, format_ticks(y.ticks), strict=True):
        shapes.append(Line([(LEFT, y.place(tick)), (RIGHT, y.place(tick))]))
        shapes.append(Label(LEFT - 6, y.place(tick), text, "end"))
    for tick, text in zip(x.ticks, format_ticks(x.ticks), strict=True):
        shapes.append(Label(x.place(tick), BOTTOM + 11, text, "middle"))
    return [*shapes, Label((LEFT + RIGHT) / 2, HEIGHT - 9, x_name, "middle")]


def chart_svg(
    title: str, shapes: Sequence[Shape], size: tuple[float, float] = (WIDTH, HEIGHT)
) -> str:
    """Return a chart as an SVG that takes the width its page gives it."""
    return to_svg(Drawing(title, *size, shapes), css_class="chart")


class Series(NamedTuple):
    """A curve: its name, and its points from left to right."""

    name: str
    points: list[Point]
    positions: Mapping[str, list[float]] = MappingProxyType({})
    """Other x axes that a reader may choose, each with one value per point."""

    @property
    def finite(self) -> list[Point]:
        """The points that can be drawn."""
        return [(x, y) for x, y in self.points if math.isfinite(y)]


class Band(NamedTuple):
    """A marked part of the x axis."""

    start: float
    end: float
    name: str


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
        title: Read out by screen readers.
        series: The curves; values that are not finite are left out.
        x_name: The name of the x axis.
        bands: Parts of the x axis to mark; each name is written once.
        level: The name and height of a horizontal line.
        from_zero: Whether the y axis starts at 0; single points are not marked then.
        colors: The number of each curve's color (default: in order).
    """
    curves = [Series(s.name, thin(s.finite)) for s in series]
    names = [curve.name for curve in curves]
    numbers = list(colors or range(len(curves)))
    points = [point for curve in curves for point in curve.points]
    marked = [x for band in bands for x in (band.start, band.end)]
    x = linear_axis([p[0] for p in points] + marked, LEFT, RIGHT, padding=0.0)
    extra = ([level[1]] if level else []) + ([0.0] if from_zero else [])
    heights = [p[1] for p in points] if from_zero else select_heights(points)
    y = value_axis(heights + extra, BOTTOM, TOP)
    shapes = [*_draw_bands(bands, x), *draw_axes(x, y, x_name)]
    if level:
        place = y.place(level[1])
        shapes.append(Line([(LEFT, place), (RIGHT, place)], "muted", dashed=True))
        shapes.append(Label(RIGHT, place - 8, level[0], "end"))
    for curve, number in zip(curves, numbers, strict=True):
        shapes += _draw_curve(curve, number, x, y, dots=not from_zero)
    if len(curves) > 1:
        shapes += _draw_legend(names, numbers)
    if len(heights) < len(points):
        shapes.append(Label(RIGHT, 9, "steep start cut off", "end"))
    return chart_svg(title, shapes)


def thin(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Reduce a curve to the lowest and highest point of each of its parts."""
    return [points[index] for index in select_points([y for _, y in points], most)]


def select_points(heights: Sequence[float], most: int) -> list[int]:
    """Return the indices of the lowest and highest value of each part, and of the last."""
    last = len(heights) - 1
    if last < most:
        return list(range(last + 1))
    size = -(-2 * len(heights) // most)
    kept: list[int] = []
    for start in range(0, last + 1, size):
        part = range(start, min(start + size, last + 1))
        lowest, highest = (f(part, key=heights.__getitem__) for f in (min, max))
        kept += sorted({lowest, highest})
    return kept if kept[-1] == last else [*kept, last]


def select_heights(points: Sequence[Point]) -> list[float]:
    """Return the values that the y axis must show.

    These are all values, unless the first 5% of the x axis would squeeze the others into
    a twelfth of the height. Then the curve may leave the chart there.
    """
    heights = [height for _, height in points]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    settled = first + _START_SHARE * (last - first)
    later = [height for x, height in points if x >= settled]
    if len(later) < _FEWEST_LATER:
        return heights
    logarithmic = is_logarithmic(min(heights), max(heights))

    def spread(values: Sequence[float]) -> float:
        low, high = min(values), max(values)
        return math.log(high / low) if logarithmic else high - low

    return later if spread(heights) > _FLATTENED * spread(later) > 0 else heights


def series_color(number: int) -> str:
    """Return the color of a curve; colors repeat, and then curves are dashed."""
    return f"c{number % NUM_SERIES_COLORS}"


def _draw_curve(curve: Series, number: int, x: Axis, y: Axis, *, dots: bool) -> list[Shape]:
    color, dashed = series_color(number), number // NUM_SERIES_COLORS % 2 == 1
    # A value outside the plot area is drawn on its edge.
    places = [(x.place(px), min(max(y.place(py), TOP), BOTTOM)) for px, py in curve.points]
    shapes: list[Shape] = [Line(places, color, _CURVE_WIDTH, dashed=dashed)]
    if dots and len(places) <= _MOST_DOTS:
        shapes += [Circle(*place, 2.4, color) for place in places]
    if len(places) <= _MOST_HINTS:
        for place, (px, py) in zip(places, curve.points, strict=True):
            hint = f"{curve.name} at {px:.6g}: {py:.5g}"
            shapes.append(Circle(*place, 7, color, opacity=0, hint=hint))
    return shapes


def _draw_legend(names: Sequence[str], numbers: Sequence[int]) -> list[Shape]:
    """Name the curves above the plot area, as many as fit in a line."""
    room = int((WIDTH - LEFT) / min(len(names), _MOST_NAMES) / estimate_width("x")) - 3
    shapes: list[Shape] = []
    x = float(LEFT)
    for name, number in zip(names, numbers, strict=True):
        text = f"● {_shorten(name, max(4, room))}"
        if x + estimate_width(text) > WIDTH:
            shapes.append(Label(WIDTH, 9, f"{len(names) - len(shapes)} more", "end"))
            break
        shapes.append(Label(x, 9, text, color=series_color(number)))
        x += estimate_width(text) + FONT_SIZE
    return shapes


def _draw_bands(bands: Sequence[Band], x: Axis) -> list[Shape]:
    shapes: list[Shape] = []
    named: set[str] = set()
    for start, end, name in bands:
        left, width = x.place(start), x.place(end) - x.place(start)
        hint = f"{name}: {end - start:.3g} s"
        box = (left, TOP, max(1.0, width), BOTTOM - TOP)
        shapes.append(Rect(*box, "muted", opacity=0.16, hint=hint))
        if name not in named and width > 40:
            shapes.append(Label(left + width / 2, TOP + 8, name, "middle"))
            named.add(name)
    return shapes


def matrix_chart(
    title: str, counts: Mapping[tuple[int, int], int], names: Sequence[str]
) -> str:
    """Draw how often each true class (row) was predicted as which class (column)."""
    size, num_classes = 400.0, len(names)
    short = [_shorten(name, _MOST_LETTERS) for name in names]
    longest = max(map(estimate_width, short), default=0.0)
    is_rotated = any(len(name) > 3 for name in short)
    left, top = 30.0 + longest, 22.0 + (longest + 6 if is_rotated else FONT_SIZE)
    side = (size - left - 4) / num_classes
    shapes: list[Shape] = [
        Label(left + (size - left) / 2, 8, "predicted class", "middle"),
        Label(8, top + num_classes * side / 2, "true class", "middle", vertical=True),
    ]
    for row, true in enumerate(names):
        total = sum(counts.get((row, column), 0) for column in range(num_classes))
        for column, predicted in enumerate(names):
            count = counts.get((row, column), 0)
            if not count and num_classes > _MOST_COUNTED_CLASSES:
                continue
            box = (left + column * side, top + row * side, side - 1, side - 1)
            # The square root keeps rare mistakes visible.
            opacity = 0.12 + 0.4 * math.sqrt(count / total) if count else 0.05
            hint = f"{true} predicted as {predicted}: {count}"
            color = "muted" if not count else "c0" if row == column else "c1"
            shapes.append(Rect(*box, color, opacity, hint=hint))
            if count and num_classes <= _MOST_COUNTED_CLASSES:
                middle = (box[0] + (side - 1) / 2, box[1] + side / 2)
                shapes.append(Label(*middle, str(count), "middle", "ink", bold=True))
    for n in range(0, num_classes, max(1, math.ceil(FONT_SIZE / side))):
        middle = (n + 0.5) * side
        shapes.append(Label(left - 5, top + middle, short[n], "end"))
        place = (left + middle, top - (5 if is_rotated else 9))
        anchor = "start" if is_rotated else "middle"
        shapes.append(Label(*place, short[n], anchor, vertical=is_rotated))
    return chart_svg(title, shapes, (size, round(top + num_classes * side + 4)))


def _shorten(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def histogram_chart(
    title: str, edges: Sequence[float], counts: Sequence[float], *, x_name: str
) -> str:
    """Draw a distribution; `counts` has one value less than `edges`."""
    x = linear_axis(edges, LEFT, RIGHT, padding=0.0)
    y = linear_axis([0.0, *counts], BOTTOM, TOP, padding=0.0)
    shapes = draw_axes(x, y, x_name)
    for start, end, count in zip(edges, edges[1:], counts, strict=False):
        left, top = x.place(start), y.place(count)
        width = max(0.5, x.place(end) - left - 0.6)
        hint = f"{start:.3g} to {end:.3g}: {count:,.0f}"
        shapes.append(Rect(left, top, width, BOTTOM - top, "c0", opacity=0.75, hint=hint))
    if edges[0] < 0 < edges[-1]:
        zero = x.place(0)
        shapes.append(Line([(zero, TOP), (zero, BOTTOM)], "muted", dashed=True))
    return chart_svg(title, shapes)


def points_chart(title: str, points: Sequence[Point], *, x_name: str) -> str:
    """Draw points joined by a line and mark the lowest; a diverged one is a cross."""
    points = sorted(points)
    finite = [point for point in points if math.isfinite(point[1])]
    x = linear_axis([p[0] for p in points], LEFT + 8, RIGHT - 8, padding=0.0)
    y = value_axis([p[1] for p in finite] or [0.0], BOTTOM, TOP)
    line = Line([(x.place(a), y.place(b)) for a, b in finite], "c0", _CURVE_WIDTH)
    shapes = [*draw_axes(x, y, x_name), line]
    best = min(finite, key=lambda p: p[1], default=None)
    for point in points:
        place = x.place(point[0])
        if point in finite:
            radius, color = (6.0, "c2") if point == best else (3.5, "c0")
            hint = f"{point[0]:g}: {point[1]:.4f}"
            shapes.append(Circle(place, y.place(point[1]), radius, color, hint=hint))
            continue
        left, right, low, high = place - 5, place + 5, TOP + 2, TOP - 8
        middle = (place, (low + high) / 2)
        cross = [(left, high), (right, low), middle, (right, high), (left, low)]
        hint = f"{point[0]:g}: diverged"
        shapes.append(Line(cross, "c1", _CURVE_WIDTH, hint=hint))
    return chart_svg(title, shapes)


def interval_chart(
    title: str, rows: Sequence[tuple[float, Sequence[float]]], *, x_name: str
) -> str:
    """Draw the 5, 25, 50, 75 and 95% quantiles at each place as a box."""
    x = linear_axis([row[0] for row in rows], LEFT + 22, RIGHT - 22, padding=0.0)
    x = x._replace(ticks=[row[0] for row in rows][:: -(-len(rows) // 10)])
    y = linear_axis([0.0, *(v for _, values in rows for v in values)], BOTTOM, TOP)
    half = min(14.0, (RIGHT - LEFT) / (3 * len(rows)))
    shapes = draw_axes(x, y, x_name)
    shapes.append(Line([(LEFT, y.place(0)), (RIGHT, y.place(0))], "muted", dashed=True))
    for place, values in rows:
        middle = x.place(place)
        low, lower, median, upper, high = (y.place(value) for value in values)
        box = (middle - half, upper, 2 * half, max(0.5, lower - upper))
        hint = f"{place:g}: median {values[2]:.3g}"
        ends = [(middle - half, median), (middle + half, median)]
        shapes += [
            Line([(middle, low), (middle, high)], "c0", _CURVE_WIDTH),
            Rect(*box, "c0", opacity=0.35, hint=hint),
            Line(ends, "c1", _CURVE_WIDTH),
        ]
    return chart_svg(title, shapes)
