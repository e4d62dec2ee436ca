"""An elastic run continues with fewer processes, and takes lost ones back."""

import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from launched import (
    assert_same_history,
    assert_same_weights,
    children_of,
    finish,
    launched,
    pid_of,
    run,
    start,
    summary,
    wait_for,
)

import millrace as mr
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.apps.vcd.config import VcdConfig
from millrace.config import ConfigurationError, build
from millrace.distributed import environment
from millrace.distributed.launcher import Child, Failure, Launcher
from millrace.distributed.options import LaunchConfig
from millrace.distributed.signals import INTERRUPTED
from millrace.run.process import _fit_to_processes


def wait_until(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_lost_process_is_replaced_by_accumulation_and_taken_back(tmp_path, undisturbed):
    directory, broken = tmp_path / "run", tmp_path / "broken"
    own = ("--delay", "0.2", "--broken-devices", str(broken), "--num-epochs", "10")
    options = ("--elastic", "1:2", "--return-after", "4")
    command = launched(directory, 1, *own, options=options)
    process = start(command)
    wait_for(directory, 12, process)
    broken.write_text("1")
    os.kill(pid_of(1, process), signal.SIGKILL)
    log = directory / "launch.log"
    wait_until(
        lambda: log.exists() and "continuing without process 1" in log.read_text(), process
    )
    wait_until(lambda: len(children_of(process)) == 1, process)
    broken.unlink()
    output = finish(process)
    events = [
        "process 1 (pid ",
        "starting all of them again: 2 processes, from the last checkpoint",
        "continuing without process 1: 1 process, from the last checkpoint",
        "saving a checkpoint, to try again with process 1",
        "trying again with process 1",
    ]
    places = [output.index(f"millrace launch: {event}") for event in events]
    assert places == sorted(places)
    lines = log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines)
    assert summary(directory)["status"] == "completed"
    alone = tmp_path / "alone"
    run(launched(alone, 1, "--num-epochs", "10"))
    assert_same_weights(directory, alone)
    assert_same_history(directory, alone)


@pytest.mark.slow
def test_a_process_that_gets_stuck_again_is_left_out(tmp_path, undisturbed):
    directory = tmp_path / "run"
    own = ("--stuck-timeout", "8", "--hang-in", "1")
    options = ("--elastic", "1:2", "--return-after", "0")
    output = finish(start(launched(directory, 1, *own, options=options)), timeout=180)
    named = r"No progress for \d+ s, waiting for Process 1 \(pid \d+ on .*\): training"
    assert len(re.findall(named, output)) >= 2
    events = [
        "starting all of them again: 2 processes, from the last checkpoint",
        "continuing without process 1: 1 process, from the last checkpoint",
    ]
    places = [output.index(f"millrace launch: {event}") for event in events]
    assert places == sorted(places)
    assert_same_weights(directory, undisturbed)
    assert_same_history(directory, undisturbed)


BROKEN_LATER = 'if [ -e "$0" ] && [ "$MILLRACE_SLOT" = 1 ]; then exit 1; fi; exec "$@"'
LOW_RATE = ("--num-epochs", "40", "--global-batch-size", "64", "--lr", "0.0002")


@pytest.mark.slow
def test_an_application_with_half_of_its_processes_ends_with_the_same_weights(tmp_path):
    directory, broken = tmp_path / "run", tmp_path / "broken"
    decay = ("--lr-schedule-params", "{epochs_to_total_decay: 40}")
    train = [sys.executable, "-m", "millrace", "cnn", "train", "--config", "digits_demo"]
    command = [*train, *LOW_RATE, *decay]
    launch = [sys.executable, "-m", "millrace", "launch", "--elastic", "1:2"]
    launch += ["--num-replicas", "2", "--return-after", "0", "--"]
    wrapper = ["sh", "-c", BROKEN_LATER, str(broken)]
    process = start([*launch, *wrapper, *command, "--run-dir", str(directory)])
    wait_for(directory, 110, process)
    broken.touch()
    os.kill(pid_of(1, process), signal.SIGKILL)
    output = finish(process, timeout=180)
    assert "continuing without process 1: 1 process, from the last checkpoint" in output
    alone = tmp_path / "alone"
    run([*command, "--run-dir", str(alone)])
    ours, theirs = (mr.load(each, which="last").params for each in (directory, alone))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert_same_history(directory, alone)


@pytest.mark.slow
def test_with_fewer_than_the_least_the_run_fails(tmp_path):
    directory, broken = tmp_path / "run", tmp_path / "broken"
    broken.write_text("0 1")
    own = ("--broken-devices", str(broken))
    output = run(launched(directory, 1, *own, options=("--elastic", "2:4")), status=1)
    assert "The device is gone." in output
    assert "1 process left, fewer than 2" in output


