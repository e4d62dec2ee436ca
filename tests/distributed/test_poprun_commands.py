"""The poprun commands of Graphcore's benchmarks, run with ``millrace launch``."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from launched import environment, summary

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.config import parse
from millrace.distributed.environment import add_launcher_replicas
from millrace.distributed.launcher import Launcher
from millrace.distributed.options import LaunchConfig, split_command

RESNET = (
    "poprun --numa-aware=yes --num-replicas=4 --num-instances=4 --ipus-per-replica 4 "
    "python train.py --model resnet --model-size 50 --dataset imagenet "
    "--data-dir $DATASETS_DIR/ --ckpts-per-epoch 0 --batch-size 16 "
    "--gradient-accumulation-count 256 --epochs 1 --no-validation --xla-recompute "
    "--optimiser momentum --momentum 0.9 --normalise-input --stable-norm "
    "--internal-exchange-optimisation-target balanced --enable-half-partials "
    "--standard-imagenet --pipeline-num-parallel 32 --pipeline-schedule Grouped "
    "--no-dataset-cache --shards=4 --pipeline-splits b1/2/relu b2/3/relu b3/3/relu "
    "--pipeline --batch-norm --available-memory-proportion 0.15 "
    "--disable-variable-offloading --precision 16.32 --eight-bit-io"
)
RESNEXT = (
    "poprun --numa-aware 1 --num-replicas 8 --ipus-per-replica 2 --num-instances 8 "
    "python train.py --model resnext --model-size 101 --dataset imagenet "
    "--data-dir $DATASETS_DIR --shards 2 --batch-size 6 --pipeline "
    "--gradient-accumulation-count 16 --pipeline-splits b3/3/relu --epoch 2 "
    "--ckpts-per-epoch 0 --xla-recompute --normalise-input "
    "--internal-exchange-optimisation-target balanced --enable-half-partials "
    "--stable-norm --base-learning-rate -11 --pipeline-schedule Grouped "
    "--optimiser momentum --momentum 0.9 --lr-schedule cosine --label-smoothing 0.1 "
    "--no-validation --disable-variable-offloading --standard-imagenet --eight-bit-io"
)
EFFICIENTNET = (
    "poprun --numa-aware 1 --num-replicas 4 --ipus-per-replica 4 --num-instances 4 "
    "python3 train.py --model=efficientnet --model-size=4 --data-dir $DATASETS_DIR/ "
    "--precision=16.32 --group-dim=16 --expand-ratio=4 --dataset=imagenet --groups=4 "
    "--optimizer=RMSprop --lr-schedule=exponential --xla-recompute "
    "--enable-conv-dithering --available-memory-proportion=0.15 "
    "--pipeline-schedule Grouped --internal-exchange-optimisation-target balanced "
    "--weight-avg-exp 0.97 --enable-half-partials --cutmix-lambda 0.85 "
    "--mixup-alpha=0.2 --disable-variable-offloading --batch-size=5 --shards=4 "
    "--pipeline-split block2c block4c block6a --pipeline "
    "--gradient-accumulation-count=40 --no-validation --epochs 1"
)
INFERENCE = (
    "poprun --num-replicas 4 --ipus-per-replica 1 --num-instances 4 --numa-aware 1 "
    "python3 validation.py --model {} --dataset imagenet {} --generated-data --repeat 10 "
    "--batch-norm --enable-half-partials --eight-bit-io"
)


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


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("resnet --model-size 50", "--batch-size 1"),
        ("resnext --model-size 101", "--batch-size 2"),
        ("efficientnet --model-size 0", "--precision 16.16 --batch-size 8"),
    ],
)
def test_each_process_measures_inference_on_its_own_replica(model, size, monkeypatch):
    variables, args = given_to_process(INFERENCE.format(model, size), monkeypatch)
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
    command = INFERENCE.format("resnet --model-size 18", "--batch-size 2")
    command = command.replace("--num-replicas 4", "--num-replicas 2")
    command = command.replace("--num-instances 4", "--num-instances 2")
    smaller = (
        "--repeat 2 --image-size 32 --num-batches 4 --latency-calls 2 "
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
