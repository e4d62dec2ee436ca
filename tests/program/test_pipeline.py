"""What a pipeline promises besides equal weights: errors, exchange, keys, its state."""

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
    loss_of,
    make_weights,
    residual_network,
    train,
)

from millrace.config import ConfigurationError
from millrace.nn.layers import concurrent, dense, flatten, stateless
from millrace.plan import Plan
from millrace.program.pipeline_program import PipelineProgram
from millrace.program.stages import choose_splits, cut
from millrace.program.training import TrainingProgram, training_program
from millrace.run.pipeline_profile import draw_profile, profile_pipeline


def program_of(layers=None, optimizer=None, devices=None, **plan) -> TrainingProgram:
    given = {
        "micro_batch_size": 2,
        "gradient_accumulation_count": MICRO_BATCHES,
        "pipeline_splits": SPLITS,
    } | plan
    loss = loss_of(layers or residual_network())
    optimizer = optimizer or optax.sgd(0.1, 0.9)
    return training_program(loss, optimizer, Plan(**given), devices=devices)


def chunk_for(program: TrainingProgram, updates: int = 1) -> dict[str, jax.Array]:
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
        ({"pipeline_splits": ["second", "block_norm"]}, "order: block_norm second"),
        ({"pipeline_splits": [12]}, "12 stages; the model has only 11 layers"),
        ({"gradient_accumulation_count": 8}, "multiple of 6 .*Use 6 or 12"),
        ({"device_mapping": [0, 2, 0]}, "skips device 1"),
        ({"device_mapping": [0, [1, 2], 0]}, "which has a single stage"),
        ({"num_replicas": 4}, "4 replicas of 3 pipeline devices need 12, but .* only 8"),
    ],
)
def test_a_mistake_in_the_plan_fails_before_anything_is_compiled(plan, message):
    with pytest.raises(ConfigurationError, match=message):
        program_of(**plan).init(*make_weights(residual_network()))


@pytest.mark.devices(lambda num_devices: num_devices)
@pytest.mark.parametrize(
    ("num_devices", "num_replicas", "mapping"),
    [(1, 1, "0 0 0"), (2, 1, "0 0 1"), (5, 2, "0 0 1"), (1, 2, None)],
)
def test_too_few_devices_name_a_mapping_that_they_are_enough_for(
    num_devices, num_replicas, mapping
):
    devices = jax.devices()[:num_devices]
    with pytest.raises(ConfigurationError, match="pipeline devices need") as refused:
        program_of(devices=devices, num_replicas=num_replicas)
    advised = re.findall(r"--device-mapping ([\d ]+) \(", str(refused.value))
    assert advised == ([mapping] if mapping else [])
    if mapping:
        plan = {"device_mapping": [int(number) for number in mapping.split()]}
        program = program_of(devices=devices, num_replicas=num_replicas, **plan)
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
def test_a_plan_refuses_splits_that_fit_no_model(plan, message):
    with pytest.raises(ValueError, match=message):
        Plan(**{"pipeline_splits": SPLITS, **plan})


def test_a_loss_without_known_layers_is_refused():
    with pytest.raises(ConfigurationError, match="LayeredLoss, not function"):
        training_program(
            lambda params, model_state, batch, key: None,
            optax.sgd(0.1),
            Plan(pipeline_splits=["a"], pipeline_schedule="sequential"),
        )


def swapped(tree):
    """Give each of two layers of equal shapes what belongs to the other."""
    return tree | {"one": tree["two"], "two": tree["one"]}


def swap_gradients():
    return optax.stateless(lambda gradients, _: swapped(gradients))


def swap_in_state():
    """Each weight's velocity is that of the other layer: layers mix in state alone."""
    inner = optax.sgd(0.1, 0.9)

    def update(gradients, state, params):
        updates, state = inner.update(gradients, state, params)
        return updates, jax.tree.map(swapped, state, is_leaf=lambda x: isinstance(x, dict))

    return optax.GradientTransformation(inner.init, update)


@pytest.mark.devices(2)
@pytest.mark.parametrize("optimizer", [swap_gradients, swap_in_state])
def test_an_optimizer_that_combines_whole_arrays_is_refused(optimizer):
    layers = [flatten("flat"), *(dense(n, 40) for n in ("wide", "one", "two", "end"))]
    splits = {"pipeline_splits": ["two"], "pipeline_schedule": "interleaved"}
    with pytest.raises(ConfigurationError, match="whole arrays of the layers") as refused:
        program_of(layers, optimizer(), **splits).init(*make_weights(layers))
    assert {"one", "two"} <= set(re.findall(r"\w+", str(refused.value)))
    assert "Keep both layers on one device (device_mapping)" in str(refused.value)
    # As the message advises.
    program_of(layers, optimizer(), **splits, device_mapping=[0, 0]).init(
        *make_weights(layers)
    )


