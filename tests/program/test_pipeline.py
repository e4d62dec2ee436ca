"""What a pipeline promises besides the right weights: errors, exchanges, keys, state."""

import logging
import re
import time

import jax
import numpy as np
import optax
import pytest
from compiled_text import operations_by_loop_depth
from pipelined import (
    MICRO_BATCHES,
    PIXELS,
    SPLITS,
    branched_network,
    largest_difference,
    make_loss,
    make_weights,
    residual_network,
    train,
)

from millrace.config import ConfigurationError
from millrace.nn.layers import concurrent, dense, flatten, stateless
from millrace.plan import Plan
from millrace.program.pipeline_program import PipelineProgram
from millrace.program.splitting import choose_splits, split_layers
from millrace.program.training import TrainingProgram, training_program
from millrace.run.pipeline_profile import draw_profile, profile_pipeline


def build_program(layers=None, optimizer=None, devices=None, **plan) -> TrainingProgram:
    given = {
        "micro_batch_size": 2,
        "gradient_accumulation_count": MICRO_BATCHES,
        "pipeline_splits": SPLITS,
    } | plan
    loss = make_loss(layers or residual_network())
    optimizer = optimizer or optax.sgd(0.1, 0.9)
    return training_program(loss, optimizer, Plan(**given), devices=devices)


def make_chunk(program: TrainingProgram, updates: int = 1) -> dict[str, jax.Array]:
    shape = (updates * MICRO_BATCHES, 2 * program.plan.num_replicas)
    chunk = {
        "image": np.zeros((*shape, PIXELS, PIXELS, 3), np.float32),
        "label": np.zeros(shape, np.int32),
    }
    return jax.device_put(chunk, program.chunk_sharding)


@pytest.mark.devices(3)
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"pipeline_splits": ["secnd"]}, "Did you mean second?.*block_conv, block_norm"),
        ({"pipeline_splits": ["first"]}, "no stage can start at 'first'"),
        (
            {"pipeline_splits": ["second", "block_norm"]},
            "the model: block_norm second",
        ),
        ({"pipeline_splits": [12]}, "12 stages; the model has only 11 layers"),
        ({"gradient_accumulation_count": 8}, "multiple of 6 .*Use 6 or 12"),
        ({"device_mapping": [0, 2, 0]}, "skips device 1"),
        ({"device_mapping": [0, [1, 2], 0]}, "which has a single stage"),
        ({"num_replicas": 4}, "4 replicas of 3 pipeline devices need 12, but .* only 8"),
    ],
)
def test_a_mistake_in_the_plan_fails_before_anything_is_compiled(plan, message):
    with pytest.raises(ConfigurationError, match=message):
        build_program(**plan).init(*make_weights(residual_network()))


@pytest.mark.devices(lambda num_devices: num_devices)
@pytest.mark.parametrize(
    ("num_devices", "num_replicas", "mapping"),
    [(1, 1, "0 0 0"), (2, 1, "0 0 1"), (5, 2, "0 0 1"), (1, 2, None)],
)
def test_too_few_devices_suggest_a_mapping_that_works(num_devices, num_replicas, mapping):
    devices = jax.devices()[:num_devices]
    with pytest.raises(ConfigurationError, match="pipeline devices need") as refused:
        build_program(devices=devices, num_replicas=num_replicas)
    suggested = re.findall(r"--device-mapping ([\d ]+) \(", str(refused.value))
    assert suggested == ([mapping] if mapping else [])
    if mapping:
        plan = {"device_mapping": [int(number) for number in mapping.split()]}
        program = build_program(devices=devices, num_replicas=num_replicas, **plan)
        program.init(*make_weights(residual_network()))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"device_mapping": [0, 1]}, "each of the 3 stages .* got 2"),
        ({"pipeline_splits": ["a", "a"]}, "names a more than once"),
        ({"pipeline_splits": [3, "a"]}, "or one number of stages"),
        ({"pipeline_splits": [1]}, "at least 2"),
    ],
)
def test_splits_that_fit_no_model_are_errors_of_the_plan(plan, message):
    with pytest.raises(ValueError, match=message):
        Plan(**{"pipeline_splits": SPLITS, **plan})


