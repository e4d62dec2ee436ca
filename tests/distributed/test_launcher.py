"""What the launcher makes of its words, and what it gives each process."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from launched import environment, finish, start

from millrace.cli import main
from millrace.commands.launch import launch
from millrace.config import ConfigurationError, parse
from millrace.distributed.affinity import bound_to, cores_of_nodes
from millrace.distributed.environment import (
    ProcessInfo,
    find_process_info,
    given_replicas,
    with_replicas,
)
from millrace.distributed.hardware import gpus_for, uses_gpu
from millrace.distributed.launcher import Launcher, _without_noise
from millrace.distributed.options import LaunchConfig, split_command
from millrace.plan import Plan

POPRUN = [
    "--numa-aware=yes --num-replicas=4 --num-instances=4 --ipus-per-replica 4",
    "--numa-aware 1 --num-replicas 4 --ipus-per-replica 4 --num-instances 4",
    "--num-replicas 4 --ipus-per-replica 4 --num-instances 4 --numa-aware 1",
    "--numa-aware --num-replicas 4 --ipus-per-replica 4 --num-instances 4",
    "--num-replicas 4 --ipus-per-replica 4 --num-instances 4 --numa-aware",
]


@pytest.mark.parametrize("words", POPRUN)
@pytest.mark.parametrize("between", ["", "-- "])
def test_the_spellings_of_poprun_are_understood(words, between):
    line = f"{words} {between}python3 train.py --model resnet --num-replicas 9"
    own, command = split_command(line.split())
    assert command == "python3 train.py --model resnet --num-replicas 9".split()
    config, _ = parse(LaunchConfig, own, program="launch")
    found = (config.num_instances, config.num_replicas, config.devices_per_replica)
    assert found == (4, 4, 4)
    assert config.numa_aware


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-instances 2", "launch needs a command to start"),
        ("--num-instances 0 -- true", "num_instances must be at least 1"),
        ("--num-instances 2 --num-replicas 3 -- true", "3 replicas cannot be shared"),
        ("--num-instances 2 -- true --num-replicas 3", "3 replicas cannot be shared"),
        ("--max-restarts -1 -- true", "max_restarts must be 0 or more"),
        ("--patience 61 -- true", "patience must be between 5 and 60"),
        ("--instances 2 -- true", "There is no option --instances"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(words, said):
    with pytest.raises(ConfigurationError) as caught:
        launch(words.split())
    assert said in str(caught.value)


def variables(config: LaunchConfig, *command: str, number: int = 1) -> dict[str, str]:
    return Launcher(config, command or ("true",))._variables(number, "127.0.0.1:5", "/f")


def test_each_process_is_told_its_place_and_gets_its_share_of_devices(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_x=1")
    config = LaunchConfig(num_instances=2, num_replicas=4, devices_per_replica=3)
    found = variables(config)
    assert found["MILLRACE_COORDINATOR"] == "127.0.0.1:5"
    assert (found["MILLRACE_PROCESS_ID"], found["MILLRACE_NUM_PROCESSES"]) == ("1", "2")
    assert found["JAX_NUM_CPU_DEVICES"] == "6"
    assert found["XLA_FLAGS"] == "--xla_x=1"
    assert found["MILLRACE_NUM_REPLICAS"] == "4"


def test_replicas_are_the_launcher_s_the_command_s_or_one_each(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = variables(LaunchConfig(num_instances=2), "train", "--replicas", "8")
    assert found["JAX_NUM_CPU_DEVICES"] == "4"
    assert "MILLRACE_NUM_REPLICAS" not in found
    found = variables(LaunchConfig(num_instances=2), "train")
    assert (found["JAX_NUM_CPU_DEVICES"], found["MILLRACE_NUM_REPLICAS"]) == ("1", "2")


def test_a_command_takes_the_launcher_s_replicas_and_says_so(monkeypatch, capsys):
    monkeypatch.setenv("MILLRACE_NUM_REPLICAS", "4")
    words = with_replicas(Plan, ["--num-replicas=2"])
    assert parse(Plan, words, program="x")[0].num_replicas == 4
    assert "2 replicas are asked for, but millrace launch has 4" in capsys.readouterr().err
    assert with_replicas(LaunchConfig, ["x"]) == ["x", "--num-replicas", "4"]


def test_the_last_number_of_replicas_that_a_command_names_counts():
    assert given_replicas(["--num-replicas", "2", "--replicas=3"]) == "3"
    assert given_replicas(["--num_replicas", "2"]) == "2"
    assert given_replicas(["train"]) is None


def test_gpus_are_shared_out_or_found_to_be_too_few():
    four = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert uses_gpu(four) and not uses_gpu(four | {"JAX_PLATFORMS": "cpu"})
    assert [gpus_for(n, 2, 2, four) for n in range(2)] == ["4,5", "6,7"]
    with pytest.raises(ConfigurationError, match="need 8 GPUs, but there are 4"):
        gpus_for(0, 4, 2, four)


def test_what_is_started_for_a_numa_node_runs_on_its_cores(tmp_path):
    some = min(os.sched_getaffinity(0))
    for number, cores in enumerate((str(some), "4000-4003")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    assert cores_of_nodes(tmp_path) == [{some}]  # the other's are not ours to use
    code = "import os; print(os.sched_getaffinity(0))"
    with bound_to({some}):
        found = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert found.strip() == str({some})
    assert len(os.sched_getaffinity(0)) >= 1


MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
SLURM = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("found_in", "expected"),
    [
        ({}, None),
        (MPI | {"OMPI_MCA_orte_hnp_uri": "x"}, ProcessInfo(None, None, None, "Open MPI")),
        (
            MPI | {"JAX_COORDINATOR_ADDRESS": "h:1"},
            ProcessInfo("h:1", 1, 2, "Open MPI"),
        ),
        (SLURM, ProcessInfo(None, None, None, "Slurm")),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        (
            {"KUBERNETES_SERVICE_HOST": "k", "JOB_COMPLETION_INDEX": "0"},
            ProcessInfo(None, None, None, "Kubernetes"),
        ),
        ({"KUBERNETES_SERVICE_HOST": "k"}, None),
    ],
)
def test_a_cluster_s_launcher_is_recognized_by_its_variables(found_in, expected):
    assert find_process_info(environment=found_in) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("h:1", None, 2), "go together"),
        (("h", 0, 2), "HOST:PORT"),
        (("h:x", 0, 2), "HOST:PORT"),
        (("h:1", 2, 2), "from 0 to 1"),
    ],
)
def test_a_place_that_cannot_be_is_refused(given, said):
    with pytest.raises(ConfigurationError, match=said):
        find_process_info(*given, environment={})


def test_only_a_coordinator_on_the_loopback_is_local():
    assert ProcessInfo("127.0.0.1:5", 0, 2).is_local
    assert not ProcessInfo("10.0.0.1:5", 0, 2).is_local
    assert not ProcessInfo(None, None, None, "Slurm").is_local


def millrace_launch(*words: str) -> list[str]:
    return [sys.executable, "-m", "millrace", "launch", *words]


SHELL = ("--num-instances", "2", "--", "sh", "-c")


@pytest.mark.parametrize("busy", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_the_status_is_that_of_the_first_failure(busy):
    code = f"test $MILLRACE_PROCESS_ID = 0 && exec sleep {busy}; exit 7"
    began = time.monotonic()
    said = finish(start(millrace_launch(*SHELL, code)), status=7)
    assert "failed with status 7; stopping the others" in said
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_every_process_once(number):
    code = "trap 'echo got it; exit 130' TERM HUP; echo ready; sleep 20 & wait"
    process = start(millrace_launch(*SHELL, code))
    assert process.stdout is not None
    assert sorted(process.stdout.readline()[4:] for _ in range(2)) == ["ready\n"] * 2
    time.sleep(0.5)  # until the shells wait: a trap set off before that may be missed
    process.send_signal(number)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert sorted(said.splitlines()) == ["[0] got it", "[1] got it"]


def test_a_process_that_a_signal_kills_has_failed_and_is_named():
    code = "test $MILLRACE_PROCESS_ID = 0 && exec sleep 1; kill -KILL $$"
    said = finish(start(millrace_launch(*SHELL, code)), status=1)
    assert re.search(r"instance 1 \(pid \d+\) was killed by SIGKILL; stopping", said)


def test_processes_that_do_not_listen_for_signals_are_interrupted_by_them():
    process = start(millrace_launch(*SHELL, "echo ready; exec sleep 60"))
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    said = finish(process, status=130)
    assert "was killed" not in said


def test_processes_that_do_not_stop_when_told_twice_are_killed(monkeypatch, capfd):
    monkeypatch.setattr("millrace.distributed.launcher._GRACE_SECONDS", 0.3)
    ours = os.getpid()
    code = f"trap '' TERM; kill -TERM {ours}; sleep 0.5; kill -TERM {ours}; sleep 60"
    began = time.monotonic()
    assert launch(["--", "sh", "-c", code]) == 130
    assert time.monotonic() - began < 30
    assert "instance 0 has not stopped in 0.3 s: killing" in capfd.readouterr().err


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_launch_whose_output_nobody_reads_ends_as_its_processes_do(stream):
    """They print more than a pipe holds, so that one that is not emptied stops them."""
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


def test_a_wrong_command_is_not_started_again():
    words = ("--max-restarts", "3", *SHELL, "echo tried; exit 2")
    said = finish(start(millrace_launch(*words)), status=2)
    assert said.count("tried") == 2 and "starting again" not in said


def test_a_command_that_cannot_be_started_is_one_line_and_status_2(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # two processes need two GPUs
    (tmp_path / "train.py").write_text("print('not executable')")
    for name, why in [
        ("nosuchcmd", "No such file or directory"),
        (str(tmp_path / "train.py"), "Permission denied"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(["launch", "-n", "2", "--", name])
        assert capsys.readouterr().err == f"millrace: Cannot start {name}: {why}.\n"


def test_a_restart_that_cannot_go_on_says_why(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yml").write_text("command: cnn-train\n")
    (tmp_path / "run-directory").write_text(str(run))
    monkeypatch.setenv("MILLRACE_LAUNCH_DIR", str(tmp_path))
    monkeypatch.setattr("millrace.run.process._begun", [])  # as in a process of its own
    words = ["cnn", "train", "--config", "digits_demo", "--checkpoints", "False"]
    with pytest.raises(SystemExit, match="2"):
        main(words)
    said = capsys.readouterr().err
    assert said.startswith(f"millrace: Cannot continue the run in {run}: resume needs")


def test_help_is_the_launcher_s_own():
    done = subprocess.run(
        millrace_launch("--help"), env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0 and "--max-restarts" in done.stdout


END = b" is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"


def heard_of(*said: bytes) -> str:
    return "".join(f"[1] {line}\n" for line in _without_noise(said))


@pytest.mark.parametrize(
    "said",
    [
        (b"[Gloo] Rank 1" + END,),
        (b"[Gloo] Rank [Gloo] Rank 23" + END, END),
        (b"[Gloo] Rank 2[Gloo] Rank 3" + END[:-2] + END[:-1] + b"3\n", b"\n"),
        (b"[Gloo] Rank [Gloo] Rank 2" + END, b"3" + END),
        (b"[Gloo] Rank 1[Gloo] Rank 1 is connected to " + END[:-2], b"33\n"),
    ],
)
def test_what_gloo_says_at_every_start_is_left_out_also_when_its_threads_cut_in(said):
    assert heard_of(*said, b"\n", b"3 is connected\n") == "[1] \n[1] 3 is connected\n"


def test_a_line_that_comes_in_the_middle_of_what_gloo_says_is_kept():
    said = heard_of(b"[Gloo] Rank [Gloo] Rank 2" + END, b"3compiling\n", END, b"7\n")
    assert said == "[1] compiling\n[1] 7\n"
