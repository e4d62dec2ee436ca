"""A batch that does not fit into memory: how much it lacks and what would fit."""

import jax
import pytest

from millrace.program.compiling import describe_shortage, memory_limit

MEBIBYTE = 1 << 20


def measure(batch):
    """One MiB per sample, and one more."""
    return (1 + batch) * MEBIBYTE


@pytest.mark.parametrize(
    ("batch", "mebibytes", "expected"),
    [
        (100, 101, None),
        (100, 100, "the largest power of two that fits is 64"),
        (64, 64, "the largest power of two that fits is 32"),
        (64, 17, "the largest power of two that fits is 16"),
        (2, 2, "the largest power of two that fits is 1"),
        (3, 1, "not even a batch of 1 fits"),
        (1, 1, "not even a batch of 1 fits"),
    ],
)
def test_the_largest_power_of_two_that_fits_is_found(batch, mebibytes, expected):
    found = describe_shortage(batch, measure(batch), mebibytes * MEBIBYTE, measure)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found is not None and expected in found
        assert f"batch {batch} needs {batch + 1}.0 MiB of {mebibytes}.0 MiB" in found


def test_no_more_batches_are_compiled_than_necessary():
    tried = []

    def recorded(batch):
        tried.append(batch)
        return measure(batch)

    describe_shortage(1000, measure(1000), 300 * MEBIBYTE, recorded)
    assert tried == [512, 256]


def test_a_cpu_has_the_memory_of_the_machine():
    assert memory_limit(jax.devices()[0]) > 1 << 28
