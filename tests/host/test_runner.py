"""The runner meets bad data: each failure is named, with the update it happened at."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runner import batches, loss_fn, make_runner

import millrace as mr
from millrace.host.finite import FiniteWatch, NotFinite


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
    with pytest.raises(NotFinite, match="The loss is nan at update 5"):
        runner.run(state)
    checkpoints.close()
    assert [path.name for path in checkpoints.saved()] == ["update-000000003"]
    assert [event["update"] for event in directory.read_metrics()] == [3]


def test_a_loss_that_stays_lost_stops_a_run_that_is_told_to():
    plan = mr.Plan(micro_batch_size=2)
    watch = FiniteWatch(plan, 10, 100, stops_diverged=True)
    watch.check({"loss": np.array([1.0, np.nan, 1.0])})  # it was one bad batch
    with pytest.raises(NotFinite, match=r"inf at update 15 \(epoch 0.15\): .* diverged"):
        watch.check({"loss": np.array([1.0, np.inf, np.nan])})


def test_in_float16_a_lost_run_is_told_of_dynamic_loss_scaling():
    plan = mr.Plan(precision="16.32", half_type="float16", loss_scaling=1000.0)
    watch = FiniteWatch(plan, 0, stops_diverged=True)
    with pytest.raises(NotFinite, match="or with loss_scaling dynamic"):
        watch.check({"loss": np.array([np.nan])})


def test_dynamic_loss_scaling_may_skip_some_updates_before_a_run_is_lost():
    plan = mr.Plan(precision="16.32", half_type="float16", loss_scaling="dynamic")
    watch = FiniteWatch(plan, 0, stops_diverged=True)
    bad = np.full(12, np.nan)
    watch.check({"loss": bad})
    watch.check({"loss": bad})
    with pytest.raises(NotFinite, match=r"has diverged\. .* learning rate\.$"):
        watch.check({"loss": np.array([np.nan])})
    watch.check({"loss": np.append(bad, 1.0)})
    watch.check({"loss": bad})


def test_fp_exceptions_see_a_gradient_that_the_loss_does_not_show(tmp_path):
    def hidden(params, carried, batch, key):
        # sqrt(0) is 0, its slope is infinite
        return jnp.sqrt(params["w"] * 0.0).sum(), (carried, {})

    plan = mr.Plan(micro_batch_size=2, fp_exceptions=True)
    runner, _, _, checkpoints = make_runner(tmp_path / "r", batches([1.0] * 12), plan=plan)
    program = mr.training_program(hidden, optax.sgd(0.1), plan)
    runner._program = program
    with pytest.raises(NotFinite, match="A gradient is not finite at update 1"):
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
    from millrace.program import training

    monkeypatch.setattr(training, "_STAGED_BYTES", 3 * 8)  # three batches
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
        pytest.raises(NotFinite, match="The loss is nan at update 3;"),
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
