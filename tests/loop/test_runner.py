"""The runner meets bad data: each failure is named, with the update it happened at."""

import errno
import json
import os
import shutil
import signal
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runner import batches, loss_fn, make_runner

import millrace as mr
from millrace.checkpoint import arrays
from millrace.checkpoint.manifest import _checksum_of
from millrace.checkpoint.store import NOT_OF_A_RUN, CheckpointError, read_manifest
from millrace.loop.nan_guard import NonFiniteCheck, NonFiniteError
from millrace.loop.runner import _SavedProgress


def test_events_hold_means_since_the_last_and_the_newest_of_what_is_watched(tmp_path):
    runner, state, directory, checkpoints = make_runner(tmp_path / "r", batches(range(12)))
    result = runner.run(state)
    checkpoints.close()
    events = directory.read_metrics()
    assert [event["update"] for event in events] == [3, 6, 9, 12]
    np.testing.assert_allclose([event["train_seen"] for event in events], [1, 4, 7, 10])
    assert [event["rate"] for event in events] == [20, 50, 80, 110]
    assert [event["epoch"] for event in events] == [0.25, 0.5, 0.75, 1.0]
    assert (result.updates, result.interrupted) == (12, False)
    assert result.metrics["train_seen"] == 10


def test_validation_and_checkpoints_happen_when_due_and_at_the_end(tmp_path):
    asked = []

    def validate(state):
        asked.append(int(state.update))
        return {"accuracy": len(asked) / 10}

    runner, state, _directory, checkpoints = make_runner(
        tmp_path / "r", batches(range(12)), validate=validate, checkpoint=2, logs=1
    )
    result = runner.run(state)
    checkpoints.close()
    assert asked == [12]  # no rate for it: only at the end
    assert [path.name for path in checkpoints.saved()] == [
        "update-000000006",
        "update-000000012",
    ]
    assert result.metrics["validation_accuracy"] == 0.1
    manifest = json.loads((checkpoints.saved()[-1] / "manifest.json").read_text())
    assert (manifest["data_position"], manifest["update"]) == (12, 12)
    assert manifest["metrics"]["validation_accuracy"] == 0.1


def test_a_nan_in_the_data_is_named_with_its_update_and_training_goes_on(tmp_path, capsys):
    values = [1.0, 1.0, 1.0, 1.0, np.nan, *[1.0] * 7]
    runner, state, _, checkpoints = make_runner(tmp_path / "r", batches(values))
    result = runner.run(state)
    checkpoints.close()
    assert result.updates == 12
    message = capsys.readouterr().err
    assert "The loss is nan at update 5 (epoch 0.42)" in " ".join(message.split())
    assert message.count("The loss is nan") == 1


def test_fp_exceptions_stop_at_the_first_and_save_nothing_after_it(tmp_path):
    values = [1.0, 1.0, 1.0, 1.0, np.nan, *[1.0] * 7]
    plan = mr.Plan(micro_batch_size=2, fp_exceptions=True)
    runner, state, directory, checkpoints = make_runner(
        tmp_path / "r", batches(values), plan=plan, checkpoint=4
    )
    with pytest.raises(NonFiniteError, match="The loss is nan at update 5"):
        runner.run(state)
    checkpoints.close()
    assert [path.name for path in checkpoints.saved()] == ["update-000000003"]
    assert [event["update"] for event in directory.read_metrics()] == [3]


def test_a_loss_that_stays_lost_stops_a_run_that_is_told_to():
    plan = mr.Plan(micro_batch_size=2)
    watch = NonFiniteCheck(plan, 10, 100, stops_diverged=True)
    watch.check({"loss": np.array([1.0, np.nan, 1.0])})  # it was one bad batch
    with pytest.raises(
        NonFiniteError, match=r"inf at update 15 \(epoch 0.15\): .* diverged"
    ):
        watch.check({"loss": np.array([1.0, np.inf, np.nan])})


