"""The poprun commands of Graphcore's benchmarks, run with ``millrace launch``."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from launched import environment, summary
from seed_lines import LINES, find_line

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.config import parse
from millrace.distributed.environment import add_launcher_replicas
from millrace.distributed.launcher import Launcher
from millrace.distributed.options import LaunchConfig, split_command

RESNET = find_line("poprun --numa-aware=yes ")
RESNEXT = find_line("poprun --numa-aware 1 --num-replicas 8 ")
EFFICIENTNET = find_line("poprun --numa-aware 1 --num-replicas 4 ")
INFERENCE = [line for _, line in LINES if line.startswith("poprun --num-replicas 4 ")]


def replaced(command: str) -> list[str]:
    """Replace poprun and the script by ours, and nothing else."""
    args = shlex.split(command)
    script = next(n for n, arg in enumerate(args) if arg.endswith(".py"))
    verb = "train" if args[script] == "train.py" else "validate"
    return [*args[1 : script - 1], "millrace", "cnn", verb, *args[script + 1 :]]


def given_to_process(command: str, monkeypatch) -> tuple[dict[str, str], list[str]]:
    """Return the environment variables of a process and the arguments of its command."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    own, args = split_command(replaced(command))
    config, _ = parse(LaunchConfig, own, program="launch")
    variables = Launcher(config, args)._get_variables(1, "127.0.0.1:5", "/folder")
    for name, value in variables.items():
        if name.startswith("MILLRACE_"):
            monkeypatch.setenv(name, value)
    return variables, args[3:]


@pytest.mark.parametrize(
    ("command", "devices", "batch"),
    [(RESNET, 4, 16_384), (RESNEXT, 2, 768), (EFFICIENTNET, 4, 800)],
)
def test_processes_have_the_replicas_and_batches_of_the_reference(
    command, devices, batch, monkeypatch
):
    variables, args = given_to_process(command, monkeypatch)
    assert variables["JAX_NUM_CPU_DEVICES"] == str(devices)
    config, _ = parse(CnnConfig, add_launcher_replicas(CnnConfig, args), program="x")
    assert config.plan.batching.global_batch_size == batch
    assert config.plan.num_replicas == int(variables["MILLRACE_NUM_PROCESSES"])


@pytest.mark.parametrize("line", INFERENCE)
def test_each_process_measures_inference_on_its_own_replica(line, monkeypatch):
    variables, args = given_to_process(line, monkeypatch)
    assert variables["JAX_NUM_CPU_DEVICES"] == "1"
    args = add_launcher_replicas(ValidateConfig, args)
    assert parse(ValidateConfig, args, program="x")[0].num_replicas == 1


def run(args: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "millrace", "launch", *args],
        env=environment() | {"DATASETS_DIR": os.devnull},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_a_smaller_version_of_the_training_command_runs(tmp_path):
    smaller = (
        "--model-size 34 --gradient-accumulation-count 8 --generated-data --image-size 32 "
        f"--batch-size 2 --weight-updates-per-epoch 2 --run-dir {tmp_path}/r"
    )
    fewer = RESNET.replace("=4 --num-instances=4", "=2 --num-instances=2")
    output = run([*replaced(fewer), *smaller.split()])
    assert "one NUMA node" in output or os.path.exists("/sys/devices/system/node/node1")
    found = summary(tmp_path / "r")
    assert (found["status"], found["updates"]) == ("completed", 2)
    assert found["device"]["count"] == 8


@pytest.mark.slow
def test_the_throughputs_of_all_processes_are_added(tmp_path):
    command = INFERENCE[0].replace("--num-replicas 4", "--num-replicas 2")
    command = command.replace("--num-instances 4", "--num-instances 2")
    smaller = (
        "--model-size 18 --batch-size 2 --repeat 2 --image-size 32 --num-batches 4 "
        "--latency-calls 2 "
        f"--run-dir {tmp_path}/r"
    )
    output = run([*replaced(command), *smaller.split()])
    events = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    speeds = [json.loads(event)["samples_per_second"] for event in events]
    assert len(speeds) == 2 and min(speeds) > 0
    (result,) = summary(tmp_path / "r")["results"]
    of_each = result["samples_per_second_of_each"]
    assert len(of_each) == 2 and min(map(min, of_each)) > 0
    assert speeds == pytest.approx([sum(rates) for rates in zip(*of_each, strict=True)])
    assert result["samples_per_second"] == pytest.approx(speeds)
    assert summary(tmp_path / "r")["device"]["count"] == 2
    assert "in 2 processes" in output and "of the slowest process" in output
