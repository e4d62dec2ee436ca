"""Numbers formatted for people, and round numbers for axes."""

import pytest

from millrace.numbers import (
    choose_time_unit,
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    format_tick,
    format_ticks,
    format_value,
    linear_ticks,
    log_ticks,
    pluralize,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (999.94, "999.9"),
        (21_139.81, "21,140"),
        (-1234.5, "-1,234"),
        (1.5e12, "1.5e+12"),
        (float("nan"), "nan"),
    ],
)
def test_a_metric_has_four_digits_or_is_a_whole_number(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "True"),
        (1234567, "1,234,567"),
        (1e-5, "1e-05"),
        ("a b", "a b"),
        ([1, "x"], '[1, "x"]'),
    ],
)
def test_every_json_value_can_be_shown_in_a_table(value, text):
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12 ms"),
        (1.59, "1.6 s"),
        (306.6, "5.1 minutes"),
        (5990, "1 h 40 min"),
        (90_061, "25 h 01 min"),
    ],
)
def test_a_duration_is_shown_in_the_unit_that_suits_it(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.5, "12.5 s"), (0.0125, "12.5 ms"), (12.5e-6, "12.5 us")]
)
def test_the_times_of_a_timeline_share_the_unit_that_suits_the_longest(seconds, text):
    assert choose_time_unit(seconds).format(seconds) == text


def test_sizes_shares_and_counts():
    assert format_bytes(3 * 2**30) == "3.0 GiB"
    assert format_bytes(5000 * 2**30) == "5,000.0 GiB"
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(1536, digits=2) == "1.50 KiB"
    assert format_bytes(100) == "100 bytes"
    assert format_percent(0.2727) == "27.3%"
    assert pluralize(1, "micro-batch") == "1 micro-batch"
    assert pluralize(8, "micro-batch") == "8 micro-batches"
    assert pluralize(2, "device") == "2 devices"


@pytest.mark.parametrize(
    ("end", "ticks"),
    [
        (33, [0, 5, 10, 15, 20, 25, 30]),
        (12, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (0.4, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4]),
        (0, [0]),
    ],
)
def test_an_axis_has_round_numbers_and_not_too_many(end, ticks):
    assert linear_ticks(0, end, at_most=13) == pytest.approx(ticks)


def test_an_axis_may_start_anywhere():
    assert linear_ticks(-0.31, 0.22) == pytest.approx([-0.2, 0, 0.2])


def test_a_logarithmic_axis_has_powers_of_ten_or_parts_of_them():
    assert log_ticks(0.001, 1) == pytest.approx([0.001, 0.01, 0.1, 1])
    assert log_ticks(15, 600) == pytest.approx([20, 50, 100, 200, 500])
    assert len(log_ticks(1e-12, 1e12)) <= 6


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0, "0"), (0.05, "0.05"), (9500, "9500"), (12_000, "12k"), (2.5e6, "2.5M")],
        *[(3e9, "3G"), (4e12, "4T"), (1e15, "1e+15"), (2e-6, "2e-06"), (-2e4, "-20k")],
    ],
)
def test_a_tick_label_is_short(value, text):
    assert format_tick(value) == text


def test_the_labels_of_an_axis_have_one_unit_for_thousands():
    assert format_ticks([0, 5000, 10_000]) == ["0", "5k", "10k"]
    assert format_ticks([10, 1000, 100_000]) == ["10", "1k", "100k"]
    assert format_ticks([0, 4500, 9000]) == ["0", "4500", "9000"]
    assert format_ticks([500_000, 1_000_000]) == ["500k", "1M"]
