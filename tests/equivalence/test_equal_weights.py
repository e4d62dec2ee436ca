"""Every feature of a plan, alone and in pairs, gives the weights of the plain loop."""

import itertools

import jax
import numpy as np
import optax
import pytest
from plain_loop import (
    GLOBAL_BATCH,
    UPDATES,
    largest_difference,
    loss_fn,
    make_data,
    make_optimizer,
    plain_loop,
    rounding,
    train_with,
)

from millrace.plan import Plan
from millrace.program import offload

TOLERANCE = rounding()  # weights are of order 1

OFFLOADING = {"optimizer_state_offloading": True, "min_remote_tensor_size": 100}

# The micro-batch size follows from replicas and accumulation.
FEATURES = {
    "replicas": {"num_replicas": 4},
    "accumulation": {"gradient_accumulation_count": 4},
    "running_mean": {
        "gradient_accumulation_count": 2,
        "gradient_accumulation_reduction": "running_mean",
    },
    "offloading": OFFLOADING,
    "recomputation": {"recomputation": True},
    "static_loss_scale": {"loss_scaling": 128.0},
    "fp_exceptions": {"fp_exceptions": True},
    "accumulator_function": {
        "gradient_accumulation_count": 2,
        "gradient_accumulation_dtype": lambda path, value: (
            "float32" if path.endswith("kernel") else None
        ),
    },
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Offload even small state, in several buckets."""
    monkeypatch.setattr(offload, "_BUCKET_BYTES", 8000)


@pytest.fixture(scope="module")
def oracle():
    return plain_loop(make_optimizer(), make_data())


def build_plan(*names: str) -> Plan:
    options = {}
    for name in names:
        options |= FEATURES[name]
    pieces = options.get("num_replicas", 1) * options.get("gradient_accumulation_count", 1)
    return Plan(micro_batch_size=GLOBAL_BATCH // pieces, **options)


def assert_same(result, oracle) -> None:
    state, info, _ = result
    params, model_state, losses = oracle
    assert largest_difference(state.params, params) < TOLERANCE
    assert largest_difference(state.model_state, model_state) < TOLERANCE
    np.testing.assert_allclose(info["loss"], losses, atol=TOLERANCE)
    assert int(state.update) == UPDATES


def test_the_default_plan_gives_the_weights_of_the_plain_loop_exactly(oracle):
    state, info, _ = train_with(Plan(micro_batch_size=GLOBAL_BATCH))
    assert largest_difference(state.params, oracle[0]) < 1e-7
    np.testing.assert_allclose(info["loss"], oracle[2], rtol=1e-6)


@pytest.mark.devices(lambda feature: build_plan(feature).num_replicas)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_gives_the_weights_of_the_plain_loop(feature, oracle):
    assert_same(train_with(build_plan(feature)), oracle)


def mark_slow(pair):
    """Mark pairs with a feature that only scales or only inspects gradients."""
    is_slow = {"static_loss_scale", "fp_exceptions"} & set(pair)
    return pytest.param(pair, marks=pytest.mark.slow if is_slow else (), id="+".join(pair))


@pytest.mark.devices(lambda pair: build_plan(*pair).num_replicas)
@pytest.mark.parametrize(
    "pair", [mark_slow(pair) for pair in itertools.combinations(FEATURES, 2)]
)
def test_each_pair_of_features_gives_the_weights_of_the_plain_loop(pair, oracle):
    assert_same(train_with(build_plan(*pair)), oracle)


@pytest.mark.devices(4)
def test_all_features_together_give_the_weights_of_the_plain_loop(oracle):
    assert_same(train_with(build_plan(*FEATURES)), oracle)


@pytest.mark.devices(lambda split: split[1])
@pytest.mark.parametrize("split", [(1, 8, 4), (2, 8, 2), (4, 2, 4), (16, 2, 1), (8, 1, 4)])
def test_the_result_does_not_depend_on_how_a_global_batch_is_split(split, oracle):
    micro_batch, replicas, accumulation = split
    plan = Plan(
        micro_batch_size=micro_batch,
        num_replicas=replicas,
        gradient_accumulation_count=accumulation,
    )
    assert_same(train_with(plan), oracle)


def test_the_sum_is_the_accumulation_count_times_the_mean():
    """With plain SGD, summing 4 gradients equals a learning rate 4 times as large."""
    summed, _, _ = train_with(
        Plan(
            micro_batch_size=GLOBAL_BATCH // 4,
            gradient_accumulation_count=4,
            gradient_accumulation_reduction="sum",
        ),
        optimizer=optax.sgd(0.01),
    )
    params, _, _ = plain_loop(optax.sgd(0.04), make_data())
    assert largest_difference(summed.params, params) < TOLERANCE


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.9, nesterov=True),
        optax.adamw(1e-2),
        optax.lars(0.1),
        optax.rmsprop(1e-3, momentum=0.9),
        # Clips by the norm of all updates, so all variables are in one bucket.
        optax.chain(
            optax.scale_by_adam(), optax.clip_by_global_norm(0.5), optax.scale(-0.1)
        ),
    ],
    ids=["sgd", "nesterov", "adamw", "lars", "rmsprop", "clip_after_adam"],
)
def test_offloading_works_with_any_optimizer(optimizer):
    expected, _, _ = plain_loop(optimizer, make_data())
    plan = Plan(micro_batch_size=GLOBAL_BATCH, **OFFLOADING)
    state, _, _ = train_with(plan, optimizer=optimizer)
    assert largest_difference(state.params, expected) < TOLERANCE


@pytest.mark.devices(4)
def test_one_call_of_three_updates_equals_three_calls_of_one():
    from millrace.program.training import training_program

    together, _, program = train_with(Plan(micro_batch_size=8, num_replicas=4))
    again = training_program(loss_fn, make_optimizer(), program.plan)
    from plain_loop import make_model_state, make_params, stage

    state = again.init(make_params(), make_model_state(), seed=3)
    for update in range(UPDATES):
        one = {name: leaf[update : update + 1] for name, leaf in make_data().items()}
        state, _ = again.run(state, stage(again, one))
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "precision",
    [
        {"precision": "16.16", "stochastic_rounding": True},
        pytest.param(
            {"precision": "16.32", "half_type": "float16", "loss_scaling": "dynamic"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"precision": "16.16"}, marks=pytest.mark.slow),
        pytest.param(
            {"precision": "16.16", "half_type": "float16", "loss_scaling": 64.0},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_offloading_does_not_change_16_bit_weights(precision):
    expected, _, _ = train_with(Plan(micro_batch_size=GLOBAL_BATCH, **precision))
    plan = Plan(micro_batch_size=GLOBAL_BATCH, **precision, **OFFLOADING)
    state, _, _ = train_with(plan)
    # Programs fuse differently, so a weight may be rounded the other way.
    step = 2.0**-8 if plan.half_type == "bfloat16" else 2.0**-11
    tolerance = TOLERANCE if plan.precision == "16.32" else step
    assert largest_difference(state.params, expected.params) <= tolerance