@pytest.mark.devices(2)
def test_clipping_by_the_global_norm_takes_one_small_exchange_per_update():
    layers = [flatten("flat"), dense("one", 8), dense("two", 8), dense("end", 5)]
    splits = {"pipeline_splits": ["two"], "pipeline_schedule": "interleaved"}
    counts = []
    for clipping in (optax.identity(), optax.clip_by_global_norm(1.0)):
        optimizer = optax.chain(clipping, optax.sgd(0.1, 0.9))
        program = program_of(layers, optimizer, **splits)
        state = program.init(*make_weights(layers))
        program.compile(state, chunk_for(program, 2))
        (text,) = program._compiled.values()
        found = operations_by_loop_depth(text, "all-reduce|all-reduce-start")
        assert set(found) == {1}  # the loop over updates, not the one over ticks
        counts.append(found[1])
    # XLA may combine it with the exchange of the loss.
    assert counts[0] <= counts[1] <= counts[0] + 1
    assert not operations_by_loop_depth(text, "all-gather|all-to-all")


@pytest.mark.devices(3)
def test_branches_cannot_be_spread_over_devices_at_the_end():
    layers = branched_network()[:2]
    program = program_of(
        layers, pipeline_splits=["branches"], pipeline_schedule="sequential"
    )
    with pytest.raises(ConfigurationError, match="branches, has the loss"):
        program.init(*make_weights(layers))


@pytest.mark.devices(3)
def test_whole_numbers_cannot_cross_between_stages():
    layers = residual_network()
    rounding = stateless("whole", lambda x: x.astype(np.int32))
    back = stateless("back", lambda x: x.astype(np.float32))
    layers[6:6] = [rounding, back]
    program = program_of(layers, pipeline_splits=["back"], pipeline_schedule="sequential")
    state = program.init(*make_weights(layers))
    with pytest.raises(ConfigurationError, match="whole passes on has int32 values"):
        program.compile(state, chunk_for(program))


@pytest.mark.devices(3)
def test_a_stage_that_raises_surfaces_its_own_error():
    def fail(x):
        if x.shape[0] > 1:  # not when the weights are made, with one sample
            raise ZeroDivisionError("mine")
        return x

    layers = [*residual_network()[:-1], stateless("bad", fail), dense("end", 5)]
    program = program_of(layers)
    weights = make_weights(residual_network())
    params = {n: v for n, v in weights[0].items() if n != "classes"}
    ends = {"end": weights[0]["classes"]}
    with pytest.raises(ZeroDivisionError, match="mine"):
        state = program.init(params | ends, weights[1])
        program.compile(state, chunk_for(program))


@pytest.fixture(scope="module")
def compiled():
    program = program_of(num_replicas=2, pipeline_schedule="interleaved")
    state = program.init(*make_weights(residual_network()))
    program.compile(state, chunk_for(program, 2))  # a loop of one would be unrolled
    (text,) = program._compiled.values()
    return text


@pytest.mark.devices(6)
def test_gradients_cross_replicas_once_per_update(compiled):
    """Depth 1 is the loop over updates, depth 2 the one over ticks."""
    found = operations_by_loop_depth(compiled, "all-reduce|all-reduce-start")
    assert set(found) == {1}


@pytest.mark.devices(6)
def test_only_neighbors_exchange_at_each_tick(compiled):
    found = operations_by_loop_depth(
        compiled, "collective-permute|collective-permute-start"
    )
    assert dict(found) == {2: 2}  # forwards and backwards
    assert not operations_by_loop_depth(compiled, "all-gather|all-to-all")


@pytest.mark.devices(3)
def test_a_device_holds_only_its_own_stages():
    program = program_of()
    assert isinstance(program, PipelineProgram)
    weights = make_weights(residual_network())
    state = program.init(*weights)
    (rows,) = state.params.values()
    assert rows.shape[0] == 3
    sizes = [
        sum(p.size for name in part for p in jax.tree.leaves(weights[0].get(name, {})))
        for part in ([layer.name for layer in p] for p in cut(residual_network(), SPLITS))
    ]
    assert rows.shape[1] == max(sizes) < sum(sizes)
    assert {shard.data.shape for shard in rows.addressable_shards} == {(1, max(sizes))}