SAVES_SLOWLY = """
import os, signal, threading, time

def end_with_the_launcher():
    with open(int(os.environ["MILLRACE_LAUNCHER_PIPE"])) as pipe:
        for _ in pipe:
            os._exit(1)

def stop(*_):
    signals.append(1)
    if len(signals) > 1:
        os._exit(130)
    print("saving", flush=True)
    time.sleep(1.0)
    print("saved", flush=True)
    os._exit(130)

if os.environ["MILLRACE_SLOT"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signals = []
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
threading.Thread(target=end_with_the_launcher, daemon=True).start()
time.sleep(30)
"""


def test_an_interrupt_while_lost_processes_are_about_to_return_ends_the_run():
    options = ("--elastic", "1:2", "--num-replicas", "2", "--return-after", "1")
    launcher = (sys.executable, "-u", "-m", "millrace", "launch", *options)
    process = start([*launcher, "--", sys.executable, "-c", SAVES_SLOWLY])
    assert process.stdout is not None
    for line in process.stdout:
        if line == "[0] saving\n":
            break
    process.send_signal(signal.SIGINT)
    output = finish(process, status=130)
    assert output == "[0] saved\n"  # and nothing is started again


def test_taking_lost_processes_back_is_no_restart_after_a_failure(monkeypatch, capsys):
    lost = Failure(1, 1, 1, "failed with status 1")
    stopped = Failure(0, 0, INTERRUPTED, "was killed by SIGTERM")
    failures = [lost, lost, stopped, lost, None]

    def run_once(self, folder):
        failure = failures.pop(0)
        self._is_returning = failure is stopped
        return failure

    monkeypatch.setattr(Launcher, "_run_on_free_port", run_once)
    config = LaunchConfig(elastic="1:2", max_restarts=3, return_after=1.0)
    assert Launcher(config, ["true"]).run() == 0
    assert re.findall(r"\((\d) of 3", capsys.readouterr().err) == ["1", "2", "3"]


def test_a_process_without_handlers_that_is_asked_to_stop_has_not_failed(tmp_path):
    launcher = Launcher(LaunchConfig(elastic="1:2"), ["true"])
    launcher._is_returning = True  # SIGTERM was sent to all
    stopped = SimpleNamespace(poll=lambda: -signal.SIGTERM, pid=1)
    launcher._children = [Child(n, n, stopped, -1, []) for n in range(2)]
    (tmp_path / "cause").write_text("1")  # process 0 ended because of process 1
    first = Failure(0, 0, 1, "failed with status 1")
    cause = launcher._find_cause(first, str(tmp_path))
    assert cause is not None and (cause.number, cause.status) == (1, INTERRUPTED)


def fit(config, present, all_processes, monkeypatch):
    monkeypatch.setenv(environment.ELASTIC, f"{present}/{all_processes}")
    return _fit_to_processes(config)


@pytest.mark.parametrize(
    ("config_type", "options"),
    [
        (CnnConfig, {"gradient_accumulation_count": 3}),
        (CnnConfig, {"global_batch_size": 48}),
        (AutoencoderConfig, {"data": "random", "batch_size": 24}),
        (VcdConfig, {"micro_batch_size": 4}),
    ],
    ids=["cnn, count", "cnn, global", "autoencoder", "vcd"],
)
def test_fewer_processes_keep_the_global_batch(config_type, options, monkeypatch):
    config = build(config_type, {"num_replicas": 4, **options})
    size = config.plan.batching.global_batch_size
    fewer = fit(config, 2, 4, monkeypatch)
    assert fewer.plan.batching.num_replicas == 2
    assert fewer.plan.batching.global_batch_size == size
    assert fit(config, 4, 4, monkeypatch) is config


def test_fewer_processes_may_run_what_has_no_plan(monkeypatch):
    config = build(ValidateConfig, {})
    assert fit(config, 1, 2, monkeypatch) is config


def test_what_cannot_be_divided_is_an_error_that_the_launcher_sees(tmp_path, monkeypatch):
    config = build(CnnConfig, {"num_replicas": 4, "gradient_accumulation_count": 1})
    monkeypatch.setenv(environment.LAUNCH_DIR, str(tmp_path))
    with pytest.raises(ConfigurationError, match="3 of 4 processes cannot share the glo"):
        fit(config, 3, 4, monkeypatch)
    assert environment.pop_indivisible(str(tmp_path))
    assert not environment.pop_indivisible(str(tmp_path))
