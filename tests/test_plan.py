"""A plan checks itself when it is created, before anything is compiled."""

import dataclasses

import numpy as np
import pytest

from millrace.plan import Batching, Plan, Precision


def test_the_default_plan_is_a_plain_training_loop():
    plan = Plan()
    assert plan.batching == Batching(1, 1, 1)
    assert plan.types == Precision("float32", "float32")
    assert plan.loss_scaling == 0
    assert not plan.stochastic_rounding
    assert not plan.optimizer_state_offloading


def test_a_plan_is_frozen():
    plan = Plan(micro_batch_size=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.micro_batch_size = 16


def test_a_plan_resolves_its_batch_sizes_and_dtypes():
    plan = Plan(
        micro_batch_size=16,
        num_replicas=4,
        global_batch_size=8192,
        precision="16.32",
        half_type="float16",
    )
    assert plan.batching == Batching(16, 4, 128)
    assert plan.types == Precision("float16", "float32")


@pytest.mark.parametrize(
    ("options", "per_replica"),
    [
        ({}, 1),
        ({"pipeline_splits": [2]}, 2),
        ({"pipeline_splits": ["a", "b"]}, 3),
        ({"pipeline_splits": ["a", "b"], "device_mapping": [0, 1, 0]}, 2),
        ({"pipeline_splits": ["a"], "device_mapping": [0, [1, 2]]}, 3),
    ],
    ids=str,
)
def test_replicas_are_inferred_from_the_devices(options, per_replica):
    """TensorFlow: sharded over two of eight devices, a graph is replicated four times."""
    plan = Plan.for_devices(4 * per_replica, micro_batch_size=2, **options)
    assert plan == Plan(num_replicas=4, micro_batch_size=2, **options)
    if per_replica > 1:
        message = f"multiple of {per_replica}.*got {per_replica + 1}"
        with pytest.raises(ValueError, match=message):
            Plan.for_devices(per_replica + 1, **options)


def test_a_plan_for_devices_refuses_a_number_of_replicas():
    with pytest.raises(ValueError, match="computes num_replicas"):
        Plan.for_devices(8, num_replicas=2)
    with pytest.raises(ValueError, match="positive multiple of 1"):
        Plan.for_devices(0)


def test_a_modified_copy_is_checked_too():
    with pytest.raises(ValueError, match="num_replicas must be at least 1, got 0"):
        dataclasses.replace(Plan(), num_replicas=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, got 0"),
        ({"micro_batch_size": 3, "global_batch_size": 10}, "9 or 12"),
        ({"precision": "16.64"}, "precision must be one of .* got '16.64'"),
        ({"half_type": "float8"}, "half_type must be one of .* got 'float8'"),
        ({"updates_per_execution": 0}, "updates_per_execution must be at least 1, got 0"),
        (
            {"gradient_accumulation_reduction": "median"},
            "gradient_accumulation_reduction .* got 'median'",
        ),
        ({"num_replicas": True}, "num_replicas must be a whole number, got True"),
        ({"micro_batch_size": 4.0}, "micro_batch_size must be a whole number, got 4.0"),
        ({"recomputation": "no"}, "recomputation must be True or False, got 'no'"),
        ({"pipeline_splits": "second"}, "pipeline_splits must be a list .* got 'second'"),
        ({"pipeline_splits": 2}, "pipeline_splits must be a list .* got 2"),
        ({"pipeline_splits": [True]}, r"pipeline_splits must be a list .* got \[True\]"),
        (
            {"pipeline_schedule": "foo"},
            "one of grouped, interleaved, sequential, zero-bubble, got 'foo'",
        ),
        ({"pipeline_schedule": None}, "pipeline_schedule must be one of .* got None"),
    ],
)
def test_an_invalid_value_is_an_error_with_name_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        Plan(**options)


def test_numpy_values_and_other_spellings_are_converted():
    plan = Plan(
        micro_batch_size=np.int64(4),
        recomputation=np.True_,
        pipeline_splits=(np.int32(2),),
        pipeline_schedule="Grouped",
    )
    assert type(plan.micro_batch_size) is int and plan.micro_batch_size == 4
    assert plan.recomputation is True
    assert plan.pipeline_splits == [2] and type(plan.pipeline_splits[0]) is int
    assert plan.num_stages == 2
    assert plan.pipeline_schedule == "grouped"
    assert Plan(pipeline_splits=None).pipeline_splits == []


def test_an_unknown_accumulator_dtype_is_an_error():
    with pytest.raises(ValueError, match=r"gradient_accumulation_dtype.*flaot32"):
        Plan(gradient_accumulation_dtype="flaot32")


@pytest.mark.parametrize("dtype", [None, "bfloat16", lambda path, variable: "float32"])
def test_an_accumulator_dtype_can_be_none_a_name_or_a_function(dtype):
    assert Plan(gradient_accumulation_dtype=dtype).gradient_accumulation_dtype == dtype


def test_stochastic_rounding_needs_16_bits():
    for precision in ("16.16", "16.32"):
        assert Plan(precision=precision, stochastic_rounding=True).stochastic_rounding
    with pytest.raises(ValueError, match=r"Use precision 16\.16 or 16\.32"):
        Plan(precision="32.32", stochastic_rounding=True)


@pytest.mark.parametrize("factor", [0, 1, 128.0, 2.0**126])
def test_a_loss_scale_can_be_any_factor_in_the_range_of_float32(factor):
    assert Plan(loss_scaling=factor).loss_scaling == factor


@pytest.mark.parametrize(
    "factor", [-1, -1e-9, float("nan"), float("inf"), 2.0**127, "auto"]
)
def test_an_invalid_loss_scale_is_an_error(factor):
    with pytest.raises(ValueError, match=r"loss_scaling must be 0.*got") as caught:
        Plan(loss_scaling=factor)
    assert repr(factor) in str(caught.value)


def test_a_dynamic_loss_scale_is_for_float16_only():
    plan = Plan(precision="16.32", half_type="float16", loss_scaling="dynamic")
    assert plan.loss_scaling == "dynamic"
    with pytest.raises(ValueError, match="set half_type to float16"):
        Plan(precision="16.16", half_type="bfloat16", loss_scaling="dynamic")


def test_a_dynamic_loss_scale_in_float32_is_an_error_that_names_precisions():
    with pytest.raises(ValueError, match=r"precision 32\.32.*16\.(16|32)"):
        Plan(precision="32.32", half_type="float16", loss_scaling="dynamic")
