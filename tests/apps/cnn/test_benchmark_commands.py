"""The training commands of Graphcore's TensorFlow 1 benchmarks, verbatim.

The number of replicas comes from ``poprun`` if the command does not have it.
"""

import json
import logging
import math
import shlex

import pytest
from seed_lines import find_line, training_options

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.models import catalog
from millrace.apps.cnn.program import build_norm
from millrace.apps.cnn.train import plan_events
from millrace.cli import main
from millrace.config import ConfigurationError, option_value, parse

IMAGES = 1_281_167

COMMANDS = {
    name: training_options(find_line(start))
    for name, start in {
        "resnet50 m2000": "python train.py --model resnet ",
        "resnet50 pod16": "poprun --numa-aware=yes ",
        "resnext101 m2000": "python train.py --model resnext ",
        "resnext101 pod16": "poprun --numa-aware 1 --num-replicas 8 ",
        # The two "standard" commands in the README are the same.
        "efficientnet m2000": "python3 train.py --model=efficientnet ",
        "efficientnet pod16": "poprun --numa-aware 1 --num-replicas 4 ",
    }.items()
}


def parsed(words):
    return parse(CnnConfig, shlex.split(words), program="x")[0]


@pytest.mark.parametrize(
    ("name", "batch", "updates", "per_line"),
    [
        ("resnet50 m2000", 16_384, 78, 4),
        ("resnet50 pod16", 16_384, 78, 4),
        ("resnext101 m2000", 768, 1668, 104),
        ("resnext101 pod16", 768, 1668, 104),
        ("efficientnet m2000", 200, 6405, 400),
        ("efficientnet pod16", 800, 1601, 100),
    ],
)
def test_batches_updates_and_logs_are_those_of_the_original(name, batch, updates, per_line):
    config = parsed(COMMANDS[name])
    schedule = plan_events(config, IMAGES)
    assert config.plan.batching.global_batch_size == batch
    assert schedule.updates_per_epoch == updates
    assert schedule.periods["log"] == per_line
    assert not schedule.warnings
    assert config.workflow.validation is False
    assert (config.plan.pipeline_schedule, config.plan.recomputation) == ("grouped", True)
    assert config.plan.optimizer_state_offloading is False
    model = catalog.build_layers(
        config.resolved_model, 1000, build_norm(config), **config.network
    )
    names = [layer.name for layer in model]
    splits = catalog.find_split_layers(model, config.plan.pipeline_splits)
    assert len(splits) + 1 == config.plan.num_stages == config.graphcore.shards
    assert [names.index(str(split)) for split in splits]


def test_the_resnet_command_sets_the_expected_options():
    config = parsed(COMMANDS["resnet50 m2000"])
    assert config.model_title == "resnet 50"
    assert config.model.norm_layer["name"] == "batch_norm"
    assert config.recipe.optimizer == "sgd" and config.recipe.optimizer_params == {
        "momentum": 0.9
    }
    assert config.data.eight_bit_transfer and config.data.accelerator_side_preprocess
    assert config.plan.precision == "16.32"
    # 2^-11 per sample, divided by ten four times, warming up for five epochs
    assert config.recipe.lr_schedule == "stepped"
    assert config.recipe.lr_schedule_params["values"][0] == 2**-11 * 16_384
    assert config.recipe.lr_schedule_params["boundaries"] == [0.3, 0.6, 0.8, 0.9]
    assert config.recipe.lr_warmup_params == {"warmup_mode": "mask", "warmup_epochs": 5}
    assert config.recipe.l2_regularization == 1e-4 and config.recipe.decay_kernels_only


def test_the_resnext_command_sets_the_expected_options():
    config = parsed(COMMANDS["resnext101 m2000"])
    assert config.model.norm_layer == {
        "name": "group_norm", "num_groups": 32, "epsilon": 1e-6}  # fmt: skip
    assert (config.workflow.num_epochs, config.plan.num_replicas) == (2, 2)
    assert config.recipe.lr_schedule_params == {
        "initial_learning_rate": 2**-11, "epochs_to_total_decay": 2}  # fmt: skip
    assert (config.recipe.label_smoothing, config.recipe.label_smoothing_over) == (
        0.1,
        "others",
    )


def test_the_efficientnet_command_sets_the_expected_options():
    config = parsed(COMMANDS["efficientnet m2000"])
    assert (config.model.group_dim, config.model.expand_ratio) == (16, 4)
    assert config.resolved_image_size == 380
    assert (
        config.model.norm_layer["num_groups"] == 4
        and config.model.norm_layer["epsilon"] == 1e-3
    )
    assert config.recipe.optimizer == "rmsprop"
    assert config.recipe.optimizer_params == {
        "momentum": 0.9,
        "base_decay_exponent": -14,
        "epsilon": 0.001,
        "initial_accumulator": 1.0,
    }
    assert config.recipe.lr_schedule_params == {
        "initial_learning_rate": 2**-14,
        "epochs_to_total_decay": 2,
        "num_decays": 146,
        "decay_rate": 0.97,
    }
    assert (config.recipe.mixup_alpha, config.recipe.cutmix_lambda) == (0.2, 0.85)
    assert config.recipe.weight_avg_exp == [0.97]
    assert config.recipe.label_smoothing == 0.1  # the default of the family on ImageNet
    assert config.recipe.l2_regularization == 1e-5