def test_in_float16_a_lost_run_is_told_of_dynamic_loss_scaling():
    plan = mr.Plan(precision="16.32", half_type="float16", loss_scaling=1000.0)
    watch = NonFiniteCheck(plan, 0, stops_diverged=True)
    with pytest.raises(NonFiniteError, match="or with loss_scaling dynamic"):
        watch.check({"loss": np.array([np.nan])})


def test_dynamic_loss_scaling_may_skip_some_updates_before_a_run_is_lost():
    plan = mr.Plan(precision="16.32", half_type="float16", loss_scaling="dynamic")
    watch = NonFiniteCheck(plan, 0, stops_diverged=True)
    bad = np.full(12, np.nan)
    watch.check({"loss": bad})
    watch.check({"loss": bad})
    with pytest.raises(NonFiniteError, match=r"has diverged\. .* learning rate\.$"):
        watch.check({"loss": np.array([np.nan])})
    watch.check({"loss": np.append(bad, 1.0)})
    watch.check({"loss": bad})


def test_fp_exceptions_see_a_gradient_that_the_loss_does_not_show(tmp_path):
    def hidden(params, model_state, batch, key):
        # sqrt(0) is 0, its slope is infinite
        return jnp.sqrt(params["w"] * 0.0).sum(), (model_state, {})

    plan = mr.Plan(micro_batch_size=2, fp_exceptions=True)
    runner, _, _, checkpoints = make_runner(tmp_path / "r", batches([1.0] * 12), plan=plan)
    program = mr.training_program(hidden, optax.sgd(0.1), plan)
    runner._program = program
    with pytest.raises(NonFiniteError, match="A gradient is not finite at update 1"):
        runner.run(program.init({"w": jnp.ones(1)}))
    checkpoints.close()


def test_a_dataset_that_fails_in_the_middle_surfaces_as_itself(tmp_path):
    def failing():
        yield from batches(range(7))
        raise OSError("cannot read shard 3")

    runner, state, directory, checkpoints = make_runner(tmp_path / "r", failing())
    with pytest.raises(OSError, match="cannot read shard 3"):
        runner.run(state)
    checkpoints.close()
    assert [event["update"] for event in directory.read_metrics()] == [3, 6]


def test_time_spent_waiting_for_the_first_batch_is_not_called_compiling(tmp_path):
    def slow():
        time.sleep(0.3)
        yield from batches(range(12))

    runner, state, _, checkpoints = make_runner(tmp_path / "r", slow())
    runner.run(state)
    checkpoints.close()
    phases = {phase.name: phase.end - phase.start for phase in runner._console.phases}
    assert phases["waiting for the first data"] >= 0.25


def test_a_dataset_that_ends_early_says_after_how_many_elements(tmp_path):
    runner, state, _, checkpoints = make_runner(tmp_path / "r", batches(range(7)))
    with pytest.raises(mr.DatasetEnded, match="ended after 7 elements"):
        runner.run(state)
    checkpoints.close()


@pytest.mark.parametrize("odd", [np.zeros(3, np.float32), np.zeros(2, np.float16)])
def test_an_element_of_another_shape_or_type_is_named(odd, tmp_path):
    data = [*batches(range(7)), odd]
    runner, state, _, checkpoints = make_runner(tmp_path / "r", data)
    with pytest.raises(mr.ElementError, match="Element 7 of the dataset"):
        runner.run(state)
    checkpoints.close()


def test_a_prime_number_of_updates_is_run_in_calls_of_two_lengths(tmp_path, monkeypatch):
    from millrace.program import training_loop

    monkeypatch.setattr(training_loop, "_STAGED_BYTES", 3 * 8)  # three batches
    runner, state, directory, checkpoints = make_runner(
        tmp_path / "r", batches(range(13)), updates=13, logs=1
    )
    result = runner.run(state)
    checkpoints.close()
    assert len(runner._program._compiled) == 2
    assert directory.read_metrics()[-1]["train_seen"] == pytest.approx(6)
    assert result.updates == 13


