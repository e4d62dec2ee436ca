"""What a curve shows of its values."""

import re

import pytest

from millrace.drawing.chart import HEIGHT, TOP, Series, line_chart, settled


def heights_of(drawn):
    (points,) = re.findall(r'points="([^"]*)"', drawn)
    return [float(point.split(",")[1]) for point in points.split()]


def steep(count=200):
    """Falls from 2,000 below 0 to 120 at once, and then slowly to 100."""
    return [(0.0, -2000.0), *((float(n), -120.0 + 20 * n / count) for n in range(1, count))]


def steeper():
    """From a million to 12 at once, and then slowly to 10: logarithms do not help."""
    return [(0.0, 1e6), *((float(n), 12.0 - 2 * n / 200) for n in range(1, 200))]


@pytest.mark.parametrize("points", [steep(), [(x, -y) for x, y in steeper()]])
def test_a_steep_start_does_not_flatten_the_rest(points):
    drawn = line_chart("elbo", [Series("elbo", points)])
    assert "the start is cut off" in drawn
    places = heights_of(drawn)
    assert places[0] == max(places) <= HEIGHT  # along the lower edge
    later = places[len(places) // 10 :]
    assert max(later) - min(later) > 0.7 * (max(places) - TOP)


def test_logarithms_are_cut_as_well():
    assert len(settled(steeper())) < len(steeper())


@pytest.mark.parametrize(
    "points",
    [
        steep(15),  # too few
        [(float(n), -1000.0 + 5 * n) for n in range(200)],  # no steep start
        [(float(n), 10.0 ** (3 - n / 50)) for n in range(200)],  # logarithmic
        [(float(n), float(n == 0)) for n in range(200)],  # the rest is flat
    ],
)
def test_otherwise_all_values_are_shown(points):
    assert len(settled(points)) == len(points)
    drawn = line_chart("x", [Series("x", points)])
    assert "the start is cut off" not in drawn


def test_speeds_are_drawn_from_zero_and_from_the_start():
    points = [(float(n), 0.0 if n == 0 else 100.0 + n % 2) for n in range(100)]
    drawn = line_chart("speed", [Series("speed", points)], from_zero=True)
    assert "the start is cut off" not in drawn
