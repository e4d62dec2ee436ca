"""A data worker that is killed ends training at once, however slow the updates are."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from small_runner import make_runner
from worker_jobs import MadeImages, find_workers

import millrace as mr
from millrace.data.decode_pool import DataWorkerError
from millrace.distributed.signals import INTERRUPTED
from millrace.loop import runner as module
from millrace.loop.activity import report_progress
from millrace.loop.staging import Calls

BATCH = 8
KILLED = r"Data worker \d+ was killed by SIGKILL"
pytestmark = [
    pytest.mark.skipif(not Path("/proc").exists(), reason="workers are looked up in /proc"),
    pytest.mark.cpu("the updates sleep on the host"),
]


class Update:
    """A loss that calls a function of the host at every update."""

    def __init__(self, call):
        self._call = call

    def __call__(self, params, model_state, batch, key):
        def call(labels):
            self._call()
            return np.float32(0)

        zero = jax.pure_callback(call, jax.ShapeDtypeStruct((), np.float32), batch["label"])
        return (params["w"] ** 2).mean() + zero, (model_state, {})


class Trial:
    """A run whose data comes from two workers, of which one is killed."""

    def __init__(self, path, call, *, updates, **options):
        self.source = MadeImages(num_workers=2)
        plan = mr.Plan(micro_batch_size=BATCH)
        self.runner, self.state, self.directory, self.checkpoints = make_runner(
            path / "r",
            self.source.stream(BATCH, batches_per_epoch=5),
            updates=updates,
            loss=Update(call),
            plan=plan,
            **options,
        )
        self.killed_at = 0.0

    def kill_when(self, is_time):
        """Kill a worker from another thread, once a condition holds."""

        def kill():
            while not is_time():
                time.sleep(0.02)
            self.kill()

        threading.Thread(target=kill, daemon=True).start()

    def kill(self):
        self.killed_at = time.monotonic()
        os.kill(min(find_workers()), signal.SIGKILL)

    def run(self):
        try:
            return self.runner.run(self.state)
        finally:
            self.seconds = time.monotonic() - self.killed_at
            self.checkpoints.close()
            self.source.close()


def test_updates_whose_data_is_staged_are_not_made_first(tmp_path):
    trial = Trial(tmp_path, lambda: time.sleep(0.25), updates=400, logs=400, checkpoint=200)
    infeed, positions = trial.runner._infeed, []

    def is_time():
        positions.append(infeed.position)
        return positions[-1] > 4 and infeed.elements_read - positions[-1] > 100

    trial.kill_when(is_time)
    with pytest.raises(DataWorkerError, match=KILLED):
        trial.run()
    assert trial.seconds < 10
    done = trial.runner.progress()["updates"]
    assert positions[-1] <= done < positions[-1] + 40
    # What was computed is reported, and what was saved can be resumed.
    assert [event["update"] for event in trial.directory.read_metrics()][-1] == done
    assert [int(path.name[-9:]) for path in trial.checkpoints.saved()][-1] <= done
    assert not find_workers()


class Unready:
    """A value that is still being computed."""

    def is_ready(self):
        return False


def test_an_update_that_takes_very_long_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LAST_CALL_SECONDS", 0.5)
    started, run = threading.Event(), Calls.run

    def run_for_long(calls, *arguments):
        state, call = run(calls, *arguments)
        started.set()
        return state, call._replace(info={"loss": Unready()})

    monkeypatch.setattr(Calls, "run", run_for_long)
    trial = Trial(tmp_path, lambda: None, updates=20)
    trial.kill_when(started.is_set)
    with pytest.raises(DataWorkerError, match=KILLED):
        trial.run()
    assert 0.5 < trial.seconds < 10


def validate_for(trial, seconds):
    """Kill a worker, then report progress for a while."""
    trial.kill()
    for step in range(round(seconds / 0.05)):
        report_progress(step, None)
        time.sleep(0.05)
    return {"accuracy": 0.5}


def test_a_validation_does_not_delay_the_error(tmp_path):
    trial = Trial(
        tmp_path,
        lambda: None,
        updates=12,
        validate=lambda state: validate_for(trial, 60),
        validations=2,
    )
    with pytest.raises(DataWorkerError, match=KILLED):
        trial.run()
    assert trial.seconds < 10
    assert trial.runner.progress()["updates"] == 6


def test_the_last_validation_needs_no_training_data(tmp_path):
    trial = Trial(
        tmp_path, lambda: None, updates=12, validate=lambda state: validate_for(trial, 0.5)
    )
    result = trial.run()
    assert (result.updates, result.interrupted) == (12, False)
    assert result.metrics["validation_accuracy"] == 0.5


@pytest.mark.parametrize("status", [1, INTERRUPTED])
def test_the_process_does_not_wait_for_a_device_that_computes(status):
    """Python would: the program below takes minutes."""
    code = (
        "import sys, jax, jax.numpy as jnp\n"
        "from millrace import cli\n"
        "def main():\n"
        "    x = jnp.ones((2000, 2000))\n"
        "    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 10**4, lambda i, y: y @ x, x))\n"
        "    y = loop(x)\n"
        "    assert not y.is_ready()\n"
        "    print('computing', flush=True)\n"
        f"    sys.exit({status})\n"
        "cli.main = main\n"
        "cli.script()\n"
    )
    options = {"env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        assert process.stdout.readline() == "computing\n"
        assert process.wait(10) == status
