"""Ctrl-C, SIGTERM and SIGHUP at any time: never lost, no crash, no traceback."""

import importlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import environment

from millrace.distributed.signals import handle_signals, interruptible

EACH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


def wait_for_interrupt() -> None:
    time.sleep(5)
    raise AssertionError("the signal was lost")


@EACH
def test_a_signal_raises_keyboard_interrupt(number):
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), number)
        wait_for_interrupt()


@EACH
def test_an_interrupt_that_would_be_swallowed_is_raised_later(number):
    reached = []

    def _xla_gc_callback():
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        reached.append("the end")

    with pytest.raises(KeyboardInterrupt), interruptible():
        _xla_gc_callback()
        wait_for_interrupt()
    assert reached == ["the end"]


def test_an_import_is_completed_before_the_interrupt(tmp_path, monkeypatch):
    name = "millrace_test_interrupted_import"
    (tmp_path / f"{name}.py").write_text(
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.1)\ncomplete = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), interruptible():
        importlib.import_module(name)
        wait_for_interrupt()
    assert sys.modules.pop(name).complete


@EACH
def test_previous_handlers_are_restored(number):
    before = signal.getsignal(number)
    with interruptible():
        assert signal.getsignal(number) is not before
    assert signal.getsignal(number) is before


def test_under_nohup_a_closed_terminal_does_not_stop_a_run():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.1)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@EACH
def test_sighup_after_another_signal_is_ignored(number):
    """It comes several times, maybe while a checkpoint is being saved after Ctrl-C."""
    received = []
    for _ in range(2):  # a later run of the same process starts afresh
        with handle_signals(lambda number, _: received.append(number)):
            os.kill(os.getpid(), number)
            with handle_signals(lambda number, _: received.append(number)):
                os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
    assert received == [number, signal.SIGTERM] * 2


def wait_until_signals_are_handled(process: subprocess.Popen) -> None:
    """Python itself needs unknown time to start on a busy machine."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.005)
    raise AssertionError("signals are not handled")


@pytest.mark.parametrize(
    ("number", "seconds"),
    [
        *itertools.product((signal.SIGINT, signal.SIGTERM), (0, 0.2, 0.7, 1.5, 2.3)),
        (signal.SIGHUP, 0),
        (signal.SIGHUP, 1.5),
    ],
)
def test_a_command_that_has_just_started_exits_silently(tmp_path, number, seconds):
    args = ["cnn", "train", "--config", "digits_demo", "--num-epochs", "400", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace", *args, "--run-dir", str(tmp_path / "run")],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until_signals_are_handled(process)
    time.sleep(seconds)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors and "Exception" not in errors