def test_a_loss_without_layers_is_an_error():
    with pytest.raises(ConfigurationError, match="a LayeredLoss, not function"):
        training_program(
            lambda params, model_state, batch, key: None,
            optax.sgd(0.1),
            Plan(pipeline_splits=["a"], pipeline_schedule="sequential"),
        )


def swapped(tree):
    """Swap the values of two layers of equal shapes."""
    return tree | {"one": tree["two"], "two": tree["one"]}


def swap_gradients():
    return optax.stateless(lambda gradients, _: swapped(gradients))


def swap_in_state():
    """Swap the velocities of two layers, so that only the state combines layers."""
    inner = optax.sgd(0.1, 0.9)

    def update(gradients, state, params):
        updates, state = inner.update(gradients, state, params)
        return updates, jax.tree.map(swapped, state, is_leaf=lambda x: isinstance(x, dict))

    return optax.GradientTransformation(inner.init, update)


@pytest.mark.devices(2)
@pytest.mark.parametrize("optimizer", [swap_gradients, swap_in_state])
def test_an_optimizer_that_combines_whole_arrays_is_an_error(optimizer):
    layers = [flatten("flat"), *(dense(n, 40) for n in ("wide", "one", "two", "end"))]
    splits = {"pipeline_splits": ["two"], "pipeline_schedule": "interleaved"}
    with pytest.raises(ConfigurationError, match="whole arrays of the layers") as refused:
        build_program(layers, optimizer(), **splits).init(*make_weights(layers))
    assert {"one", "two"} <= set(re.findall(r"\w+", str(refused.value)))
    assert "Keep both layers on one device (device_mapping)" in str(refused.value)
    # As the message suggests.
    build_program(layers, optimizer(), **splits, device_mapping=[0, 0]).init(
        *make_weights(layers)
    )


@pytest.mark.devices(2)
def test_clipping_by_global_norm_needs_one_small_exchange_per_update():
    layers = [flatten("flat"), dense("one", 8), dense("two", 8), dense("end", 5)]
    splits = {"pipeline_splits": ["two"], "pipeline_schedule": "interleaved"}
    counts = []
    for clipping in (optax.identity(), optax.clip_by_global_norm(1.0)):
        optimizer = optax.chain(clipping, optax.sgd(0.1, 0.9))
        program = build_program(layers, optimizer, **splits)
        state = program.init(*make_weights(layers))
        program.compile(state, make_chunk(program, 2))
        (text,) = program._compiled.values()
        found = operations_by_loop_depth(text, "all-reduce|all-reduce-start")
        assert set(found) == {1}  # the loop over updates, not that over ticks
        counts.append(found[1])
    # XLA may combine it with the exchange of the loss.
    assert counts[0] <= counts[1] <= counts[0] + 1
    assert not operations_by_loop_depth(text, "all-gather|all-to-all")


@pytest.mark.devices(3)
def test_the_branches_of_the_last_stage_cannot_be_spread_over_devices():
    layers = branched_network()[:2]
    program = build_program(
        layers, pipeline_splits=["branches"], pipeline_schedule="sequential"
    )
    with pytest.raises(ConfigurationError, match="branches, has the loss"):
        program.init(*make_weights(layers))


@pytest.mark.devices(3)
def test_integers_cannot_cross_between_stages():
    layers = residual_network()
    rounding = stateless("whole", lambda x: x.astype(np.int32))
    back = stateless("back", lambda x: x.astype(np.float32))
    layers[6:6] = [rounding, back]
    program = build_program(
        layers, pipeline_splits=["back"], pipeline_schedule="sequential"
    )
    state = program.init(*make_weights(layers))
    with pytest.raises(ConfigurationError, match="output of layer whole has int32 values"):
        program.compile(state, make_chunk(program))


