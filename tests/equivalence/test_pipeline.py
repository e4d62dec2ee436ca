"""A pipeline gives the same weights as a program without one, in any layout."""

import functools
import itertools
import operator

import jax
import numpy as np
import optax
import pytest
from pipelined import (
    CLASSES,
    SPLITS,
    branched_network,
    largest_difference,
    residual_network,
    train,
)

from millrace.config import ConfigurationError
from millrace.nn.initializers import Init
from millrace.nn.layers import Layer, dense, init_layers, relu
from millrace.nn.losses import LayeredLoss
from millrace.plan import Plan
from millrace.program import state_layout
from millrace.program.compiling import compiling
from millrace.program.training import training_program

TOLERANCE = 1e-5  # float32
SCHEDULES = ("grouped", "interleaved", "sequential", "zero-bubble")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Offload even small state, in several buckets."""
    monkeypatch.setattr(state_layout, "_BUCKET_BYTES", 2000)


@functools.cache
def plain(network, **options):
    return train(network(), **options)


def check(got, expected, tolerance=TOLERANCE):
    assert largest_difference(got, expected) < tolerance


ALL = [*itertools.product(SCHEDULES, (False, True), (1, 2), (False, True))]
# Covers every pair of values of two features; the rest takes a minute.
OFTEN = {ALL[i] for i in (0, 7, 11, 12, 17, 22, 26, 29)}


@pytest.mark.devices(lambda replicas: 3 * replicas)
@pytest.mark.parametrize(
    ("schedule", "recomputation", "replicas", "offloading"),
    [
        case if case in OFTEN else pytest.param(*case, marks=pytest.mark.slow)
        for case in ALL
    ],
)
def test_every_schedule_gives_the_same_weights(
    schedule, recomputation, replicas, offloading
):
    got = train(
        residual_network(),
        pipeline_splits=SPLITS,
        pipeline_schedule=schedule,
        recomputation=recomputation,
        num_replicas=replicas,
        optimizer_state_offloading=offloading,
        min_remote_tensor_size=100,
    )
    check(got, plain(residual_network, num_replicas=replicas))


def test_the_fast_cases_cover_every_pair_of_features():
    for first, second in itertools.combinations(range(4), 2):
        pairs = {(case[first], case[second]) for case in ALL}
        assert pairs == {(case[first], case[second]) for case in OFTEN}


@pytest.mark.devices(lambda mapping: max(mapping) + 1)
@pytest.mark.parametrize(
    ("mapping", "schedule"),
    [
        ([0, 1, 0], "grouped"),
        ([0, 0, 1], "interleaved"),
        ([0, 1, 0], "zero-bubble"),
        pytest.param([0, 0, 0], "sequential", marks=pytest.mark.slow),
        pytest.param([0, 1, 0], "interleaved", marks=pytest.mark.slow),
        pytest.param([0, 1, 0], "sequential", marks=pytest.mark.slow),
        pytest.param([0, 0, 1], "grouped", marks=pytest.mark.slow),
    ],
)
def test_stages_can_share_a_device(mapping, schedule):
    got = train(
        residual_network(),
        pipeline_splits=SPLITS,
        pipeline_schedule=schedule,
        device_mapping=mapping,
        recomputation=True,
    )
    check(got, plain(residual_network))


OPTIONS = {
    "running_mean": {"gradient_accumulation_reduction": "running_mean"},
    "loss_scale": {"loss_scaling": 128.0, "fp_exceptions": True},
    "own_types": {"gradient_accumulation_dtype": None},
    "half_compute": {"precision": "16.32"},
    "half_copies": {"precision": "16.32", "stochastic_rounding": True},
    "half_weights": {"precision": "16.16", "stochastic_rounding": True},
    "dynamic": {"precision": "16.32", "half_type": "float16", "loss_scaling": "dynamic"},
}


OFTEN_TRIED = {("loss_scale", "interleaved")}


@pytest.mark.devices(3)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(*case, marks=() if case in OFTEN_TRIED else pytest.mark.slow)
        for case in itertools.product(OPTIONS, ("interleaved", "zero-bubble"))
    ],
)
def test_other_options_of_the_plan_work_in_a_pipeline(name, schedule):
    options = OPTIONS[name]
    pipeline = {"pipeline_splits": SPLITS, "pipeline_schedule": schedule}
    # XLA may keep more than 16 bits inside a fusion, and stages fuse differently.
    with compiling({"cpu": {"xla_allow_excess_precision": False}}):
        got = train(residual_network(), **options, **pipeline)
        check(got, train(residual_network(), **options))


@pytest.mark.devices(3)
@pytest.mark.parametrize(
    ("mapping", "schedule"),
    [
        ([0, [1, 2], 0], "grouped"),
        ([0, [0, 1], 1], "zero-bubble"),
        pytest.param([0, [0, 1], 1], "interleaved", marks=pytest.mark.slow),
        pytest.param([0, [1, 1], 2], "sequential", marks=pytest.mark.slow),
        pytest.param([0, 1, 0], "interleaved", marks=pytest.mark.slow),
        pytest.param([0, [1, 2], 0], "interleaved", marks=pytest.mark.slow),
        pytest.param([0, [1, 2], 0], "sequential", marks=pytest.mark.slow),
        pytest.param([0, [0, 1], 1], "grouped", marks=pytest.mark.slow),
        pytest.param([0, [1, 1], 2], "grouped", marks=pytest.mark.slow),
    ],
)
def test_concurrent_stages_equal_the_same_graph_run_serially(mapping, schedule):
    got = train(
        branched_network(),
        pipeline_splits=["branches", "join"],
        device_mapping=mapping,
        pipeline_schedule=schedule,
    )
    check(got, plain(branched_network))


@pytest.mark.devices(3)
def test_optimizers_with_masks_and_schedules_work():
    masked = optax.masked(
        optax.add_decayed_weights(1e-2),
        lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    )
    optimizer = optax.chain(masked, optax.sgd(optax.cosine_decay_schedule(0.1, 4), 0.9))
    pipeline = {
        "pipeline_splits": SPLITS,
        "optimizer_state_offloading": True,
        "min_remote_tensor_size": 100,
    }
    got = train(residual_network(), optimizer, **pipeline)
    check(got, train(residual_network(), optimizer))


@pytest.mark.devices(3)
def test_stages_can_be_chosen_automatically():
    got = train(residual_network(), pipeline_splits=[3])
    check(got, plain(residual_network))


def embedding(name, size):
    def init(tokens):
        del tokens
        return {"table": Init("normal", (CLASSES, size), 1.0)}, {}

    def apply(params, model_state, tokens, call):
        del call
        return params["table"][tokens], model_state

    return Layer(name, init, apply)


@pytest.mark.devices(2)
def test_zero_bubble_works_where_the_first_stage_reads_integers():
    network = [embedding("tokens", 4), dense("hidden", 4), relu("relu"), dense("out", 1)]
    loss = LayeredLoss(
        network, lambda batch, key: batch, lambda y, batch: ((y**2).mean(), {})
    )
    tokens = np.random.default_rng(0).integers(0, CLASSES, (4, 3)).astype(np.int32)
    weights = init_layers(network, jax.random.key(0), tokens[:1])

    def trained(**pipeline):
        plan = Plan(micro_batch_size=3, gradient_accumulation_count=4, **pipeline)
        program = training_program(loss, optax.adam(1e-2), plan)
        chunk = jax.device_put(tokens, program.chunk_sharding)
        state, info = program.run(program.init(*weights), chunk)
        return jax.device_get((program.unpack_state(state), info))

    got = trained(pipeline_splits=["out"], pipeline_schedule="zero-bubble")
    check(got, trained())


def read_twice(batch, key):
    del key
    return batch["tokens"], batch["x"], batch["x"]


def read_a_number(batch, key):
    del key
    return batch["tokens"], batch["x"], 2.0


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("inputs", "combine"), [(read_twice, operator.add), (read_a_number, operator.mul)]
)
@pytest.mark.parametrize("schedule", ["grouped", "zero-bubble"])
def test_an_input_may_have_an_array_twice_and_numbers(schedule, inputs, combine):
    def mix(params, model_state, x, call):
        del call
        tokens, one, other = x
        y = params["table"][tokens] * (one @ params["kernel"])
        return combine(y, other), model_state

    values = np.random.default_rng(0).standard_normal((4, 3, 4)).astype(np.float32)
    params = {
        "mix": {"table": values[0].repeat(2, 0), "kernel": values[1].repeat(2, 0)[:4]},
        "out": {"kernel": values[2].T[:, :1], "bias": np.zeros(1, np.float32)},
    }
    loss = LayeredLoss(
        [Layer("mix", lambda x: (params["mix"], {}), mix), dense("out", 1)],
        inputs,
        lambda y, batch: ((y**2).mean(), {}),
    )
    tokens = np.random.default_rng(1).integers(0, CLASSES, (4, 3)).astype(np.int32)

    def trained(**pipeline):
        plan = Plan(micro_batch_size=3, gradient_accumulation_count=4, **pipeline)
        program = training_program(loss, optax.sgd(0.1), plan)
        batches = {"tokens": tokens, "x": values}
        chunk = jax.device_put(batches, program.chunk_sharding)
        state, info = program.run(program.init(params, {}), chunk)
        return jax.device_get((program.unpack_state(state), info))

    check(trained(pipeline_splits=["out"], pipeline_schedule=schedule), trained())


@pytest.mark.devices(2)
@pytest.mark.parametrize("mapping", [None, [0, 0]])
def test_a_model_without_state_needs_none(mapping):
    network = [dense("one", 2), dense("two", 1)]
    loss = LayeredLoss(network, lambda x, key: x, lambda y, x: ((y**2).mean(), {}))
    x = np.arange(24, dtype=np.float32).reshape(4, 3, 2) / 24
    params, _ = init_layers(network, jax.random.key(0), x[0])

    def trained(**pipeline):
        plan = Plan(micro_batch_size=3, gradient_accumulation_count=4, **pipeline)
        program = training_program(loss, optax.sgd(0.1), plan)
        chunk = jax.device_put(x, program.chunk_sharding)
        state, _ = program.run(program.init(params), chunk)
        return jax.device_get(program.unpack_state(state).params)

    check(trained(pipeline_splits=["two"], device_mapping=mapping), trained())


@pytest.mark.devices(2)
def test_model_state_of_no_layer_is_an_error_before_training():
    network = [dense("one", 2), dense("two", 1)]
    loss = LayeredLoss(network, lambda x, key: x, lambda y, x: ((y**2).mean(), {}))
    params, _ = init_layers(network, jax.random.key(0), np.zeros((1, 2), np.float32))
    plan = Plan(gradient_accumulation_count=4, pipeline_splits=["two"])
    program = training_program(loss, optax.sgd(0.1), plan)
    with pytest.raises(ConfigurationError, match=r"model state .* layer name; got scale\."):
        program.init(params, {"scale": np.float32(1)})
