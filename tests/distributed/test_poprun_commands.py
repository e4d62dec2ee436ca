"""The poprun commands of Graphcore's benchmarks, with ``millrace launch`` for poprun."""

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
from millrace.distributed.environment import with_replicas
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
    """poprun and the script give way to ours; nothing else changes."""
    words = shlex.split(command)
    place = next(n for n, word in enumerate(words) if word.endswith(".py"))
    verb = "train" if words[place] == "train.py" else "validate"
    own = words[1 : place - 1]
    return [*own, "millrace", "cnn", verb, *words[place + 1 :]]


def given_to_instance(command: str, monkeypatch) -> tuple[dict[str, str], list[str]]:
    """The variables of an instance, and the words that its command is read from."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    own, words = split_command(replaced(command))
    config, _ = parse(LaunchConfig, own, program="launch")
    variables = Launcher(config, words)._variables(1, "127.0.0.1:5", "/folder")
    for name, value in variables.items():
        if name.startswith("MILLRACE_"):
            monkeypatch.setenv(name, value)
    return variables, words[3:]


@pytest.mark.parametrize(
    ("command", "devices", "batch"),
    [(RESNET, 4, 16_384), (RESNEXT, 2, 768), (EFFICIENTNET, 4, 800)],
)
def test_instances_have_the_replicas_and_batches_of_the_reference(
    command, devices, batch, monkeypatch
):
    variables, words = given_to_instance(command, monkeypatch)
    assert variables["JAX_NUM_CPU_DEVICES"] == str(devices)
    config, _ = parse(CnnConfig, with_replicas(CnnConfig, words), program="x")
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
def test_each_instance_measures_inference_on_a_replica_of_its_own(model, size, monkeypatch):
    variables, words = given_to_instance(INFERENCE.format(model, size), monkeypatch)
    assert variables["JAX_NUM_CPU_DEVICES"] == "1"
    told = with_replicas(ValidateConfig, words)
    assert parse(ValidateConfig, told, program="x")[0].num_replicas == 1


def run(words: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "millrace", "launch", *words],
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
def test_the_training_command_runs_when_it_is_made_small(tmp_path):
    smaller = (
        "--model-size 34 --gradient-accumulation-count 8 --generated-data --image-size 32 "
        f"--batch-size 2 --weight-updates-per-epoch 2 --run-dir {tmp_path}/r"
    )
    fewer = RESNET.replace("=4 --num-instances=4", "=2 --num-instances=2")
    said = run([*replaced(fewer), *smaller.split()])
    assert "one NUMA node" in said or os.path.exists("/sys/devices/system/node/node1")
    found = summary(tmp_path / "r")
    assert (found["status"], found["updates"]) == ("completed", 2)
    assert found["device"]["count"] == 8


@pytest.mark.slow
def test_the_speeds_of_all_instances_are_added_up(tmp_path):
    command = INFERENCE.format("resnet --model-size 18", "--batch-size 2")
    command = command.replace("--num-replicas 4", "--num-replicas 2")
    command = command.replace("--num-instances 4", "--num-instances 2")
    smaller = (
        "--repeat 2 --image-size 32 --num-batches 4 --latency-calls 2 "
        f"--run-dir {tmp_path}/r"
    )
    said = run([*replaced(command), *smaller.split()])
    events = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    speeds = [json.loads(event)["samples_per_second"] for event in events]
    assert len(speeds) == 2 and min(speeds) > 0
    (result,) = summary(tmp_path / "r")["results"]
    of_each = result["samples_per_second_of_each"]
    assert len(of_each) == 2 and min(map(min, of_each)) > 0
    assert speeds == pytest.approx([sum(rates) for rates in zip(*of_each, strict=True)])
    assert result["samples_per_second"] == pytest.approx(speeds)
    assert summary(tmp_path / "r")["device"]["count"] == 2
    assert "in 2 processes" in said and "of the slowest process" in said
