"""Batch arithmetic; the numbers come from the documents of the references."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.plan import Batching, resolve_batching

sizes = st.integers(1, 64)


def test_a_global_batch_is_micro_batch_times_accumulation_times_replicas():
    batching = resolve_batching(
        micro_batch_size=16, num_replicas=4, gradient_accumulation_count=128
    )
    assert batching.global_batch_size == 8192
    assert batching.samples_per_step == 64


def test_the_accumulation_count_is_computed_from_the_global_batch():
    batching = resolve_batching(
        micro_batch_size=16, num_replicas=4, global_batch_size=16_384
    )
    assert batching == Batching(16, 4, 256)


def test_there_is_no_accumulation_by_default():
    assert resolve_batching(micro_batch_size=8, num_replicas=2) == Batching(8, 2, 1)


@settings(deadline=None)
@given(micro=sizes, replicas=sizes, count=sizes)
def test_both_ways_to_set_the_global_batch_agree(micro, replicas, count):
    counted = resolve_batching(
        micro_batch_size=micro, num_replicas=replicas, gradient_accumulation_count=count
    )
    sized = resolve_batching(
        micro_batch_size=micro,
        num_replicas=replicas,
        global_batch_size=micro * replicas * count,
    )
    assert counted == sized


@pytest.mark.parametrize(("dataset_size", "micro_batches"), [(18, 4), (20, 4), (24, 8)])
def test_samples_that_do_not_fill_an_update_are_dropped(dataset_size, micro_batches):
    batching = resolve_batching(
        micro_batch_size=3, num_replicas=2, gradient_accumulation_count=2
    )
    updates = batching.updates_per_epoch(dataset_size)
    assert updates * batching.gradient_accumulation_count * 2 == micro_batches


def test_cifar10_in_batches_of_64_has_781_updates_per_epoch():
    batching = resolve_batching(micro_batch_size=8, gradient_accumulation_count=8)
    assert batching.updates_per_epoch(50_000) == 781


def test_a_dataset_smaller_than_one_update_is_an_error_with_the_numbers():
    batching = resolve_batching(
        micro_batch_size=3, num_replicas=2, gradient_accumulation_count=2
    )
    assert batching.updates_per_epoch(12) == 1
    with pytest.raises(ValueError, match=r"11 samples.*12 = micro batch 3 x replicas 2"):
        batching.updates_per_epoch(11)


@pytest.mark.parametrize(
    ("micro", "replicas", "wanted", "nearest"),
    [
        (3, 2, 10, "6 or 12"),
        (18, 16, 3520, "3456 or 3744"),  # the reference silently uses 3456
        (8, 4, 20, "32"),
    ],
)
def test_a_global_batch_that_is_not_divisible_suggests_the_nearest(
    micro, replicas, wanted, nearest
):
    with pytest.raises(ValueError, match=f"The nearest multiples: {nearest}\\.") as caught:
        resolve_batching(
            micro_batch_size=micro, num_replicas=replicas, global_batch_size=wanted
        )
    assert f"global_batch_size ({wanted})" in str(caught.value)


def test_setting_both_accumulation_and_global_batch_is_an_error():
    with pytest.raises(ValueError, match=r"not both; got 2 and 64"):
        resolve_batching(
            micro_batch_size=8, gradient_accumulation_count=2, global_batch_size=64
        )


@pytest.mark.parametrize(
    "name",
    [
        "micro_batch_size",
        "num_replicas",
        "gradient_accumulation_count",
        "global_batch_size",
    ],
)
@pytest.mark.parametrize("value", [0, -4])
def test_a_size_below_one_is_an_error_with_its_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        resolve_batching(**{"micro_batch_size": 8, name: value})
