"""Calls of the program: their lengths and data, and weights that do not depend on them."""

import time

import jax
import numpy as np
import pytest
from small_runner import batches, make_runner

import millrace as mr
from millrace.loop import pace as pace_module
from millrace.loop.pace import Pace
from millrace.loop.staging import Calls
from millrace.program import training_loop
from millrace.program.training_loop import TrainingProgram

# The length of calls


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(pace_module.time, "perf_counter", lambda: now[0])
    return now


def take(pace, clock, seconds_per_update, calls):
    """Make calls that take this time per update; return their lengths."""
    lengths = []
    for _ in range(calls):
        lengths.append(pace.updates)
        clock[0] += seconds_per_update * pace.updates
        pace.add(pace.updates)
    return lengths


def test_calls_grow_until_they_take_a_fifth_of_a_second(clock):
    pace = Pace()
    pace.start()
    assert take(pace, clock, 0.001, 6) == [1, 4, 16, 64, 200, 200]
    assert not pace.is_slow


def test_calls_shrink_when_updates_become_slower(clock):
    pace = Pace()
    pace.start()
    take(pace, clock, 0.001, 6)
    assert take(pace, clock, 0.1, 8)[-1] == 2


def test_slow_updates_are_made_and_awaited_one_by_one(clock):
    pace = Pace()
    pace.start()
    assert take(pace, clock, 3.0, 3) == [1, 1, 1]
    assert pace.is_slow


# Equal weights

VALUES = np.sin(np.arange(23)).tolist()


def run(path, *, by_parts=True, resume=False, updates=23, **options):
    """Train over 23 updates, a prime number; return the weight and all losses."""
    plan = mr.Plan(micro_batch_size=2, **options)
    runner, state, directory, checkpoints = make_runner(
        path, list(batches(VALUES)), updates=updates, plan=plan, logs=23, checkpoint=1
    )
    lengths = []
    if not by_parts:
        assert not runner._program.runs_parts
    call = runner._program.run

    def count(state, chunk, part=None):
        lengths.append(part[1] if part else jax.tree.leaves(chunk)[0].shape[0])
        return call(state, chunk, part)

    runner._program.run = count
    result = runner.run(state, resume=resume)
    checkpoints.close()
    weight = np.asarray(jax.device_get(result.state.params["w"]))
    losses = [event["train_loss"] for event in directory.read_metrics()]
    return weight, losses, lengths, len(runner._program._compiled)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    weight, losses, *_ = run(tmp_path_factory.mktemp("fixed") / "r")
    return weight, losses


@pytest.mark.cpu("a GPU has programs for fixed numbers of updates")
def test_one_program_serves_calls_of_all_lengths(expected, tmp_path, monkeypatch):
    monkeypatch.setattr(training_loop, "_STAGED_BYTES", 4 * 5 * 8)  # five batches
    weight, losses, lengths, num_programs = run(tmp_path / "r")
    assert (weight, losses) == expected
    assert sum(lengths) == 23 and len(set(lengths)) > 1
    assert num_programs == 1


def test_without_parts_the_program_is_compiled_for_the_rest_too(
    expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(TrainingProgram, "runs_parts", False)
    monkeypatch.setattr(training_loop, "_STAGED_BYTES", 5 * 8)
    weight, losses, lengths, num_programs = run(tmp_path / "r", by_parts=False)
    np.testing.assert_allclose(weight, expected[0], rtol=1e-6)
    np.testing.assert_allclose(losses, expected[1], rtol=1e-6)
    assert lengths == [5, 5, 5, 5, 3]
    assert num_programs == 2


def test_a_given_length_of_executions_is_kept(tmp_path):
    plan = mr.Plan(micro_batch_size=2, updates_per_execution=4)
    program = mr.training_program(_loss, _sgd(), plan)
    infeed = mr.Infeed(list(batches(range(12))))
    calls = Calls(program, infeed, execution=4, total=12, fixed=True)
    state = program.init({"w": np.ones(1, np.float32)})
    calls.compile(state)
    lengths, done = [], 0
    while done < 12:
        state, call = calls.run(state, calls.next_chunk(), done, 12 - done)
        lengths.append((call.updates, call.ends_execution))
        done += call.updates
    infeed.close()
    assert lengths == [(4, True)] * 3


def test_a_run_resumed_inside_an_execution_finishes_it_first(monkeypatch):
    monkeypatch.setattr(TrainingProgram, "runs_parts", False)
    program = mr.training_program(_loss, _sgd(), mr.Plan(micro_batch_size=2))
    infeed = mr.Infeed(list(batches(range(20))))
    calls = Calls(program, infeed, execution=8, total=24)
    state = program.init({"w": np.ones(1, np.float32)})
    calls.compile(state, done=5)
    lengths, done = [], 5
    while done < 24:
        state, call = calls.run(state, calls.next_chunk(), done, 24 - done)
        lengths.append(call.updates)
        done += call.updates
    infeed.close()
    assert lengths == [3, 8, 8]


@pytest.mark.parametrize(("seconds", "length"), [(0.5, 1), (1e-4, 2000), (0.01, 32)])
def test_a_program_for_one_length_is_compiled_again_only_if_that_pays(
    seconds, length, monkeypatch
):
    monkeypatch.setattr(TrainingProgram, "runs_parts", False)
    program = mr.training_program(_loss, _sgd(), mr.Plan(micro_batch_size=2))
    program.compile_seconds = 2.0
    calls = Calls(program, mr.Infeed([]), execution=6400, total=640_000)
    calls._sizes = (32,) * 200
    calls.pace._per_update = seconds
    assert calls._find_length(128) == length
    # Near the end it is not worth it, unless calls are far too long.
    assert calls._find_length(639_000) == (1 if seconds == 0.5 else 32)


# Slow data


@pytest.mark.cpu("a GPU has programs for fixed numbers of updates")
def test_a_slow_dataset_does_not_hold_up_the_updates_it_has_data_for(tmp_path):
    times = []

    def slow():
        for batch in batches(range(12)):
            time.sleep(0.05)
            yield batch

    runner, state, _, checkpoints = make_runner(tmp_path / "r", slow(), logs=12)
    drain = runner._drain
    runner._drain = lambda: (drain(), times.append(time.perf_counter()))
    runner.run(state)
    checkpoints.close()
    assert len(times) >= 4  # and not one call with all data


def _loss(params, model_state, batch, key):
    return ((batch * params["w"] - 1.0) ** 2).mean(), (model_state, {})


def _sgd():
    import optax

    return optax.sgd(0.01)
