"""Batch norm with replicas and accumulation: shared in groups, moved once per update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled_text import operations_by_loop_depth
from plain_loop import largest_difference

from millrace.nn.layers import apply_layers, conv, dense, global_average_pool, init_layers
from millrace.nn.losses import LayeredLoss
from millrace.nn.norms import ReplicaGroups, _pool_moments, batch_norm
from millrace.plan import Plan
from millrace.program.compiling import compiling
from millrace.program.replicas import REPLICA_AXIS
from millrace.program.training import training_program

BATCH, UPDATES = 16, 2
EXCHANGES = "all-reduce|all-reduce-start|all-gather|all-gather-start|reduce-scatter"


def build(groups=None, momentum=0.9, stable=False):
    return [
        conv("conv", 6),
        batch_norm("bn", momentum=momentum, groups=groups, stable=stable),
        global_average_pool("pool"),
        dense("fc", 3),
    ]


def run(plan, groups=None, updates=UPDATES, stable=False):
    model = build(groups, stable=stable)
    rng = np.random.default_rng(0)
    x = rng.normal(1, 2, (updates, BATCH, 6, 6, 2)).astype(np.float32)
    y = rng.integers(0, 3, (updates, BATCH)).astype(np.int32)
    params, model_state = init_layers(model, jax.random.key(0), x[0])

    def outputs(out, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(out, batch["y"])
        return losses.mean(), {}

    loss = LayeredLoss(model, lambda batch, key: batch["x"], outputs)
    program = training_program(loss, optax.sgd(0.3, momentum=0.9), plan)
    step = plan.batching.samples_per_step
    chunk = {"x": x.reshape(-1, step, 6, 6, 2), "y": y.reshape(-1, step)}
    state = program.init(params, model_state)
    state, _ = program.run(state, jax.device_put(chunk, program.chunk_sharding))
    return program.unpack_state(state), x


@pytest.mark.devices(lambda replicas: replicas)
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_one_group_of_all_replicas_equals_batch_norm_of_the_whole_batch(replicas):
    expected, _ = run(Plan(micro_batch_size=BATCH))
    plan = Plan(micro_batch_size=BATCH // replicas, num_replicas=replicas)
    groups = ReplicaGroups(REPLICA_AXIS, replicas, replicas)
    state, _ = run(plan, groups)
    assert largest_difference(state.params, expected.params) < 2e-6
    assert largest_difference(state.model_state, expected.model_state) < 2e-6


@pytest.mark.devices(4)
@pytest.mark.parametrize("stable", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gathered_statistics_are_exchanged_once_per_norm_and_equal(stable):
    plan = Plan(micro_batch_size=BATCH // 8, num_replicas=4, gradient_accumulation_count=2)
    states, exchanges = {}, {}
    for gathers in (False, True):
        groups = ReplicaGroups(REPLICA_AXIS, 4, 2, gathers)
        with compiling({}) as programs:
            states[gathers], _ = run(plan, groups, stable=stable)
        # Depth 2 is the loop over micro-batches: of a norm, forward and backward.
        exchanges[gathers] = operations_by_loop_depth(programs[-1], EXCHANGES)[2]
    # Without it, XLA combines the two only if neither needs the other.
    assert exchanges == {False: 4 if stable else 2, True: 2}
    assert largest_difference(states[True].params, states[False].params) < 2e-6
    assert largest_difference(states[True].model_state, states[False].model_state) < 2e-6


def test_pooled_moments_are_those_of_all_data_even_far_from_zero():
    """The oracle is NumPy in float64; E[x²] - E[x]² would have no correct digit."""
    means = 1e4 + 0.1 * np.arange(4)[:, None, None]
    x = np.random.default_rng(1).normal(means, 0.1, (4, 64, 3)).astype(np.float32)
    wide = x.astype(np.float64)
    moments = np.stack([wide.mean(1), wide.var(1)], 1).astype(np.float32)
    pooled = _pool_moments(jnp.asarray(moments))
    np.testing.assert_allclose(pooled["mean"], wide.mean((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(pooled["var"], wide.var((0, 1)), rtol=2e-2)


@pytest.mark.devices(4)
def test_groups_of_two_in_four_replicas_equal_two_larger_replicas():
    """Consecutive replicas form a group: (0, 1) and (2, 3)."""
    expected, _ = run(Plan(micro_batch_size=BATCH // 2, num_replicas=2))
    plan = Plan(micro_batch_size=BATCH // 4, num_replicas=4)
    grouped, _ = run(plan, ReplicaGroups(REPLICA_AXIS, 4, 2))
    ungrouped, _ = run(plan)
    assert largest_difference(grouped.params, expected.params) < 2e-6
    assert largest_difference(ungrouped.params, expected.params) > 1e-4


@pytest.mark.devices(8)
@pytest.mark.parametrize(
    ("group_size", "options"),
    [
        (2, {"pipeline_splits": ["bn"], "pipeline_schedule": "grouped"}),
        (
            4,
            {
                "pipeline_splits": ["bn", "fc"],
                "device_mapping": [0, 1, 0],
                "pipeline_schedule": "sequential",
                "recomputation": True,
            },
        ),
    ],
    ids=["grouped", "recomputed"],
)
def test_groups_work_inside_the_stages_of_a_pipeline(group_size, options):
    """At each tick, only the replicas of one stage take part."""
    plan = {
        "micro_batch_size": BATCH // 16,
        "num_replicas": 4,
        "gradient_accumulation_count": 4,
    }
    groups = ReplicaGroups(REPLICA_AXIS, 4, group_size)
    expected, _ = run(Plan(**plan), groups)
    ungrouped, _ = run(Plan(**plan))
    state, _ = run(Plan(**plan, **options), groups)
    assert largest_difference(state.params, expected.params) < 2e-6
    assert largest_difference(state.model_state, expected.model_state) < 2e-6
    assert largest_difference(state.params, ungrouped.params) > 1e-4


@pytest.mark.devices(4)
def test_groups_that_do_not_divide_the_replicas_are_an_error():
    plan = Plan(micro_batch_size=4, num_replicas=4)
    with pytest.raises(ValueError, match="4 replicas cannot be divided into groups of 3"):
        run(plan, ReplicaGroups(REPLICA_AXIS, 4, 3))


@pytest.mark.devices(lambda options: options.get("num_replicas", 1))
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_count": 4},
        {"num_replicas": 4},
        {"num_replicas": 2, "gradient_accumulation_count": 2},
    ],
    ids=str,
)
def test_moving_statistics_move_once_per_update_by_the_average(options):
    state, x = run(Plan(micro_batch_size=4, **options), updates=1)
    model = build()
    params, model_state = init_layers(model, jax.random.key(0), x[0])
    moves = []
    for part in np.split(x[0], 4):
        _, moved = apply_layers(
            model, params, model_state, jnp.asarray(part), training=True
        )
        moves.append(moved["bn"])  # each from the old value: 0.9 x old + 0.1 x batch
    expected = jax.tree.map(lambda *values: np.mean(values, 0), *moves)
    assert largest_difference(state.model_state["bn"], expected) < 1e-6


@pytest.mark.devices(4)
def test_replicas_and_accumulation_average_statistics_the_same_way():
    accumulated, _ = run(Plan(micro_batch_size=4, gradient_accumulation_count=4))
    replicated, _ = run(Plan(micro_batch_size=4, num_replicas=4))
    assert largest_difference(accumulated.model_state, replicated.model_state) < 2e-6
    assert largest_difference(accumulated.params, replicated.params) < 2e-6