def test_train_is_the_runner_without_a_directory():
    outfeed = mr.Outfeed()
    program = mr.training_program(loss_fn, optax.sgd(0.01), mr.Plan(micro_batch_size=2))
    state = program.init({"w": jnp.ones(1)})
    with mr.Infeed(batches(range(50))) as infeed:
        state = mr.train(program, state, infeed=infeed, updates=20, outfeed=outfeed)
        state = mr.train(program, state, infeed=infeed, updates=7, outfeed=outfeed)
        assert infeed.position == 27
    assert int(state.update) == 27
    np.testing.assert_array_equal(outfeed.dequeue()["seen"], np.arange(27))
    with pytest.raises(ValueError, match="updates must not be negative"):
        mr.train(program, state, infeed=infeed, updates=-1)
    with pytest.raises(TypeError, match=r"Wrap the dataset: Infeed\(dataset\)"):
        mr.train(program, state, infeed=[1], updates=1)


def test_the_best_checkpoint_is_the_best_of_those_that_were_validated(tmp_path):
    scores = iter([0.5, 0.9, 0.6])
    runner, state, _, checkpoints = make_runner(
        tmp_path / "r",
        batches(range(12)),
        validate=lambda state: {"accuracy": next(scores)},
        logs=1,
        checkpoint=2,
        validations=3,
    )
    checkpoints._better = lambda new, old: (
        new["validation_accuracy"] > old["validation_accuracy"]
    )
    runner.run(state)
    checkpoints.close()
    # Validated after 4, 8 and 12; saved after 6 and 12: the 0.5 is not update 6's.
    assert checkpoints.best().name == "update-000000012"


def test_a_checkpoint_keeps_the_metrics_of_its_own_moment(tmp_path):
    numbers = iter(range(1, 100))
    runner, state, _, checkpoints = make_runner(
        tmp_path / "r",
        batches(range(12)),
        validate=lambda state: {"number": float(next(numbers))},
        checkpoint=12,
        logs=12,
        validations=12,
    )
    checkpoints._keep = 100
    runner.run(state)
    checkpoints.close()
    for path in checkpoints.saved():
        manifest = json.loads((path / "manifest.json").read_text())
        assert manifest["metrics"]["validation_number"] == manifest["update"]


def test_a_resumed_run_logs_the_means_of_the_whole_interval(tmp_path):
    whole, state, _, checkpoints = make_runner(
        tmp_path / "whole", list(batches(range(12))), logs=1, checkpoint=4
    )
    expected = whole.run(state).metrics
    checkpoints.close()
    shutil.rmtree(tmp_path / "whole" / "checkpoints" / "update-000000012")
    again, state, _, checkpoints = make_runner(
        tmp_path / "whole", list(batches(range(12))), logs=1, checkpoint=4
    )
    assert again.run(state, resume=True).metrics == expected
    checkpoints.close()


def test_a_nan_is_named_under_dynamic_loss_scaling_too(tmp_path, capsys):
    plan = mr.Plan(
        micro_batch_size=2, precision="16.32", half_type="float16", loss_scaling="dynamic"
    )
    runner, state, _, checkpoints = make_runner(
        tmp_path / "r", batches([np.nan] * 12), plan=plan
    )
    runner.run(state)
    checkpoints.close()
    assert "The loss is nan at update 1" in " ".join(capsys.readouterr().err.split())


def test_train_stops_at_the_first_nan_if_asked_to():
    plan = mr.Plan(micro_batch_size=2, fp_exceptions=True)
    program = mr.training_program(loss_fn, optax.sgd(0.01), plan)
    values = [1.0, 1.0, np.nan, *[1.0] * 9]
    with (
        mr.Infeed(batches(values)) as infeed,
        pytest.raises(NonFiniteError, match="The loss is nan at update 3;"),
    ):
        mr.train(program, program.init({"w": jnp.ones(1)}), infeed=infeed, updates=12)


