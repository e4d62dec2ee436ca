"""The runner: events when they are due, errors that name the update, stopping."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from small_runner import batches, make_runner

import millrace as mr
from millrace.checkpoint import orbax_files
from millrace.checkpoint.best import BestMetric
from millrace.checkpoint.store import CheckpointError, read_manifest
from millrace.config import ConfigurationError
from millrace.loop import stopping
from millrace.loop.activity import report_progress, run_stoppable
from millrace.loop.staging import Calls
from millrace.loop.stopping import StopRequest
from millrace.program.training_loop import TrainingProgram


def test_events_have_means_since_the_last_event_and_the_newest_watched_values(tmp_path):
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
    validated = []

    def validate(state):
        validated.append(int(state.update))
        return {"accuracy": len(validated) / 10}

    runner, state, _directory, checkpoints = make_runner(
        tmp_path / "r", batches(range(12)), validate=validate, checkpoint=2, logs=1
    )
    result = runner.run(state)
    checkpoints.close()
    assert validated == [12]  # without a rate, only at the end
    assert [path.name for path in checkpoints.saved()] == [
        "update-000000006",
        "update-000000012",
    ]
    assert result.metrics["validation_accuracy"] == 0.1
    manifest = json.loads((checkpoints.saved()[-1] / "manifest.json").read_text())
    assert (manifest["data_position"], manifest["update"]) == (12, 12)
    assert manifest["metrics"]["validation_accuracy"] == 0.1


@pytest.mark.cpu("a GPU has programs for fixed numbers of updates")
def test_an_error_of_the_dataset_is_raised_unchanged(tmp_path):
    def failing():
        yield from batches(range(7))
        raise OSError("cannot read shard 3")

    runner, state, directory, checkpoints = make_runner(tmp_path / "r", failing())
    with pytest.raises(OSError, match="cannot read shard 3"):
        runner.run(state)
    checkpoints.close()
    assert [event["update"] for event in directory.read_metrics()] == [3, 6]


def test_waiting_for_the_first_batch_does_not_count_as_compiling(tmp_path):
    def slow():
        time.sleep(0.3)
        yield from batches(range(12))

    runner, state, _, checkpoints = make_runner(tmp_path / "r", slow())
    runner.run(state)
    checkpoints.close()
    phases = {phase.name: phase.end - phase.start for phase in runner._console.phases}
    assert phases["waiting for the first data"] >= 0.25


def test_the_error_about_a_short_dataset_has_the_number_of_elements(tmp_path):
    runner, state, _, checkpoints = make_runner(tmp_path / "r", batches(range(7)))
    with pytest.raises(mr.DatasetEnded, match="ended after 7 elements"):
        runner.run(state)
    checkpoints.close()


@pytest.mark.parametrize("element", [np.zeros(3, np.float32), np.zeros(2, np.float16)])
def test_an_element_of_another_shape_or_type_is_named(element, tmp_path):
    data = [*batches(range(7)), element]
    runner, state, _, checkpoints = make_runner(tmp_path / "r", data)
    with pytest.raises(mr.ElementError, match="Element 7 of the dataset"):
        runner.run(state)
    checkpoints.close()


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
    checkpoints.best_by = BestMetric("validation_accuracy", "max")
    runner.run(state)
    checkpoints.close()
    # Validated after 4, 8 and 12, saved after 6 and 12: the score 0.5 is not of update 6.
    assert checkpoints.best().name == "update-000000012"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [(None, "a dict of metrics, got NoneType"), ({"a": [1]}, r"a of .* the shape \(1,\)")],
)
def test_a_validation_that_returns_no_metrics_is_an_error(tmp_path, metrics, message):
    runner, state, _, checkpoints = make_runner(
        tmp_path / "r", batches(range(12)), validate=lambda state: metrics, validations=3
    )
    with pytest.raises(TypeError, match=message):
        runner.run(state)
    checkpoints.close()


def test_metrics_of_a_validation_may_be_arrays(tmp_path):
    runner, state, directory, checkpoints = make_runner(
        tmp_path / "r",
        batches(range(12)),
        validate=lambda state: {"a": jnp.float32(0.5), "b": np.array(2), "c": 3},
        validations=3,
    )
    runner.run(state)
    checkpoints.close()
    event = directory.read_metrics()[-1]
    assert [event[f"validation_{name}"] for name in "abc"] == [0.5, 2, 3]


def test_a_best_metric_that_does_not_exist_is_an_error_at_the_first_validation(tmp_path):
    runner, state, _, checkpoints = make_runner(
        tmp_path / "r",
        batches(range(12)),
        validate=lambda state: {"accuracy": 0.5},
        logs=1,
        validations=3,
    )
    checkpoints.best_by = BestMetric("val_accuracy", "max")
    expected = r"chosen by val_accuracy, but .* validation_accuracy\. Did you mean"
    with pytest.raises(ConfigurationError, match=expected):
        runner.run(state)
    checkpoints.close()
    assert runner.progress()["updates"] == 4


def test_a_checkpoint_has_the_metrics_of_its_own_update(tmp_path):
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
    expected = "SIGINT: finishing the current execution, then saving a checkpoint. Repeat"
    assert expected in capsys.readouterr().err


def test_a_run_without_checkpoints_does_not_promise_one(monkeypatch):
    lines = []
    monkeypatch.setattr(
        stopping._log, "warning", lambda text, *args: lines.append(text % args)
    )
    with StopRequest(saves=False).on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert lines == [
        "SIGTERM: finishing the current execution. Repeat it to stop immediately."
    ]


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


def test_a_signal_cuts_a_validation_short_and_the_resumed_run_makes_up_for_it(tmp_path):
    interrupts = [True]

    def validate(state):
        if interrupts:
            signal.raise_signal(signal.SIGTERM)
        report_progress(1, 2)
        return {"accuracy": 0.5}

    def make():
        return make_runner(
            tmp_path / "r",
            list(batches(range(12))),
            validate=validate,
            validations=2,
            checkpoint=2,
        )

    runner, state, directory, checkpoints = make()
    result = runner.run(state)
    checkpoints.close()
    assert (result.interrupted, result.updates, result.signal) == (True, 6, signal.SIGTERM)
    assert [path.name for path in checkpoints.saved()] == ["update-000000006"]
    assert not any("validation_accuracy" in event for event in directory.read_metrics())
    interrupts.clear()
    runner, state, directory, checkpoints = make()
    assert not runner.run(state, resume=True).interrupted
    checkpoints.close()
    validated = [
        e["update"] for e in directory.read_metrics() if "validation_accuracy" in e
    ]
    assert validated == [6, 12]
    scores = [read_manifest(path)["scores"] for path in checkpoints.saved()]
    assert [each["validation_accuracy"] for each in scores] == [0.5, 0.5]


def test_a_signal_does_not_wait_for_what_a_validation_compiles(tmp_path):
    compiled = threading.Event()

    def validate(state):
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        return run_stoppable(lambda: compiled.wait(20))

    runner, state, _, checkpoints = make_runner(
        tmp_path / "r", batches(range(12)), validate=validate, validations=2
    )
    result = runner.run(state)
    checkpoints.close()
    assert not compiled.is_set()
    compiled.set()
    assert (result.interrupted, result.updates) == (True, 6)


def test_a_signal_does_not_wait_for_a_program_with_calls_of_another_length(
    tmp_path, monkeypatch
):
    compiled, compile_calls = threading.Event(), Calls.compile

    def compile_slowly(calls, state, done=0):
        if not done:
            return compile_calls(calls, state)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        compiled.wait(20)

    monkeypatch.setattr(TrainingProgram, "runs_parts", False)
    monkeypatch.setattr(Calls, "compile", compile_slowly)
    monkeypatch.setattr(Calls, "_revise_length", lambda calls, done: True)
    runner, state, _, checkpoints = make_runner(
        tmp_path / "r", batches(range(12)), checkpoint=2
    )
    result = runner.run(state)
    checkpoints.close()
    assert not compiled.is_set()
    compiled.set()
    assert (result.interrupted, result.updates) == (True, 6)
    assert [path.name for path in checkpoints.saved()] == ["update-000000006"]


ABANDONED = """
import os, signal, time
from millrace.distributed.signals import handle_signals
from millrace.loop.activity import ActivityStopped, listening, run_stoppable

