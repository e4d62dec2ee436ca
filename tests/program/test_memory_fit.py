"""A batch that does not fit is told what would."""

import jax
import pytest

from millrace.program.memory_fit import memory_limit, too_large

MEBIBYTE = 1 << 20


def needs(batch):
    """A MiB for each sample and one more."""
    return (1 + batch) * MEBIBYTE


@pytest.mark.parametrize(
    ("batch", "mebibytes", "said"),
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
def test_the_largest_power_of_two_that_fits_is_found(batch, mebibytes, said):
    found = too_large(batch, needs(batch), mebibytes * MEBIBYTE, needs)
    assert (found is None) == (said is None)
    if said is not None:
        assert found is not None and said in found
        assert f"batch {batch} needs {batch + 1}.00 MiB of {mebibytes}.00 MiB" in found


def test_no_more_batches_are_compiled_than_have_to_be():
    tried = []

    def noted(batch):
        tried.append(batch)
        return needs(batch)

    too_large(1000, needs(1000), 300 * MEBIBYTE, noted)
    assert tried == [512, 256]


def test_a_cpu_has_the_machine_s_memory():
    assert memory_limit(jax.devices()[0]) > 1 << 28