@pytest.mark.devices(8)
def test_train_may_be_called_again_and_again_on_replicas():
    """Calls that were never awaited would deadlock after the thirty-second."""
    plan = mr.Plan(micro_batch_size=1, num_replicas=8)
    program = mr.training_program(loss_fn, optax.sgd(0.01), plan)
    state = program.init({"w": jnp.ones(1)})
    data = [np.ones(8, np.float32)] * 120
    with mr.Infeed(data) as infeed:
        for _ in range(120):
            state = mr.train(program, state, infeed=infeed, updates=1)
    assert int(state.update) == 120


# Stopping


def test_the_first_signal_saves_and_stops_after_the_execution(tmp_path, capsys):
    def validate(state):
        signal.raise_signal(signal.SIGINT)
        return {}

    runner, state, _, checkpoints = make_runner(
        tmp_path / "r", batches(range(12)), validate=validate, validations=4
    )
    result = runner.run(state)
    checkpoints.close()
    assert result.interrupted
    assert [path.name for path in checkpoints.saved()] == ["update-000000003"]
    assert "SIGINT: finishing the current execution" in capsys.readouterr().err


def test_a_second_signal_stops_at_once(tmp_path):
    reached = []

    def validate(state):
        signal.raise_signal(signal.SIGINT)
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
        return {}

    runner, state, _, checkpoints = make_runner(
        tmp_path / "r", batches(range(12)), validate=validate, validations=4
    )
    with pytest.raises(KeyboardInterrupt):
        runner.run(state)
    checkpoints.close()
    assert reached == ["after the first"]
    assert checkpoints.saved() == []


# The end of saving


def delayed(monkeypatch, seconds):
    write = arrays.orbax_save

    def write_late(path, state):
        time.sleep(seconds)
        write(path, state)

    monkeypatch.setattr(arrays, "orbax_save", write_late)


def test_a_run_returns_when_its_last_checkpoint_is_there(tmp_path, monkeypatch):
    delayed(monkeypatch, 0.3)
    runner, state, _, checkpoints = make_runner(tmp_path / "r", list(batches(range(12))))
    runner.run(state)
    assert [path.name for path in checkpoints.saved()] == ["update-000000012"]
    again, state, _, others = make_runner(tmp_path / "r", list(batches(range(12))))
    assert again.run(state, resume=True).updates == 12
    checkpoints.close()
    others.close()


def test_a_run_that_fails_leaves_nothing_being_written(tmp_path, monkeypatch):
    delayed(monkeypatch, 0.3)
    runner, state, _, checkpoints = make_runner(
        tmp_path / "r", batches(range(7)), checkpoint=2
    )
    with pytest.raises(mr.DatasetEnded):
        runner.run(state)
    assert [path.name for path in checkpoints.saved()] == ["update-000000006"]
    checkpoints.close()


def test_a_checkpoint_that_cannot_be_written_at_the_end_fails_the_run(
    tmp_path, monkeypatch
):
    def full(path, state):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(arrays, "orbax_save", full)
    runner, state, _, checkpoints = make_runner(tmp_path / "r", batches(range(12)))
    with pytest.raises(CheckpointError, match=r"after update 12 .*No space left"):
        runner.run(state)
    checkpoints.close()


# Resuming from what is not as it was


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    path = tmp_path_factory.mktemp("ended") / "r"
    runner, state, _, checkpoints = make_runner(
        path, list(batches(range(12))), checkpoint=4
    )
    runner.run(state)
    checkpoints.close()
    return path


@pytest.fixture
def stopped(ended, tmp_path):
    """A run that ended after 9 of 12 updates, with checkpoints after 6 and 9."""
    shutil.copytree(ended, tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "update-000000012")
    return tmp_path / "r"


def resume(path) -> list[dict]:
    runner, state, directory, checkpoints = make_runner(
        path, list(batches(range(12))), checkpoint=4
    )
    assert runner.run(state, resume=True).updates == 12
    checkpoints.close()
    return directory.read_metrics()


