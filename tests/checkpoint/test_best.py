"""Which checkpoint is the best."""

import math

import pytest

from millrace.checkpoint.best import BestMetric, parse_best, read_best_metric
from millrace.config import ConfigurationError


@pytest.mark.parametrize(
    ("best", "mode", "expected"),
    [
        ("validation_accuracy", None, BestMetric("validation_accuracy", "max")),
        ("validation_loss", None, BestMetric("validation_loss", "min")),
        ("-validation_perplexity", None, BestMetric("validation_perplexity", "min")),
        ("validation_perplexity", "min", BestMetric("validation_perplexity", "min")),
        ("validation_error_free", "max", BestMetric("validation_error_free", "max")),
        ("", None, None),
        (None, None, None),
    ],
)
def test_the_direction_follows_from_sign_mode_or_name(best, mode, expected):
    assert parse_best(best, mode) == expected


@pytest.mark.parametrize(("best", "mode"), [("-loss", "max"), ("loss", "smallest")])
def test_a_contradiction_is_refused(best, mode):
    with pytest.raises(ConfigurationError, match="max"):
        parse_best(best, mode)


@pytest.mark.parametrize(("mode", "place"), [("max", 1), ("min", 3)])
def test_the_first_of_equal_scores_is_the_best_and_others_than_numbers_are_not(mode, place):
    values = [0.5, 0.9, 0.9, 0.1, 0.1, "inf", "nan", math.nan, None, True]
    scores = [(number, {"m": value}) for number, value in enumerate(values)]
    assert BestMetric("m", mode).choose([*scores, (99, {})]) == place
    assert BestMetric("m", mode).choose([(99, {})]) is None


@pytest.mark.parametrize("recorded", [None, "m", ["m"], ["m", "up"], [1, "max"]])
def test_a_manifest_without_a_metric_has_none(recorded):
    assert read_best_metric({"best_by": recorded}) is None
    assert read_best_metric({"best_by": ["m", "min"]}) == BestMetric("m", "min")