@pytest.mark.devices(3)
def test_an_error_in_a_stage_is_raised_unchanged():
    def fail(x):
        if x.shape[0] > 1:  # not for the single sample that weights are initialized with
            raise ZeroDivisionError("mine")
        return x

    layers = [*residual_network()[:-1], stateless("bad", fail), dense("end", 5)]
    program = build_program(layers)
    weights = make_weights(residual_network())
    params = {n: v for n, v in weights[0].items() if n != "classes"}
    ends = {"end": weights[0]["classes"]}
    with pytest.raises(ZeroDivisionError, match="mine"):
        state = program.init(params | ends, weights[1])
        program.compile(state, make_chunk(program))


@pytest.fixture(scope="module")
def compiled():
    program = build_program(num_replicas=2, pipeline_schedule="interleaved")
    state = program.init(*make_weights(residual_network()))
    program.compile(state, make_chunk(program, 2))  # XLA would unroll a loop of one
    (text,) = program._compiled.values()
    return text


@pytest.mark.devices(6)
def test_gradients_cross_replicas_once_per_update(compiled):
    """Depth 1 is the loop over updates, depth 2 that over ticks."""
    found = operations_by_loop_depth(compiled, "all-reduce|all-reduce-start")
    assert set(found) == {1}


@pytest.mark.devices(6)
def test_only_neighbors_exchange_values_at_each_tick(compiled):
    found = operations_by_loop_depth(
        compiled, "collective-permute|collective-permute-start"
    )
    assert dict(found) == {2: 2}  # activations and gradients
    assert not operations_by_loop_depth(compiled, "all-gather|all-to-all")


@pytest.mark.devices(3)
def test_a_device_holds_only_the_weights_of_its_stages():
    program = build_program()
    assert isinstance(program, PipelineProgram)
    weights = make_weights(residual_network())
    state = program.init(*weights)
    (rows,) = state.params.values()
    assert rows.shape[0] == 3
    sizes = [
        sum(p.size for name in part for p in jax.tree.leaves(weights[0].get(name, {})))
        for part in (
            [layer.name for layer in p] for p in split_layers(residual_network(), SPLITS)
        )
    ]
    assert rows.shape[1] == max(sizes) < sum(sizes)
    assert {shard.data.shape for shard in rows.addressable_shards} == {(1, max(sizes))}


@pytest.mark.devices(3)
def test_a_state_can_be_unpacked_and_placed_again():
    program = build_program(optimizer=optax.adam(0.1))
    state = program.init(*make_weights(residual_network()))
    whole = program.unpack_state(state)
    plain = build_program(optimizer=optax.adam(0.1), pipeline_splits=[])
    expected = plain.init(*make_weights(residual_network()))
    assert jax.tree.structure(whole) == jax.tree.structure(expected)
    assert largest_difference(whole, expected) == 0
    again = program.place_state(whole)
    assert largest_difference(again, state) == 0
    assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(
        lambda x: x.sharding, state
    )


@pytest.mark.devices(3)
def test_a_state_of_numpy_arrays_can_be_run_packed_or_not():
    """Also a state of a program without stages."""
    program, plain = build_program(), build_program(pipeline_splits=[])
    weights = make_weights(residual_network())
    forms = [
        program.init(*weights),
        jax.device_get(program.init(*weights)),
        jax.device_get(plain.init(*weights)),
        plain.init(*weights),
    ]
    chunk = make_chunk(program)
    first, *others = [program.unpack_state(program.run(form, chunk)[0]) for form in forms]
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.devices(3)
def test_a_pipelined_state_can_continue_without_a_pipeline():
    """One update with a pipeline and one without equal two without."""
    weights = make_weights(residual_network())
    pipelined, plain = build_program(), build_program(pipeline_splits=[])
    state, _ = pipelined.run(pipelined.init(*weights), make_chunk(pipelined))
    state = plain.place_state(pipelined.unpack_state(state))
    state, _ = plain.run(state, make_chunk(plain))
    other = plain.init(*weights)
    for _ in range(2):
        other, _ = plain.run(other, make_chunk(plain))
    assert largest_difference(state, jax.device_get(other)) < 1e-6