def work():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(seconds)

received = []
with handle_signals(lambda *_: received.append(1)):
    with listening(should_stop=lambda: bool(received)):
        try:
            run_stoppable(work)
        except ActivityStopped:
            print("stopped", flush=True)
time.sleep(1)
"""


@pytest.mark.parametrize(("seconds", "status"), [(60, -signal.SIGTERM), (0.5, 0)])
def test_a_signal_ends_a_process_that_still_compiles_at_its_exit(seconds, status):
    script = ABANDONED.replace("seconds)", f"{seconds})", 1)
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.returncode) == ("stopped\n", status), done.stderr


def test_an_error_on_another_thread_is_raised_on_this_one():
    with pytest.raises(ValueError, match="no such layer"):
        run_stoppable(lambda: int("no such layer"))


def test_a_run_whose_last_validation_was_cut_short_is_not_complete(tmp_path):
    def validate(state):
        signal.raise_signal(signal.SIGINT)
        report_progress(1, 2)

    runner, state, _, checkpoints = make_runner(
        tmp_path / "r", batches(range(12)), validate=validate
    )
    result = runner.run(state)
    checkpoints.close()
    assert (result.interrupted, result.updates) == (True, 12)


def test_a_signal_does_not_wait_for_the_data(tmp_path):
    def stalling():
        yield from batches(range(6))
        signal.raise_signal(signal.SIGINT)
        time.sleep(1.0)
        yield from batches(range(6))

    runner, state, _, checkpoints = make_runner(tmp_path / "r", stalling())
    result = runner.run(state)
    checkpoints.close()
    assert result.interrupted and result.updates <= 6
    assert [path.name for path in checkpoints.saved()] == [f"update-{result.updates:09}"]


# Saving at the end


def delay_writes(monkeypatch, seconds):
    write = orbax_files.write_share

    def write_late(folder, arrays):
        time.sleep(seconds)
        return write(folder, arrays)

    monkeypatch.setattr(orbax_files, "write_share", write_late)


def test_a_run_returns_only_when_its_last_checkpoint_is_written(tmp_path, monkeypatch):
    delay_writes(monkeypatch, 0.3)
    runner, state, _, checkpoints = make_runner(tmp_path / "r", list(batches(range(12))))
    runner.run(state)
    assert [path.name for path in checkpoints.saved()] == ["update-000000012"]
    again, state, _, others = make_runner(tmp_path / "r", list(batches(range(12))))
    assert again.run(state, resume=True).updates == 12
    checkpoints.close()
    others.close()


def test_a_run_that_fails_first_finishes_the_checkpoint_in_progress(tmp_path, monkeypatch):
    delay_writes(monkeypatch, 0.3)
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
    def full(folder, arrays):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(orbax_files, "write_share", full)
    runner, state, _, checkpoints = make_runner(tmp_path / "r", batches(range(12)))
    with pytest.raises(CheckpointError, match=r"after update 12 .*No space left"):
        runner.run(state)
    checkpoints.close()
