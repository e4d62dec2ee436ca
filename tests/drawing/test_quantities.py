"""Numbers as a person reads them."""

import pytest

from millrace.drawing.quantities import count, percent, round_steps, show_bytes, unit_for


@pytest.mark.parametrize(
    ("seconds", "shown"), [(12.5, "12.5 s"), (0.0125, "12.5 ms"), (12.5e-6, "12.5 us")]
)
def test_a_time_is_shown_in_the_unit_that_suits_it(seconds, shown):
    assert unit_for(seconds).show(seconds) == shown


@pytest.mark.parametrize(
    ("end", "steps"),
    [
        (33, [0, 5, 10, 15, 20, 25, 30]),
        (12, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (0.4, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4]),
        (0, [0]),
    ],
)
def test_an_axis_has_round_numbers_and_not_too_many(end, steps):
    assert round_steps(end, at_most=12) == pytest.approx(steps)


def test_sizes_shares_and_numbers_of_things():
    assert show_bytes(3 * 2**30) == "3.0 GiB"
    assert show_bytes(1536) == "1.5 KiB"
    assert show_bytes(100) == "100 bytes"
    assert percent(0.2727) == "27.3 %"
    assert count(1, "micro-batch") == "1 micro-batch"
    assert count(8, "micro-batch") == "8 micro-batches"
    assert count(2, "device") == "2 devices"
