"""Trackers by object: they receive every log event of a run and are closed at its end."""

import jax.numpy as jnp
import killable_run
import numpy as np
import optax
import pytest
from small_runner import batches, loss_fn

import millrace as mr
from millrace.config import ConfigurationError
from millrace.loop.event_schedule import schedule_events
from millrace.run.run import run_command

RATINGS = {
    "size": 128,
    "batch_size": 8,
    "precision": "32.32",
    "epochs": 2,
    "quiet": True,
}


class Tracker:
    def __init__(self):
        self.events, self.closed = [], 0

    def write(self, event):
        self.events.append(dict(event))
        event.clear()  # a copy: others must not see this

    def close(self):
        self.closed += 1


class Recorder(mr.Callback):
    def __init__(self):
        self.events = []

    def on_log(self, event):
        self.events.append(event)

    def on_validation(self, event):
        self.events.append(event)


def small_ratings():
    random = np.random.default_rng(0)
    users, items = np.nonzero(random.random((48, 30)) < 0.5)
    return users, items, random.integers(1, 6, len(users)).astype(np.float32)


def check_same_events(result, tracker, callback):
    assert tracker.events == callback.events == result.events
    assert tracker.closed == 1
    assert any("train_loss" in event for event in tracker.events)


def test_the_recommender_sends_its_events_to_callbacks_and_trackers(tmp_path):
    tracker, callback = Tracker(), Recorder()
    result = mr.autoencoder.train(
        data=small_ratings(),
        recipe="graphcore",
        run_dir=tmp_path / "run",
        callbacks=[callback],
        tracker=[tracker],
        **RATINGS,
    )
    check_same_events(result, tracker, callback)


def test_a_sweep_sends_its_events_to_callbacks_and_trackers(tmp_path):
    tracker, callback = Tracker(), Recorder()
    result = mr.autoencoder.sweep(
        base_learning_rates="11,13",
        run_dir=tmp_path / "run",
        callbacks=[callback],
        tracker=[tracker],
        **RATINGS,
    )
    check_same_events(result, tracker, callback)
    assert len(result.summary["trials"]) == 2


def test_vcd_sends_its_events_to_callbacks_and_trackers_by_object_and_name(tmp_path):
    tracker, callback = Tracker(), Recorder()
    result = mr.vcd.train(
        data=np.random.default_rng(0).random((24, 28, 28)),
        run_dir=tmp_path / "run",
        callbacks=[callback],
        tracker=["tensorboard", tracker],
        z_dim=2,
        num_hidden=8,
        num_burn_in_steps=2,
        num_leapfrog_steps=2,
        num_validation=8,
        micro_batch_size=8,
        num_epochs=2,
        quiet=True,
    )
    check_same_events(result, tracker, callback)
    assert list((result.path / "tensorboard").iterdir())


def test_a_tracker_of_each_part_of_a_run_is_closed_once(tmp_path):
    def work(config, run):
        program = mr.training_program(loss_fn, optax.sgd(0.01), mr.Plan(micro_batch_size=2))
        schedule = schedule_events(
            updates_per_epoch=4, num_epochs=1, events_per_epoch={"log": 1}
        )
        for given in ([tracker], [tracker], []):
            state = program.init({"w": jnp.ones(1)})
            infeed = mr.Infeed(batches(range(4)))
            run.train(program, state, infeed, schedule, trackers=given)

    tracker = Tracker()
    config = killable_run.Config(run=mr.RunOptions(run_dir=tmp_path / "r", quiet=True))
    assert run_command(work, config, command="mine", command_line="mine") == 0
    assert [event["update"] for event in tracker.events] == [4, 4]
    assert tracker.closed == 1


@pytest.mark.parametrize("given", [[3], [Tracker], [mr.Callback()]])
def test_something_else_than_a_tracker_is_an_error(given):
    with pytest.raises(ConfigurationError, match=r"write\(event\) and close\(\), got"):
        mr.cnn.train(tracker=given)


def test_an_unknown_name_of_a_tracker_is_an_error():
    with pytest.raises(ConfigurationError, match="tracker"):
        mr.cnn.train(tracker="nothing")