def said(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_a_resume_from_what_is_as_it_was_warns_of_nothing(stopped, capsys):
    events = resume(stopped)
    assert [event["update"] for event in events] == [3, 6, 9, 12]
    assert said(capsys) == ""


def not_text(path) -> None:
    path.write_bytes(path.read_bytes().replace(b"seen", b"s\xffen", 1))


def no_event(path) -> None:
    _, rest = path.read_text().split("\n", 1)
    path.write_text("[]\n{}\n" + rest)


@pytest.mark.parametrize(
    ("damage", "left"),
    [(lambda path: path.write_text(""), 0), (not_text, 2), (no_event, 2)],
    ids=["emptied", "not text", "no event"],
)
def test_lost_log_events_are_reported_and_the_run_resumes(stopped, damage, left, capsys):
    damage(stopped / "metrics.jsonl")
    events = resume(stopped)
    assert [event["update"] for event in events] == [*[3, 6, 9][3 - left :], 12]
    warned = f"metrics.jsonl has only {left} of the 3 log events up to update 9"
    assert f"warning: {warned}" in said(capsys)


def test_a_manifest_that_does_not_say_how_far_a_run_had_come_is_set_aside(stopped, capsys):
    path = stopped / "checkpoints" / "update-000000009" / "manifest.json"
    manifest = json.loads(path.read_text()) | {"metrics": None}
    manifest.pop("checksum")
    manifest["checksum"] = _checksum_of(manifest)
    path.write_text(json.dumps(manifest))
    events = resume(stopped)
    assert [event["update"] for event in events] == [3, 6, 9, 12]
    message = said(capsys)
    assert "update-000000009 is damaged" in message
    assert "It is set aside for an older one." in message


@pytest.mark.parametrize(
    "change",
    [
        *({"data_position": x} for x in (None, "9", -9, 1.5, ...)),
        *({"time": x} for x in (None, "soon", [], ...)),
        *({"metrics": x} for x in (None, [], {"a": None}, {"a": "text"}, ...)),
        *({"scores": x} for x in (5, {"a": []}, ...)),
        *({"since_log": x} for x in (None, {}, {"sums": {}, "newest": [], "updates": 1})),
        {"samples_per_element": "2"},
        {"num_events": None},
    ],
    ids=str,
)
def test_odd_progress_in_a_manifest_is_an_error_that_counts_as_damage(ended, change):
    manifest = read_manifest(ended / "checkpoints" / "update-000000009")
    assert _SavedProgress.read(manifest).data_position == 9
    changed = {n: v for n, v in (manifest | change).items() if v is not ...}
    with pytest.raises(NOT_OF_A_RUN):
        _SavedProgress.read(changed)


def test_a_run_with_random_keys_and_empty_arrays_in_its_state_resumes_exactly(tmp_path):
    class Noise(NamedTuple):
        key: jax.Array
        nothing: jax.Array

    def init(params):
        return Noise(jax.random.key(7), jnp.zeros((0, 3)))

    def update(updates, state, params=None):
        key, use = jax.random.split(state.key)
        noisy = jax.tree.map(lambda u: u + jax.random.normal(use, u.shape), updates)
        return noisy, state._replace(key=key)

    optimizer = optax.chain(optax.GradientTransformation(init, update), optax.sgd(0.01))

    def run(path, *, resumes=False):
        runner, _, _, checkpoints = make_runner(
            path, list(batches(range(12))), checkpoint=2
        )
        program = mr.training_program(loss_fn, optimizer, mr.Plan(micro_batch_size=2))
        runner._program = program
        result = runner.run(program.init({"w": jnp.ones(1)}), resume=resumes)
        checkpoints.close()
        return result.state.params["w"]

    expected = run(tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "update-000000012")
    np.testing.assert_array_equal(run(tmp_path / "r", resumes=True), expected)
