"""Charts that become interactive where a page may run its script.

A chart is a static SVG, followed by its data as JSON. ``charts.js``, which `drawing.html`
puts into every page that has such a chart, replaces the SVG by one with crosshair, zoom
and the rest. Without scripts, the SVG stays.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from millrace.drawing.charts import Band, Series, line_chart, select_points

MOST_POINTS = 1000
"""The most points of a curve in the data of a page."""

CHART_DATA = '<script type="application/json" class="chart-data">'
"""The tag before the data of a chart."""


def interactive_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str = "epoch",
    bands: Sequence[Band] = (),
    level: tuple[str, float] | None = None,
    from_zero: bool = False,
    colors: Sequence[int] | None = None,
    linked: bool = False,
) -> str:
    """Draw curves over one pair of axes, with their data.

    Args:
        title: Read out by screen readers.
        series: The curves; values that are not finite are left out.
        x_name: The name of the x axis, and the key of `Series.points` among its positions.
        bands: Parts of the x axis to mark; each name is written once.
        level: The name and height of a horizontal line.
        from_zero: Whether the y axis starts at 0.
        colors: The number of each curve's color (default: in order).
        linked: Whether hiding a curve hides it in all charts, as for runs in a comparison.
    """
    svg = line_chart(
        title,
        series,
        x_name=x_name,
        bands=bands,
        level=level,
        from_zero=from_zero,
        colors=colors,
    )
    numbers = colors or range(len(series))
    data = {
        "title": title,
        "x": x_name,
        "fromZero": from_zero,
        "linked": linked,
        "bands": bands,
        "level": level,
        "series": [
            curve_data(curve, x_name) | {"color": number}
            for curve, number in zip(series, numbers, strict=True)
        ],
    }
    return f"{svg}{CHART_DATA}{embed_json(data)}</script>"


def curve_data(curve: Series, x_name: str, most: int = MOST_POINTS) -> dict[str, Any]:
    """Return the name and at most `most` of the finite points of a curve as JSON."""
    finite = [n for n, (_, y) in enumerate(curve.points) if math.isfinite(y)]
    kept = select_points([curve.points[n][1] for n in finite], most)
    chosen = [finite[n] for n in kept]
    xs: Mapping[str, Sequence[float]] = {
        x_name: [x for x, _ in curve.points],
        **curve.positions,
    }
    return {
        "name": curve.name,
        "x": {name: [_shorten(values[n]) for n in chosen] for name, values in xs.items()},
        "y": [_shorten(curve.points[n][1]) for n in chosen],
    }


def _shorten(value: float) -> float:
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def embed_json(data: Any) -> str:
    """Return JSON that cannot end the script element in which it stands."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


@functools.cache
def chart_script() -> str:
    """Return the script of interactive charts."""
    return (resources.files("millrace.drawing") / "charts.js").read_text(encoding="utf-8")