def test_options_of_the_validation_commands_are_accepted():
    words = (
        "--model resnet --model-size 50 --dataset imagenet --batch-size 1 {} --batch-norm"
    )
    assert parsed(words.format("--synthetic-data")).data.synthetic == "device"
    assert parsed(words.format("--generated-data --eight-bit-io")).data.synthetic == "host"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--model resnet --dataset cifar10", {"model_title": "resnet 20"}),
        ("--model RESNEXT --dataset cifar10", {"model_title": "resnext 11"}),
        ("--model resnet", {"num_epochs": 160, "l2_regularization": 1e-6,
                            "norm_layer": {"name": "batch_norm", "epsilon": 1e-5}}),
        ("--model resnet --groups 8", {"norm_layer": {
            "name": "group_norm", "num_groups": 8, "epsilon": 1e-6}}),
        ("--model resnet --dataset imagenet", {"model_title": "resnet 18", "norm_layer": {
            "name": "group_norm", "num_groups": 32, "epsilon": 1e-6}}),
        # Published weights have batch norm.
        ("--model resnet --dataset imagenet --pretrained x", {"norm_layer": {
            "name": "batch_norm", "epsilon": 1e-5}}),
        ("--model resnet --weight-decay 0.1", {"l2_regularization": 0}),
        ("--model resnet --label-smoothing 0.2", {"label_smoothing": 0.2}),
        ("--model resnet --logs-per-epoch 2", {"logs_per_epoch": 2}),
        ("--model efficientnet --dataset imagenet --label-smoothing 0",
         {"label_smoothing": 0, "num_epochs": 350}),
        ("--model resnet --optimizer lars --base-learning-rate -9 --momentum 0.8",
         {"optimizer_params": {"momentum": 0.8, "weight_decay": 1e-6, "eeta": 0.001,
                               "epsilon": 0}, "l2_regularization": 0}),
        ("--model resnet --lr-schedule polynomial --epochs 45", {
            "lr_schedule_params": {"initial_learning_rate": 2**-6,
                "epochs_to_total_decay": 40, "end_learning_rate_ratio": 1e-5, "power": 2},
            "lr_warmup_params": {"warmup_mode": "shift", "warmup_epochs": 5}}),
        ("--model resnet --lr-warmup-params None", {"lr_warmup_params": None}),
        # Other models have no recipe, but the shorthands work.
        ("--model resnet50 --optimiser momentum", {"optimizer_params": {"momentum": 0.9}}),
        ("--momentum 0.5", {"optimizer_params": {"momentum": 0.5}}),
        ("--base-learning-rate -10", {
            "lr_schedule_params": {"initial_learning_rate": 2**-10}}),
        ("--base-learning-rate -10 --lr-schedule cosine --epochs 3", {
            "lr_schedule_params": {"initial_learning_rate": 2**-10,
                                   "epochs_to_total_decay": 3}}),
        ("--pipeline --shards 3", {"pipeline_splits": [3]}),
        ("--batch-norm False", {"norm_layer": {
            "name": "group_norm", "num_groups": 32, "epsilon": 1.001e-5}}),
    ],
    ids=str,
)  # fmt: skip
def test_shorthands_and_recipes_of_families_set_options(words, options):
    config = parsed(words + " --gradient-accumulation-count 6 --recipe graphcore")
    found = {
        name: config.model_title if name == "model_title" else option_value(config, name)
        for name in options
    }
    assert found == options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pipeline", "pipeline needs pipeline_splits, or .*got neither"),
        ("--pipeline --shards 1", "got shards 1"),
        ("--shards 2 --pipeline-schedule Grouped", "is for a pipeline: give pipeline"),
        ("--pipeline --shards 4 --pipeline-splits a b", "needs 3 pipeline_splits; got 2"),
        ("--pipeline False --pipeline-splits a", "pipeline is False"),
        ("--batch-norm --groups 4", "groups is for group norm"),
        ("--groups 0", "groups must be at least 1"),
        ("--generated-data --synthetic-data", "but synthetic_data is device"),
        ("--eight-bit-io --eight-bit-transfer False", "eight_bit_transfer True, but"),
        ("--model resnet --dataset imagenet --optimizer lars", "give learning_rate, or"),
        ("--normalise-input False", "normalize_input is for imagenet"),
    ],
    ids=str,
)
def test_contradicting_options_are_rejected(words, message):
    with pytest.raises(ConfigurationError, match=message):
        parsed(words)


SHRUNKEN = " --generated-data --image-size 32 --batch-size 2 --weight-updates-per-epoch 1"
"""Small images and batches; each test adds the smallest network that has all splits."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "smaller", "devices"),
    [
        ("resnet50 m2000", "--model-size 34 --gradient-accumulation-count 8", 4),
        ("resnet50 pod16", "--model-size 34 --gradient-accumulation-count 8 "
         "--replicas 2", 8),
        ("resnext101 m2000", "--model-size 50 --gradient-accumulation-count 4", 4),
        ("resnext101 pod16", "--model-size 50 --gradient-accumulation-count 4 "
         "--replicas 4", 8),
        ("efficientnet m2000", "--model-size 1 --gradient-accumulation-count 8", 4),
        ("efficientnet pod16", "--model-size 1 --gradient-accumulation-count 8 "
         "--replicas 2", 8),
    ],
)  # fmt: skip
def test_every_command_trains_a_small_model(
    name, smaller, devices, tmp_path, monkeypatch, capsys
):
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    monkeypatch.chdir(tmp_path)
    words = shlex.split(COMMANDS[name] + SHRUNKEN + " " + smaller)
    with pytest.raises(SystemExit) as left:
        main(["cnn", "train", *words, "--run-dir", "run"])
    logger.handlers, logger.level, logger.propagate = kept
    output = capsys.readouterr().err
    assert left.value.code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["device"]["count"] == devices
    assert summary["updates"] == parsed(COMMANDS[name]).workflow.num_epochs
    assert math.isfinite(summary["metrics"]["train_loss"])
    averaged = "efficientnet" in name
    assert ("weight_avg_exp_0.97" in summary.get("weight_averages", {})) == averaged
