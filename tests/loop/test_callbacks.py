"""Callbacks receive events on the host, may end training, and fail with the user's line."""

import jax
import jax.numpy as jnp
import killable_run
import numpy as np
import optax
import pytest
from small_runner import batches, loss_fn, make_runner

import millrace as mr
from millrace.checkpoint.store import CheckpointError, Checkpoints
from millrace.commands.calling import call_command
from millrace.config import ConfigurationError
from millrace.distributed import coordination
from millrace.loop.event_schedule import schedule_events
from millrace.run.run import run_command


class Recorder(mr.Callback):
    def __init__(self, stop_at=None):
        self.calls, self.stop_at = [], stop_at

    def on_log(self, event):
        assert not any(isinstance(value, jax.Array) for value in event.values())
        self.calls.append(("log", event["update"]))
        event.clear()  # a copy: others must not see this

    def on_validation(self, event):
        self.calls.append(("validation", event["update"], event["validation_accuracy"]))
        return np.bool_(event["update"] == self.stop_at)

    def on_save(self, update, path):
        assert (path / "manifest.json").exists()
        self.calls.append(("save", update, path.name))


def train(path, *callbacks, resume=False, **rates):
    runner, state, directory, checkpoints = make_runner(
        path,
        batches(range(12)),
        validate=lambda state: {"accuracy": 0.5},
        callbacks=callbacks,
        **{"logs": 2, "validations": 2, "checkpoint": 2} | rates,
    )
    try:
        return runner.run(state, resume=resume), directory
    finally:
        checkpoints.close()


def test_a_callback_receives_all_events_in_order(tmp_path):
    recorder, other = Recorder(), Recorder()
    result, directory = train(tmp_path / "r", recorder, other)
    assert [call for call in recorder.calls if call[0] != "save"] == [
        *(("log", 6), ("validation", 6, 0.5), ("log", 12), ("validation", 12, 0.5)),
    ]
    assert [call for call in recorder.calls if call[0] == "save"] == [
        *(("save", 6, "update-000000006"), ("save", 12, "update-000000012")),
    ]
    assert other.calls == recorder.calls
    assert "train_loss" in directory.read_metrics()[0]
    assert not result.interrupted


def test_a_callback_that_returns_true_ends_training_with_a_checkpoint(tmp_path):
    recorder = Recorder(stop_at=6)
    result, _ = train(tmp_path / "r", recorder, checkpoint=1)
    assert (result.interrupted, result.updates) == (True, 6)
    assert result.progress["stopped_by"] == "Recorder"
    assert recorder.calls[-1] == ("save", 6, "update-000000006")
    result, _ = train(tmp_path / "r", Recorder(), checkpoint=1, resume=True)
    assert (result.interrupted, result.updates) == (False, 12)


def test_after_an_error_in_a_callback_the_run_can_be_resumed(tmp_path):
    class Failing(mr.Callback):
        def on_validation(self, event):
            if event["update"] == 12:
                raise KeyError("no such table")

    whole, _ = train(tmp_path / "whole")
    with pytest.raises(KeyError, match="no such table"):
        train(tmp_path / "r", Failing())
    resumed, directory = train(tmp_path / "r", resume=True)
    np.testing.assert_array_equal(resumed.state.params["w"], whole.state.params["w"])
    updates = [event["update"] for event in directory.read_metrics()]
    assert updates == [6, 6, 12, 12]


def test_a_checkpoint_that_could_not_be_written_is_not_announced(tmp_path, monkeypatch):
    class Saves(mr.Callback):
        def on_save(self, update, path):
            saved.append(update)

    def fail(*args, **kwargs):
        raise CheckpointError("no space left on device")

    def save_and_wait(self, *args, **kwargs):
        save(self, *args, **kwargs)
        self.wait(raise_error=False)  # it has failed when the loop looks at it next

    saved, save = [], Checkpoints.save
    monkeypatch.setattr("millrace.checkpoint.store.write_checkpoint", fail)
    monkeypatch.setattr(Checkpoints, "save", save_and_wait)
    with pytest.raises(CheckpointError, match="no space left on device"):
        train(tmp_path / "r", Saves())
    assert saved == []


def test_a_callback_of_each_part_of_a_run_is_called_and_closed_once(tmp_path):
    class Counting(mr.Callback):
        def on_log(self, event):
            counted.append(event["update"])

        def close(self):
            counted.append("closed")

    def work(config, run):
        plan = mr.Plan(micro_batch_size=2)
        program = mr.training_program(loss_fn, optax.sgd(0.01), plan)
        schedule = schedule_events(
            updates_per_epoch=4, num_epochs=1, events_per_epoch={"log": 1}
        )
        for given in ([callback], [callback], []):
            state = program.init({"w": jnp.ones(1)})
            infeed = mr.Infeed(batches(range(4)))
            run.train(program, state, infeed, schedule, callbacks=given)

    counted, callback = [], Counting()
    config = killable_run.Config(run=mr.RunOptions(run_dir=tmp_path / "r", quiet=True))
    assert run_command(work, config, command="mine", command_line="mine") == 0
    assert counted == [4, 4, "closed"]


def test_only_the_first_process_calls_callbacks(tmp_path, monkeypatch):
    monkeypatch.setattr(coordination, "is_first", lambda: False)
    recorder = Recorder()
    from millrace.loop.callbacks import Callbacks

    Callbacks([recorder], lambda: None).send_event({"update": 1}, is_validation=False)
    assert recorder.calls == []


def test_something_else_than_a_callback_is_an_error():
    with pytest.raises(ConfigurationError, match=r"subclasses of mr\.Callback, got 3"):
        call_command("cnn train", {}, lambda path: None, callbacks=[3])
    with pytest.raises(ConfigurationError, match="must be a list, got 3"):
        mr.cnn.train(callbacks=3)


def test_a_callback_of_the_cnn_is_closed_after_its_error_which_shows_its_line(
    tmp_path, capsys
):
    class Failing(mr.Callback):
        closed = 0

        def on_log(self, event):
            raise ZeroDivisionError(event["update"])  # this line

        def close(self):
            self.closed += 1

    failing = Failing()
    with pytest.raises(ZeroDivisionError):
        mr.cnn.train(
            callbacks=[failing],
            run_dir=tmp_path / "run",
            num_epochs=1,
            validation=False,
            global_batch_size=256,
        )
    assert failing.closed == 1
    text = capsys.readouterr().err
    assert "test_callbacks.py" in text
    assert 'raise ZeroDivisionError(event["update"])  # this line' in text


def test_an_error_after_training_is_raised_in_python(tmp_path):
    class Failing(mr.Callback):
        def close(self):
            raise ZeroDivisionError("at the end")

    options = {"config": "digits_demo", "num_epochs": 1, "run_dir": tmp_path / "r"}
    with pytest.raises(ZeroDivisionError, match="at the end"):
        mr.cnn.train(**options, quiet=True, callbacks=[Failing()])
    assert (tmp_path / "r/report.html").exists()  # what comes after it is done as well
