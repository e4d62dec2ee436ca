"""Pictures other than curves: matrices, distributions, and points with a best one."""

import html
import math
from collections.abc import Mapping, Sequence

from millrace.drawing.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Point,
    axes,
    linear_axis,
    svg,
    text,
    value_axis,
)

_MOST_COUNTS, MOST_CLASSES = 12, 100
"""Classes up to which a matrix has its counts written in, and is drawn at all."""


def matrix_chart(
    title: str, counts: Mapping[tuple[int, int], int], names: Sequence[str]
) -> str:
    """Draw how often each true class (row) was taken for which (column)."""
    size, count = 400, len(names)
    left, top = 62, 34
    cell = (size - left - 4) / count
    totals = [
        sum(counts.get((row, col), 0) for col in range(count)) for row in range(count)
    ]
    parts = [
        text(left + (size - left) / 2, 12, "taken for", "middle"),
        f'<text transform="translate(11 {top + count * cell / 2:.1f}) rotate(-90)" '
        'text-anchor="middle">true class</text>',
    ]
    for row in range(count):
        for column in range(count):
            number = counts.get((row, column), 0)
            x, y = left + column * cell, top + row * cell
            share = number / totals[row] if totals[row] else 0.0
            parts += _cell(x, y, cell, share, number, row == column, names, (row, column))
    every = max(1, -(-count // 20))
    for n in range(0, count, every):
        middle = (n + 0.5) * cell
        parts.append(text(left - 5, top + middle + 4, _short(names[n], 7), "end"))
        if all(len(name) <= 3 for name in names):
            parts.append(text(left + middle, top - 5, names[n], "middle"))
    return svg(title, parts, size, round(top + count * cell + 4))


def _cell(
    x: float,
    y: float,
    side: float,
    share: float,
    number: int,
    is_right: bool,
    names: Sequence[str],
    place: tuple[int, int],
) -> list[str]:
    if not number and len(names) > _MOST_COUNTS:
        return []
    color = 0 if is_right else 1
    # Rare mistakes are what is looked for: let them be seen.
    strength = 0.0 if not number else 0.12 + 0.4 * math.sqrt(share)
    told = html.escape(f"{names[place[0]]} taken for {names[place[1]]}: {number}")
    parts = [
        f'<rect class="f{color}" x="{x:.1f}" y="{y:.1f}" width="{side - 1:.1f}" '
        f'height="{side - 1:.1f}" fill-opacity="{strength:.2f}">'
        f"<title>{told}</title></rect>"
    ]
    if number and len(names) <= _MOST_COUNTS:
        middle = x + (side - 1) / 2
        parts.append(text(middle, y + side / 2 + 4, str(number), "middle", "strong"))
    return parts


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def histogram_chart(
    title: str, edges: Sequence[float], counts: Sequence[float], *, x_name: str
) -> str:
    """Draw a distribution; `counts` has one value less than `edges`."""
    x = linear_axis(edges, LEFT, WIDTH - RIGHT, pad=0.0)
    y = linear_axis([0.0, *counts], HEIGHT - BOTTOM, TOP, pad=0.0)
    base = HEIGHT - BOTTOM
    parts = axes(x, y, x_name)
    for start, end, count in zip(edges, edges[1:], counts, strict=False):
        left, right, top = x.place(start), x.place(end), y.place(count)
        told = html.escape(f"{start:.3g} to {end:.3g}: {count:,.0f}")
        parts.append(
            f'<rect class="f0" x="{left:.1f}" y="{top:.1f}" height="{base - top:.1f}" '
            f'width="{max(0.5, right - left - 0.6):.1f}" fill-opacity=".75">'
            f"<title>{told}</title></rect>"
        )
    if edges[0] < 0 < edges[-1]:
        zero = x.place(0)
        parts.append(f'<path class="grid steady" d="M{zero:.1f} {TOP}V{base}"/>')
    return svg(title, parts)


def points_chart(
    title: str, points: Sequence[Point], *, x_name: str, lowest: bool = True
) -> str:
    """Draw points joined by a line, the lowest one filled; what diverged is a cross."""
    points = sorted(points)
    finite = [point for point in points if math.isfinite(point[1])]
    x = linear_axis([p[0] for p in points], LEFT + 8, WIDTH - RIGHT - 8, pad=0.0)
    y = value_axis([p[1] for p in finite] or [0.0], HEIGHT - BOTTOM, TOP)
    line = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in finite)
    parts = [*axes(x, y, x_name), f'<polyline class="line c0" points="{line}"/>']
    best = min(finite, key=lambda p: p[1], default=None) if lowest else None
    for point in points:
        right = x.place(point[0])
        value = f"{point[1]:.4f}" if math.isfinite(point[1]) else "diverged"
        told = f"<title>{point[0]:g}: {value}</title>"
        if not math.isfinite(point[1]):
            cross = f"M{right - 5:.1f} {TOP - 8}l10 10m0 -10l-10 10"
            parts.append(f'<path class="line c1" d="{cross}">{told}</path>')
            continue
        size, color = (6, 2) if point == best else (3.5, 0)
        parts.append(
            f'<circle class="f{color}" cx="{right:.1f}" cy="{y.place(point[1]):.1f}" '
            f'r="{size}">{told}</circle>'
        )
    return svg(title, parts)


def interval_chart(
    title: str, rows: Sequence[tuple[float, Sequence[float]]], *, x_name: str
) -> str:
    """Draw 5, 25, 50, 75 and 95 % of what was found at each place, as boxes."""
    x = linear_axis([row[0] for row in rows], LEFT + 22, WIDTH - RIGHT - 22, pad=0.0)
    heights = [value for _, values in rows for value in values]
    y = linear_axis([*heights, 0.0], HEIGHT - BOTTOM, TOP)
    half = min(14.0, (WIDTH - LEFT - RIGHT) / (3 * len(rows)))
    x = x._replace(ticks=[row[0] for row in rows][:: -(-len(rows) // 10)])
    parts = axes(x, y, x_name)
    parts.append(
        f'<path class="grid steady" d="M{LEFT} {y.place(0):.1f}H{WIDTH - RIGHT}"/>'
    )
    for place, values in rows:
        middle = x.place(place)
        low, lower, median, upper, high = (y.place(value) for value in values)
        told = html.escape(f"{place:g}: median {values[2]:.3g}")
        parts.append(
            f'<path class="line c0" d="M{middle:.1f} {low:.1f}V{high:.1f}"/>'
            f'<rect class="f0" x="{middle - half:.1f}" y="{upper:.1f}" '
            f'width="{2 * half:.1f}" height="{max(0.5, lower - upper):.1f}" '
            f'fill-opacity=".35"><title>{told}</title></rect>'
            f'<path class="line c1" d="M{middle - half:.1f} {median:.1f}h{2 * half:.1f}"/>'
        )
    return svg(title, parts)