@pytest.mark.devices(3)
def test_random_keys_do_not_depend_on_the_schedule():
    """The network has dropout, so other keys would change the weights."""
    one = train(residual_network(), pipeline_splits=SPLITS, recomputation=True)
    other = train(
        residual_network(), pipeline_splits=["norm"], pipeline_schedule="sequential"
    )
    assert largest_difference(one, other) < 1e-5


def test_splits_minimize_the_cost_of_the_most_expensive_stage():
    layers = residual_network()
    costs = [1.0, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1]
    assert choose_splits(layers, costs, 3) == ["second", "norm"]
    assert choose_splits(layers, costs, 2) == ["second"]


@pytest.mark.devices(3)
def test_an_uneven_split_causes_a_warning_with_a_better_one(caplog):
    with caplog.at_level(logging.WARNING, "millrace"):
        build_program(pipeline_splits=["pool"], pipeline_schedule="sequential").init(
            *make_weights(residual_network())
        )
    assert "uneven" in caplog.text
    assert "--pipeline-splits" in caplog.text


def test_on_one_device_it_does_not_matter_how_even_stages_are(caplog):
    with caplog.at_level(logging.WARNING, "millrace"):
        program = build_program(
            pipeline_splits=["pool"], device_mapping=[0, 0], pipeline_schedule="sequential"
        )
        program.init(*make_weights(residual_network()))
    assert "uneven" not in caplog.text


@pytest.mark.devices(3)
def test_a_pipeline_can_be_profiled(tmp_path):
    from millrace.feeds.infeed import Infeed

    program = build_program()
    state = program.init(*make_weights(residual_network()))
    element = {
        "image": np.zeros((2, PIXELS, PIXELS, 3), np.float32),
        "label": np.zeros(2, np.int32),
    }
    with Infeed([element] * MICRO_BATCHES) as infeed:
        profile = profile_pipeline(program, state, infeed)
    assert isinstance(program, PipelineProgram)
    assert len(profile.measured) == sum(map(len, program.table.ticks))
    assert all(span.end > span.start for span in profile.measured)
    ended = {(s.kind, s.stage, s.micro_batch): s.end for s in profile.measured}
    for span in profile.measured:
        if span.kind == "forward" and span.stage:
            assert span.start >= ended["forward", span.stage - 1, span.micro_batch]
    assert 0 < profile.summary["measured_idle"] < 1
    draw_profile(profile, tmp_path / "pipeline.html", "a network")
    assert "measured" in (tmp_path / "pipeline.html").read_text()


@pytest.mark.devices(3)
def test_concurrent_stages_run_at_the_same_time():
    """Their branches sleep: one after the other, they could not overlap at all."""

    def sleep(x):
        time.sleep(0.05)
        return np.asarray(x)

    def wait(x):
        x = jax.lax.stop_gradient(x)  # sleeping has no gradient
        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    layers = [
        flatten("flat"),
        concurrent("both", [stateless("left", wait)], [stateless("right", wait)]),
        stateless("join", sum),
        dense("end", 5),
    ]
    program = build_program(
        layers,
        pipeline_splits=["both", "join"],
        device_mapping=[0, [1, 2], 0],
        pipeline_schedule="sequential",
    )
    assert isinstance(program, PipelineProgram)
    state = program.init(*make_weights(layers))
    spans = program.measure_spans(state, make_chunk(program))
    for micro_batch in range(MICRO_BATCHES):
        left, right = (
            next(s for s in spans if (s.stage, s.micro_batch) == (stage, micro_batch))
            for stage in (1, 2)
        )
        assert min(left.end, right.end) - max(left.start, right.start) > 0.02


def test_profiling_on_one_device_is_an_error():
    program = build_program(device_mapping=[0, 0, 0])
    with pytest.raises(ConfigurationError, match="all of its stages on one device"):
        profile_pipeline(program, None, None)
