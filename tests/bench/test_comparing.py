"""Regressions with their noise."""

import json

import pytest

from millrace.bench.comparing import compare, noise_of, read_results, verdict
from millrace.config import ConfigurationError


def results(*speeds, device="cpu", **others):
    low, middle, high = speeds
    speed = {"lowest": low, "median": middle, "highest": high}
    entry = {"name": "x", "status": "measured", "samples_per_second": speed}
    facts = {"date": "2026-01-01", "commit": "abc", "device": device}
    return {"facts": facts, "entries": [entry | others]}


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ((80, 81, 82), "SLOWER"),
        ((118, 120, 122), "FASTER"),
        ((95, 97, 99), "the same"),
        ((60, 90, 120), "the same"),  # slower by 10 %, but how can one tell
    ],
)
def test_a_change_counts_only_beyond_the_noise(new, said):
    table = compare(results(99, 100, 101), results(*new))
    assert said in table and "| x " in table


def test_noise_is_how_far_the_values_of_both_are_apart():
    old, new = results(99, 100, 101), results(190, 200, 200)
    assert noise_of(old["entries"][0], new["entries"][0]) == pytest.approx(0.02 + 0.05)
    assert verdict(0.005, noise_of(results(5, 5, 5)["entries"][0])) == "the same"


def test_what_was_not_measured_both_times_is_left_out():
    skipped = results(1, 1, 1, status="skipped")
    assert compare(skipped, results(1, 1, 1)) == "Nothing was measured both times."


def test_another_device_is_named():
    said = compare(results(1, 1, 1, device="NVIDIA H200"), results(1, 1, 1))
    assert "another device: NVIDIA H200; this is cpu" in said


def test_a_file_that_is_something_else_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"ratio": 1}))
    (tmp_path / "b.json").write_text("no")
    with pytest.raises(ConfigurationError, match=r"not a results\.json"):
        read_results(tmp_path / "a.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_results(tmp_path / "b.json")
