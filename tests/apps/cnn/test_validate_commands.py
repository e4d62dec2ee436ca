"""The validation commands of Graphcore's TensorFlow 1 benchmarks, verbatim.

The number of replicas comes from ``poprun``, where each of them was a process.
"""

import json
import logging
import shlex

import pytest

from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.cli import main
from millrace.config import parse

COMMON = "--repeat 10 --batch-norm --enable-half-partials"
NETWORKS = {
    "resnet": "--model resnet --model-size 50 --dataset imagenet",
    "resnext": "--model resnext --model-size 101 --dataset imagenet",
    "efficientnet": "--model efficientnet --model-size 0 --dataset imagenet "
    "--precision 16.16",
}
SYNTHETIC = {
    name: f"{network} --batch-size 1 --synthetic-data {COMMON}"
    for name, network in NETWORKS.items()
}
GENERATED = {
    name: f"{network} --batch-size {batch} --generated-data {COMMON} --eight-bit-io "
    "--replicas 4"
    for (name, network), batch in zip(NETWORKS.items(), (1, 2, 8), strict=True)
}
COMMANDS = [*SYNTHETIC.items(), *GENERATED.items()]
IDS = [*(f"{n} synthetic" for n in SYNTHETIC), *(f"{n} generated" for n in GENERATED)]

SMALLER = {
    "resnet": "--model-size 10",
    "resnext": "--model-size 14",
    "efficientnet": "--model-size cifar",
}


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=IDS)
def test_a_command_sets_the_expected_options(name, words):
    config = parse(ValidateConfig, shlex.split(words), program="x")[0]
    titles = {
        "resnet": "resnet 50",
        "resnext": "resnext 101",
        "efficientnet": "efficientnet B0",
    }
    assert config.train_config.model_title == titles[name]
    assert config.model.norm_layer["name"] == "batch_norm" and config.repeat == 10
    generated = "--generated-data" in words
    assert config.data.synthetic == ("host" if generated else "device")
    assert config.data.eight_bit_transfer == generated
    assert config.num_replicas == (4 if generated else 1)
    assert config.precision == ("16.16" if name == "efficientnet" else "32.32")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=IDS)
def test_a_command_runs_with_a_small_model(name, words, tmp_path, capsys):
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    small = f"{SMALLER[name]} --image-size 32 --num-batches 2 --latency-calls 2"
    words = shlex.split(f"{words} {small}")
    with pytest.raises(SystemExit) as left:
        main(["cnn", "validate", *words, "--run-dir", str(tmp_path / "run")])
    logger.handlers, logger.level, logger.propagate = kept
    assert left.value.code == 0, capsys.readouterr().err
    (result,) = json.loads((tmp_path / "run" / "summary.json").read_text())["results"]
    assert len(result["samples_per_second"]) == 10
    assert set(result["latency_ms"]) == {"mean", "p50"}  # two calls support no more
