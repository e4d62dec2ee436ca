"""Ctrl-C, SIGTERM and SIGHUP at any time: never lost, no crash, no traceback."""

import importlib
import itertools
import json
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


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, b"\n"), (False, b"")])
def test_after_ctrl_c_in_a_terminal_the_prompt_has_a_line_of_its_own(is_terminal, shown):
    # Not a real terminal, which may lose what a process writes just before its end.
    program = (
        "import os, time\n"
        "from millrace.distributed.signals import exit_on_signals\n"
        f"os.isatty = lambda number: {is_terminal}\n"
        "exit_on_signals()\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, shown)


STUCK = """
import ctypes, sys, threading, time
from dataclasses import dataclass
from pathlib import Path
from millrace.distributed.signals import end_if_unanswered, exit_on_signals
from millrace.distributed.signals import handle_signals
from millrace.run.options import RunOptions
from millrace.run.run import run_command

def stay_in_c():
    # Like a driver that starts: releases the interpreter lock, and ignores signals.
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("stuck", flush=True)
    threading.Timer(3.0, ctypes.CDLL(None).pthread_mutex_unlock, (mutex,)).start()
    lock(mutex)

def function(config, run):
    if sys.argv[2] == "protected":
        with handle_signals(lambda *_: print("handled", flush=True)):
            stay_in_c()
        run.summary["status"] = "completed"
    elif sys.argv[2] == "importing":
        sys.path.insert(0, str(Path(sys.argv[1]).parent))
        import millrace_test_slow_import
    else:
        stay_in_c()

@dataclass(frozen=True, kw_only=True)
class Config:
    run: RunOptions = RunOptions()

exit_on_signals()
end_if_unanswered(0.3)
config = Config(run=RunOptions(run_dir=Path(sys.argv[1])))
sys.exit(run_command(function, config, command="x", command_line="x"))
"""


def interrupt_stuck_process(folder, kind):
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(folder), kind],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "stuck\n"
    time.sleep(0.3)  # now it is in C
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    return process.returncode, printed + errors, time.monotonic() - began


def test_a_signal_that_python_cannot_handle_ends_the_process(tmp_path):
    status, printed, seconds = interrupt_stuck_process(tmp_path / "run", "unprotected")
    assert status == 130 and seconds < 2.5
    assert f"partial results are in {tmp_path / 'run'}" in printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"


def test_an_import_that_takes_long_does_not_hold_up_the_end(tmp_path):
    """It is not interrupted, but a machine that reads its packages slowly must not wait."""
    slow = "import time\nprint('stuck', flush=True)\nfor _ in range(600): time.sleep(0.1)\n"
    (tmp_path / "millrace_test_slow_import.py").write_text(slow)
    status, printed, seconds = interrupt_stuck_process(tmp_path / "run", "importing")
    assert status == 130 and seconds < 5
    assert f"partial results are in {tmp_path / 'run'}" in printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"


def test_a_signal_that_the_training_loop_handles_does_not_end_the_process(tmp_path):
    status, printed, seconds = interrupt_stuck_process(tmp_path / "run", "protected")
    assert status == 0 and "handled" in printed and seconds > 1
