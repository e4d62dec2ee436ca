"""Options of ``millrace launch``, and how it starts, watches and stops processes."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from launched import environment, finish, start

from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.cli import main
from millrace.config import ConfigurationError, build, parse
from millrace.distributed.launcher import Launcher, launch
from millrace.distributed.options import LaunchConfig, split_command
from millrace.distributed.relay import _drop_noise
from millrace.run.process import prepare_process

POPRUN = [
    "--numa-aware=yes --num-replicas=4 --num-instances=4 --ipus-per-replica 4",
    "--numa-aware 1 --num-replicas 4 --ipus-per-replica 4 --num-instances 4",
    "--num-replicas 4 --ipus-per-replica 4 --num-instances 4 --numa-aware 1",
    "--numa-aware --num-replicas 4 --ipus-per-replica 4 --num-instances 4",
    "--num-replicas 4 --ipus-per-replica 4 --num-instances 4 --numa-aware",
]


@pytest.mark.parametrize("options", POPRUN)
@pytest.mark.parametrize("separator", ["", "-- "])
def test_the_spellings_of_poprun_are_accepted(options, separator):
    line = f"{options} {separator}python3 train.py --model resnet --num-replicas 9"
    own, command = split_command(line.split())
    assert command == "python3 train.py --model resnet --num-replicas 9".split()
    config, _ = parse(LaunchConfig, own, program="launch")
    counts = (config.num_instances, config.num_replicas, config.devices_per_replica)
    assert counts == (4, 4, 4)
    assert config.numa_aware


@pytest.mark.parametrize("number", [["-n", "2"], ["-n2"], ["-n=2"]])
def test_the_number_of_processes_has_a_short_option(number):
    own, command = split_command([*number, "cnn", "train"])
    assert command == ["cnn", "train"]
    assert parse(LaunchConfig, own, program="launch")[0].num_instances == 2


@pytest.mark.parametrize("option", ["--timeout", "--patience"])
def test_the_timeout_keeps_its_old_name_as_an_alias(option):
    own, command = split_command([option, "45", "true"])
    assert command == ["true"]
    assert parse(LaunchConfig, own, program="launch")[0].timeout == 45


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--num-instances 2", "launch needs a command to start"),
        ("--num-instances 0 -- true", "num_instances must be at least 1"),
        ("--num-instances 2 --num-replicas 3 -- true", "num_replicas (3) must be a"),
        ("--num-instances 2 -- true --num-replicas 3", "num_replicas (3) must be a"),
        ("--max-restarts -1 -- true", "max_restarts must be 0 or more"),
        ("--timeout 61 -- true", "timeout must be between 5 and 60"),
        ("--instances 2 -- true", "Unknown option --instances"),
    ],
)
def test_a_mistake_is_reported_before_anything_starts(args, message):
    with pytest.raises(ConfigurationError) as caught:
        launch(args.split())
    assert message in str(caught.value)


def variables(config: LaunchConfig, *command: str, number: int = 1) -> dict[str, str]:
    launcher = Launcher(config, command or ("true",))
    return launcher._get_variables(number, "127.0.0.1:5", "/f")


def test_each_process_gets_its_number_and_its_share_of_devices(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_x=1")
    config = LaunchConfig(num_instances=2, num_replicas=4, devices_per_replica=3)
    found = variables(config)
    assert found["MILLRACE_COORDINATOR"] == "127.0.0.1:5"
    assert (found["MILLRACE_PROCESS_ID"], found["MILLRACE_NUM_PROCESSES"]) == ("1", "2")
    assert found["JAX_NUM_CPU_DEVICES"] == "6"
    assert found["XLA_FLAGS"] == "--xla_x=1"
    assert found["MILLRACE_NUM_REPLICAS"] == "4"


def test_replicas_come_from_the_launcher_or_the_command_or_are_one_per_process(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = variables(LaunchConfig(num_instances=2), "train", "--replicas", "8")
    assert found["JAX_NUM_CPU_DEVICES"] == "4"
    assert "MILLRACE_NUM_REPLICAS" not in found
    found = variables(LaunchConfig(num_instances=2), "train")
    assert (found["JAX_NUM_CPU_DEVICES"], found["MILLRACE_NUM_REPLICAS"]) == ("1", "2")


def millrace_launch(*args: str) -> list[str]:
    return [sys.executable, "-m", "millrace", "launch", *args]


SHELL = ("--num-instances", "2", "--", "sh", "-c")


@pytest.mark.parametrize("busy", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_the_status_is_that_of_the_first_failure(busy):
    code = f"test $MILLRACE_PROCESS_ID = 0 && exec sleep {busy}; exit 7"
    began = time.monotonic()
    output = finish(start(millrace_launch(*SHELL, code)), status=7)
    assert "failed with status 7; stopping the others" in output
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_every_process_once(number):
    code = "trap 'echo got it; exit 130' TERM HUP; echo ready; sleep 20 & wait"
    process = start(millrace_launch(*SHELL, code))
    assert process.stdout is not None
    assert sorted(process.stdout.readline()[4:] for _ in range(2)) == ["ready\n"] * 2
    time.sleep(0.5)  # until the shells wait: a trap before that may be missed
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert sorted(output.splitlines()) == ["[0] got it", "[1] got it"]


def test_a_process_killed_by_a_signal_has_failed_and_is_named():
    code = "test $MILLRACE_PROCESS_ID = 0 && exec sleep 1; kill -KILL $$"
    output = finish(start(millrace_launch(*SHELL, code)), status=1)
    assert re.search(r"process 1 \(pid \d+\) was killed by SIGKILL; stopping", output)


def test_processes_without_signal_handlers_count_as_interrupted():
    process = start(millrace_launch(*SHELL, "echo ready; exec sleep 60"))
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    output = finish(process, status=130)
    assert "was killed" not in output


def test_a_signal_while_processes_are_started_reaches_all_of_them(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # two processes need two GPUs
    start_one, began = Launcher._start, time.monotonic()

    def interrupt_after_the_first(self, number, *args):
        child = start_one(self, number, *args)
        if number == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return child

    monkeypatch.setattr(Launcher, "_start", interrupt_after_the_first)
    assert launch(["-n", "2", "--", "sleep", "60"]) == 130
    assert time.monotonic() - began < 30


def test_a_signal_before_a_restart_reaches_the_restarted_processes(monkeypatch, tmp_path):
    may_restart, began = Launcher._may_restart, time.monotonic()

    def interrupt_afterwards(self, *args):
        answer = may_restart(self, *args)
        os.kill(os.getpid(), signal.SIGTERM)
        return answer

    monkeypatch.setattr(Launcher, "_may_restart", interrupt_afterwards)
    file = tmp_path / "restarted"
    code = f"test -e {file} && exec sleep 60; touch {file}; exit 1"
    assert launch(["--max-restarts", "1", "--", "sh", "-c", code]) == 130
    assert time.monotonic() - began < 30


def test_processes_that_ignore_two_signals_are_killed(monkeypatch, capfd):
    monkeypatch.setattr("millrace.distributed.launcher._GRACE_SECONDS", 0.3)
    ours = os.getpid()
    code = f"trap '' TERM; kill -TERM {ours}; sleep 0.5; kill -TERM {ours}; sleep 60"
    began = time.monotonic()
    assert launch(["--", "sh", "-c", code]) == 130
    assert time.monotonic() - began < 30
    assert "process 0 did not stop within 0.3 s; killing it" in capfd.readouterr().err


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_launch_whose_output_nobody_reads_ends_like_its_processes(stream):
    """They print more than a pipe holds: if nobody emptied it, they would block."""
    redirect = {"stdout": "", "stderr": "1>&2"}[stream]
    code = f"head -c 200000 /dev/zero | tr '\\0' '\\n' {redirect}; exit 7"
    process = subprocess.Popen(
        millrace_launch("--", "sh", "-c", code),
        env=environment(),
        **{stream: subprocess.PIPE},
    )
    reader = getattr(process, stream)
    reader.readline()
    reader.close()
    assert process.wait(timeout=30) == 7


EXIT_WHILE_PRINTING = """
import io, sys, threading, time
from millrace.distributed.relay import print_line