@pytest.mark.devices(3)
def test_a_state_can_be_unpacked_and_placed_again():
    program = program_of(optimizer=optax.adam(0.1))
    state = program.init(*make_weights(residual_network()))
    whole = program.unpack_state(state)
    plain = program_of(optimizer=optax.adam(0.1), pipeline_splits=[])
    expected = plain.init(*make_weights(residual_network()))
    assert jax.tree.structure(whole) == jax.tree.structure(expected)
    assert largest_difference(whole, expected) == 0
    again = program.place(whole)
    assert largest_difference(again, state) == 0
    assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(
        lambda x: x.sharding, state
    )


@pytest.mark.devices(3)
def test_a_state_of_numpy_arrays_can_be_run_packed_or_whole():
    """As ``jax.device_get`` gives it; also a whole state of a program without stages."""
    program, plain = program_of(), program_of(pipeline_splits=[])
    weights = make_weights(residual_network())
    forms = [
        program.init(*weights),
        jax.device_get(program.init(*weights)),
        jax.device_get(plain.init(*weights)),
        plain.init(*weights),
    ]
    chunk = chunk_for(program)
    first, *others = [program.unpack_state(program.run(form, chunk)[0]) for form in forms]
    for other in others:
        assert largest_difference(first, other) == 0


@pytest.mark.devices(3)
def test_a_pipelined_state_goes_on_without_a_pipeline():
    """Half the updates in each way are all the updates in one."""
    weights = make_weights(residual_network())
    pipelined, plain = program_of(), program_of(pipeline_splits=[])
    state, _ = pipelined.run(pipelined.init(*weights), chunk_for(pipelined))
    state = plain.place(pipelined.unpack_state(state))
    state, _ = plain.run(state, chunk_for(plain))
    other = plain.init(*weights)
    for _ in range(2):
        other, _ = plain.run(other, chunk_for(plain))
    assert largest_difference(state, jax.device_get(other)) < 1e-6


@pytest.mark.devices(3)
def test_random_keys_do_not_depend_on_the_schedule():
    """The network drops values at random; another seed shows that this matters."""
    one = train(residual_network(), pipeline_splits=SPLITS, recomputation=True)
    other = train(
        residual_network(), pipeline_splits=["norm"], pipeline_schedule="sequential"
    )
    assert largest_difference(one, other) < 1e-5


def test_stages_are_chosen_so_that_the_dearest_is_cheapest():
    layers = residual_network()
    costs = [1.0, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1]
    assert choose_splits(layers, costs, 3) == ["second", "norm"]
    assert choose_splits(layers, costs, 2) == ["second"]


@pytest.mark.devices(3)
def test_an_uneven_split_is_told_of_a_better_one(caplog):
    with caplog.at_level(logging.WARNING, "millrace"):
        program_of(pipeline_splits=["pool"], pipeline_schedule="sequential").init(
            *make_weights(residual_network())
        )
    assert "uneven" in caplog.text
    assert "--pipeline-splits" in caplog.text


@pytest.mark.devices(3)
def test_a_pipeline_can_be_watched(tmp_path):
    from millrace.feeds.infeed import Infeed

    program = program_of()
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
def test_concurrent_stages_work_side_by_side():
    """Their branches sleep: serially the two could not overlap at all."""

    def sleep(x):
        time.sleep(0.05)
        return np.asarray(x)

    def wait(x):
        x = jax.lax.stop_gradient(x)  # a sleep has none
        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    layers = [
        flatten("flat"),
        concurrent("both", [stateless("left", wait)], [stateless("right", wait)]),
        stateless("join", sum),
        dense("end", 5),
    ]
    program = program_of(
        layers,
        pipeline_splits=["both", "join"],
        device_mapping=[0, [1, 2], 0],
        pipeline_schedule="sequential",
    )
    assert isinstance(program, PipelineProgram)
    state = program.init(*make_weights(layers))
    spans = program.measured(state, chunk_for(program))
    for micro_batch in range(MICRO_BATCHES):
        left, right = (
            next(s for s in spans if (s.stage, s.micro_batch) == (stage, micro_batch))
            for stage in (1, 2)
        )
        assert min(left.end, right.end) - max(left.start, right.start) > 0.02


def test_nothing_is_to_be_watched_on_one_device():
    program = program_of(device_mapping=[0, 0, 0])
    with pytest.raises(ConfigurationError, match="all of its stages on one device"):
        profile_pipeline(program, None, None)
