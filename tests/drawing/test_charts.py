"""Charts: what a curve shows of its values."""

import re

import pytest

from millrace.drawing.charts import HEIGHT, TOP, Series, line_chart, select_heights

CUT = "steep start cut off"


def curve_heights(svg):
    (points,) = re.findall(r'points="([^"]*)"[^>]*stroke="var\(--c0\)"', svg)
    return [float(point.split(",")[1]) for point in points.split()]


def steep(count=200):
    """Jump from -2,000 to -120, and then rise slowly to -100."""
    return [(0.0, -2000.0), *((float(n), -120.0 + 20 * n / count) for n in range(1, count))]


def steeper():
    """Fall from a million to 12 at once, then slowly to 10: logarithms do not help."""
    return [(0.0, 1e6), *((float(n), 12.0 - 2 * n / 200) for n in range(1, 200))]


@pytest.mark.parametrize("points", [steep(), [(x, -y) for x, y in steeper()]])
def test_a_steep_start_does_not_flatten_the_rest(points):
    svg = line_chart("elbo", [Series("elbo", points)])
    assert CUT in svg
    heights = curve_heights(svg)
    assert heights[0] == max(heights) <= HEIGHT  # along the lower edge
    later = heights[len(heights) // 10 :]
    assert max(later) - min(later) > 0.7 * (max(heights) - TOP)


def test_a_steep_start_is_cut_off_a_logarithmic_axis_too():
    assert len(select_heights(steeper())) < len(steeper())


@pytest.mark.parametrize(
    "points",
    [
        steep(15),  # too few points
        [(float(n), -1000.0 + 5 * n) for n in range(200)],  # no steep start
        [(float(n), 10.0 ** (3 - n / 50)) for n in range(200)],  # logarithmic
        [(float(n), float(n == 0)) for n in range(200)],  # the rest is flat
    ],
)
def test_other_curves_are_shown_in_full(points):
    assert len(select_heights(points)) == len(points)
    assert CUT not in line_chart("x", [Series("x", points)])


def test_throughput_is_drawn_from_zero_and_from_the_start():
    points = [(float(n), 0.0 if n == 0 else 100.0 + n % 2) for n in range(100)]
    svg = line_chart("speed", [Series("speed", points)], from_zero=True)
    assert CUT not in svg