class SlowFile(io.FileIO):
    def write(self, data):
        written.set()
        time.sleep(0.5)
        return len(data)

written = threading.Event()
sys.stdout = io.TextIOWrapper(io.BufferedWriter(SlowFile(1, "w", closefd=False)))
threading.Thread(target=print_line, args=("line", sys.stdout), daemon=True).start()
written.wait()
sys.exit(7)
"""


def test_a_process_that_exits_while_a_line_is_printed_keeps_its_status():
    ended = subprocess.run(
        [sys.executable, "-c", EXIT_WHILE_PRINTING], env=environment(), capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (7, b"")


def test_a_wrong_command_is_not_restarted():
    args = ("--max-restarts", "3", *SHELL, "echo tried; exit 2")
    output = finish(start(millrace_launch(*args)), status=2)
    assert output.count("tried") == 2 and "restarting" not in output


def test_a_command_that_cannot_be_started_is_one_line_and_status_2(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # two processes need two GPUs
    (tmp_path / "train.py").write_text("print('not executable')")
    for name, reason in [
        ("nosuchcmd", "No such file or directory"),
        (str(tmp_path / "train.py"), "Permission denied"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(["launch", "-n", "2", "--", name])
        assert capsys.readouterr().err == f"millrace: Cannot start {name}: {reason}.\n"


def test_a_restart_that_cannot_resume_reports_why(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yml").write_text("command: cnn-train\n")
    (tmp_path / "run-directory").write_text(str(run))
    monkeypatch.setenv("MILLRACE_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setattr("millrace.run.process._begun", [])  # as in a process of its own
    args = ["cnn", "train", "--config", "digits_demo", "--checkpoints", "False"]
    with pytest.raises(SystemExit, match="2"):
        main(args)
    errors = capsys.readouterr().err
    assert errors.startswith(f"millrace: Cannot continue the run in {run}: resume needs")


def test_a_restart_of_what_cannot_be_resumed_starts_it_again(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yml").write_text("command: cnn-validate\n")
    (tmp_path / "run-directory").write_text(str(run))
    monkeypatch.setenv("MILLRACE_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setattr("millrace.run.process._begun", [])
    options = prepare_process(build(ValidateConfig, {})).run
    assert (options.run_dir, options.resume) == (run, False)


def test_help_before_the_command_is_that_of_the_launcher():
    done = subprocess.run(
        millrace_launch("--help"), env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0 and "--max-restarts" in done.stdout


END = b" is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"


def printed(*lines: bytes) -> str:
    return "".join(f"[1] {line}\n" for line in _drop_noise(lines))


@pytest.mark.parametrize(
    "lines",
    [
        (b"[Gloo] Rank 1" + END,),
        (b"[Gloo] Rank [Gloo] Rank 23" + END, END),
        (b"[Gloo] Rank 2[Gloo] Rank 3" + END[:-2] + END[:-1] + b"3\n", b"\n"),
        (b"[Gloo] Rank [Gloo] Rank 2" + END, b"3" + END),
        (b"[Gloo] Rank 1[Gloo] Rank 1 is connected to " + END[:-2], b"33\n"),
    ],
)
def test_what_gloo_prints_at_every_start_is_dropped_even_interleaved(lines):
    assert printed(*lines, b"\n", b"3 is connected\n") == "[1] \n[1] 3 is connected\n"


def test_a_line_in_the_middle_of_what_gloo_prints_is_kept():
    output = printed(b"[Gloo] Rank [Gloo] Rank 2" + END, b"3compiling\n", END, b"7\n")
    assert output == "[1] compiling\n[1] 7\n"
