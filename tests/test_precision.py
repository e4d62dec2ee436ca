"""Precision names and their dtypes."""

import pytest

from millrace.plan import Precision, resolve_precision


@pytest.mark.parametrize(
    ("name", "half_type", "compute", "weights"),
    [
        ("16.16", "bfloat16", "bfloat16", "bfloat16"),
        ("16.32", "bfloat16", "bfloat16", "float32"),
        ("16.16", "float16", "float16", "float16"),
        ("16.32", "float16", "float16", "float32"),
        ("32.32", "bfloat16", "float32", "float32"),
        ("32.32", "float16", "float32", "float32"),
    ],
)
def test_a_precision_gives_the_dtypes_of_computation_and_weights(
    name, half_type, compute, weights
):
    assert resolve_precision(name, half_type) == Precision(compute, weights)


def test_16_bits_are_bfloat16_by_default():
    assert resolve_precision("16.16") == Precision("bfloat16", "bfloat16")


@pytest.mark.parametrize("name", ["32.16", "16", "8.8", "", "float32"])
def test_an_unknown_precision_is_an_error_that_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"16\.16, 16\.32, 32\.32") as caught:
        resolve_precision(name)
    assert repr(name) in str(caught.value)


def test_an_unknown_half_type_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="bfloat16, float16, got 'float8'"):
        resolve_precision("16.16", "float8")
