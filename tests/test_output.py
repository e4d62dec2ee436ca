"""A lost terminal, pipe or log does not end a run or change its exit status."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launched import alone, environment, summary

import millrace
from millrace.output import DroppingStream, dropping_lost_output, error_line
from millrace.run.console import Console

PRINTING_SCRIPT = """
import sys
from millrace.run.console import Console
from millrace.output import drop_lost_output
drop_lost_output()
console = Console()
console.start(100, 0)
for update in range(100):
    console.status("training")
    console.line(f"update {update}")
    console.advance(update, {"loss": 0.5}, 1.0)
    print("result", update)
    sys.stderr.write("half a line")
console.stop()
sys.exit(7)
"""


def broken_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


def closed_terminal() -> int:
    own_end, other_end = os.openpty()
    os.close(own_end)
    return other_end


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


LOST = pytest.mark.parametrize("lost", [broken_pipe, closed_terminal, full_disk])


@LOST
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_output_that_cannot_be_written_is_dropped_and_the_status_stays(lost, name):
    other = {"stdout": "stderr", "stderr": "stdout"}[name]
    target = lost()
    done = subprocess.run(
        [sys.executable, "-c", PRINTING_SCRIPT],
        check=False,
        text=True,
        **{name: target, other: subprocess.PIPE},
    )
    os.close(target)
    assert done.returncode == 7
    printed = getattr(done, other)
    assert "99" in printed and "Exception" not in printed and "Error" not in printed


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii"])
def test_characters_that_a_terminal_does_not_have_are_escaped(encoding):
    code = (
        "from millrace.output import drop_lost_output\n"
        "drop_lost_output(); print('a\\udcff')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "a\\udcff\n"


def test_output_continues_once_there_is_space_again(monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    saved_stderr, full = os.dup(2), full_disk()
    with dropping_lost_output():
        os.dup2(full, 2)
        print("lost", file=sys.stderr)
        os.dup2(saved_stderr, 2)
        print("back", file=sys.stderr)
    os.close(saved_stderr)
    os.close(full)
    assert sys.stderr is sys.__stderr__
    assert capfd.readouterr().err == "back\n"


def test_replaced_streams_are_left_alone_and_may_fail(monkeypatch):
    """As in a notebook; only the console ignores errors."""

    class Broken(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    broken = Broken()
    monkeypatch.setattr(sys, "stderr", broken)
    with dropping_lost_output():
        assert sys.stderr is broken
        Console().line("lost")
    broken.close()
    Console().warning("lost as well")


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_descriptor_is_not_reused_by_the_next_file(closed, tmp_path):
    code = (
        "import os, sys; from millrace.output import drop_lost_output\n"
        "drop_lost_output()\n"
        f"file = open({str(tmp_path / 'file')!r}, 'w'); assert file.fileno() > 2\n"
        "print('x'); print('y', file=sys.stderr); os.write(2, b'z')"
    )
    line = f"'{sys.executable}' -c \"$CODE\" {closed}"
    done = subprocess.run(["sh", "-c", line], check=False, env=os.environ | {"CODE": code})
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(("flag", "seen"), [("-u", b"now\n"), ("-I", b"")])
def test_unbuffered_output_stays_unbuffered(flag, seen):
    """As PYTHONUNBUFFERED requires; buffered output is lost if nothing flushes it."""
    code = (
        f"import os, sys; sys.path.insert(0, {str(Path(millrace.__file__).parents[1])!r})\n"
        "from millrace.output import drop_lost_output\n"
        "drop_lost_output(); print('now'); os._exit(0)"
    )
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, flag, "-c", code]
    assert subprocess.check_output(command, env=variables) == seen


def test_without_standard_error_a_failure_is_not_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    error_line("lost")
    assert capsys.readouterr().out == ""


def test_a_signal_handler_may_print_while_a_line_waits_for_a_full_pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    arrived, is_written = [], threading.Event()

    def handle(number, frame):
        stream.write("stopping\n")
        stream.flush()
        arrived.append(number)

    def interrupt_and_read():
        time.sleep(0.5)  # until the line waits
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        while not is_written.wait(0.01):
            with contextlib.suppress(BlockingIOError):
                os.read(read, 1 << 16)

    before = signal.signal(signal.SIGTERM, handle)
    thread = threading.Thread(target=interrupt_and_read)
    thread.start()
    with os.fdopen(write, "w") as file:
        stream = DroppingStream(file)
        try:
            file.write("x" * (1 << 18))
            file.flush()
        finally:
            is_written.set()
            signal.signal(signal.SIGTERM, before)
            thread.join()
    os.close(read)
    assert arrived == [signal.SIGTERM]


def test_help_into_a_broken_pipe_exits_with_0():
    target = broken_pipe()
    done = subprocess.run(
        [sys.executable, "-m", "millrace", "--help"],
        check=False,
        stdout=target,
        stderr=subprocess.PIPE,
    )
    os.close(target)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_run_with_a_full_log_disk_completes(tmp_path):
    """Summary, report and checkpoints are written."""
    target = full_disk()
    process = subprocess.Popen(
        alone(tmp_path / "run", "--num-epochs", "1"), env=environment(), stderr=target
    )
    os.close(target)
    assert process.wait(timeout=90) == 0
    assert summary(tmp_path / "run")["status"] == "completed"
    assert (tmp_path / "run" / "report.html").exists()
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_run_saves_a_checkpoint_when_its_terminal_is_closed(tmp_path):
    """The kernel and the shell both send SIGHUP, which must not interrupt the saving."""
    own_end, other_end = os.openpty()
    process = subprocess.Popen(
        alone(tmp_path / "run", "--delay", "0.05", "--num-epochs", "50"),
        env=environment() | {"TERM": "xterm"},
        stdout=subprocess.DEVNULL,
        stderr=other_end,
    )
    os.close(other_end)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        os.read(own_end, 4096)  # as a terminal does, so that it never fills up
    os.close(own_end)
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.005)
    assert process.wait(timeout=90) == 130
    found = summary(tmp_path / "run")
    assert (found["status"], found["error"]) == ("interrupted", None)
    newest = max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert newest == f"update-{found['updates']:09}"
