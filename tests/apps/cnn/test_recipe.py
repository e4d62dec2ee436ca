"""Which recipe a command gets, what it fills in, and that Graphcore's stays as it was."""

import json
import shlex
from pathlib import Path
from typing import get_args

import optax
import pytest
import yaml
from image_files import write_folders
from seed_lines import SEED_LINES

from millrace import cnn
from millrace.apps.cnn.config import CnnConfig, recipe
from millrace.apps.cnn.config.training import OptimizerName
from millrace.apps.cnn.program import build_learning_rate
from millrace.apps.cnn.train import plan_events
from millrace.commands.registry import COMMANDS
from millrace.config import (
    ConfigurationError,
    as_plain,
    build,
    parse,
    plain_defaults,
    replace_options,
)
from millrace.program.optimizers import build_optimizer

NAMED = COMMANDS["cnn train"].named_configs_path()
RESOLVED = Path(__file__).parents[2] / "seed_configs.json"
"""Options that differ from their defaults, written before there were recipes."""


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without a GPU; call it with True for one with."""

    def have(gpu):
        monkeypatch.setattr(recipe, "uses_gpu", lambda variables: gpu)

    have(False)
    return have


def parsed(words):
    return parse(CnnConfig, shlex.split(words), program="x", named_configs=NAMED)[0]


def named_configurations():
    return [f"--config {name}" for name in yaml.safe_load(NAMED.read_text())]


@pytest.mark.parametrize("gpu", [False, True])
def test_graphcores_commands_and_named_configurations_mean_what_they_meant(machine, gpu):
    machine(gpu)
    expected = json.loads(RESOLVED.read_text())
    assert list(expected) == [*SEED_LINES, *named_configurations()]
    for line, options in expected.items():
        config, defaults = parsed(line), plain_defaults(CnnConfig)
        found = {n: v for n, v in as_plain(config).items() if v != defaults[n]}
        assert found.pop("recipe") == "graphcore"
        assert config.model_title == options.pop("resolved_model"), line
        assert config.resolved_dataset == options.pop("resolved_dataset"), line
        assert found == options, line


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "modern"),
        ("--dataset cifar10 --batch-size 64 --epochs 5 --lr 0.1", "modern"),
        ("--model cifar_resnet8 --optimizer adamw --precision 16.32", "modern"),
        ("--model resnet --dataset imagenet --num-replicas 2", "modern"),
        ("--config digits_demo", "graphcore"),
        ("--config digits_demo --recipe modern", "modern"),
        ("--base-learning-rate -8", "graphcore"),
        ("--precision 16.16", "graphcore"),
        ("--half-partials --recipe modern", "modern"),
        ("--recipe graphcore", "graphcore"),
        ("--pipeline-splits 4 --device-mapping 0 0 0 0", "modern"),
        ("--model cifar_resnet8 --pipeline-splits conv3_block1_add", "graphcore"),
        ("--optimizer lars", "modern"),
        ("--model resnet --optimizer rmsprop --dataset cifar10", "graphcore"),
        ("--optimizer lars --optimizer-params '{momentum: 0}'", "graphcore"),
    ],
)
def test_the_recipe_is_modern_unless_an_option_is_graphcores(words, name):
    assert parsed(words).recipe.recipe == name


@pytest.mark.parametrize(
    ("words", "model", "batch", "epochs", "rate"),
    [
        ("", "digits_cnn", 32, 30, 0.1),
        ("--dataset mnist", "cifar_resnet8", 128, 10, 0.1),
        ("--dataset cifar10", "resnet9", 256, 50, 0.2),
        ("--dataset cifar100", "resnet9", 256, 60, 0.2),
        ("--dataset cifar10 --num-replicas 4", "resnet9", 256, 50, 0.2),
        ("--dataset cifar10 --batch-size 64", "resnet9", 64, 50, 0.05),
        ("--dataset cifar10 --global-batch-size 1024", "resnet9", 1024, 50, 0.8),
        ("--dataset cifar10 --optimizer adamw", "resnet9", 256, 50, 0.001),
        ("--dataset cifar10 --optimizer sgd", "resnet9", 256, 50, 0.4),
        ("--dataset cifar10 --optimizer momentum", "resnet9", 256, 50, 0.2),
        ("--dataset imagenet", "resnet50", 256, 90, 0.1),
    ],
)
def test_the_modern_recipe_of_a_dataset(machine, words, model, batch, epochs, rate):
    machine(True)
    config = parsed(words)
    assert (config.model_title, config.workflow.num_epochs) == (model, epochs)
    assert config.plan.batching.global_batch_size == batch
    assert config.recipe.learning_rate == rate
    assert config.recipe.lr_schedule == "cosine"
    warmup = config.recipe.warmup_epochs
    assert config.schedule_params == {"epochs_to_total_decay": epochs - warmup}
    assert config.augmentation.random_erasing == (0.5 if "cifar" in words else 0)
    # A run that is resumed with more epochs follows the longer schedule.
    longer = replace_options(config, num_epochs=2 * epochs)
    assert longer.schedule_params == {"epochs_to_total_decay": 2 * epochs - warmup}
    heavy = model in ("resnet9", "resnet50")
    assert config.plan.precision == ("16.32" if heavy else "32.32")


def test_options_that_are_given_win_over_the_recipe():
    config = parsed(
        "--dataset cifar10 --model cifar_resnet8 --optimizer lion --lr 0.0002 "
        "--weight-decay 0.1 --label-smoothing 0 --warmup-epochs 0 --momentum 0.8 "
        "--lr-schedule const --validation-micro-batch-size 7"
    )
    assert config.model_title == "cifar_resnet8"
    assert config.recipe.optimizer_params == {"b1": 0.8}
    assert (config.recipe.weight_decay, config.recipe.l2_regularization) == (0.1, 0)
    assert (config.recipe.lr_schedule_params, config.recipe.lr_warmup_params) == ({}, None)
    assert (config.recipe.label_smoothing, config.recipe.learning_rate) == (0, 0.0002)
    assert config.workflow.validation_micro_batch_size == 7


@pytest.mark.parametrize("recipe_name", ["auto", "modern", "graphcore"])
@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_needs_nothing_but_its_name(name, recipe_name):
    for more in ("", " --momentum 0.8 --weight-decay 0.1"):
        config = parsed(f"--optimizer {name} --recipe {recipe_name}{more}")
        build_optimizer(
            config.recipe.optimizer,
            config.recipe.optimizer_params,
            learning_rate=optax.constant_schedule(0.1),
            global_batch_size=32,
        )
    assert 0.8 in config.recipe.optimizer_params.values()


def test_images_in_folders_get_a_batch_that_suits_their_number(tmp_path, machine):
    folder = write_folders(tmp_path / "few", num_classes=2, per_class=50)
    machine(True)
    config = parsed(f"--dataset-path {folder}")
    assert (config.resolved_dataset, config.model_title) == ("imagefolder", "resnet50")
    assert config.plan.micro_batch_size == 4  # 100 images: 25 updates per epoch
    assert config.recipe.learning_rate == pytest.approx(0.05 * 4 / 128, rel=0.01)


def test_fine_tuning_has_a_tenth_of_the_learning_rate(tmp_path):
    weights = tmp_path / "x.safetensors"
    scratch = parsed("--dataset imagenet --model resnet --model-size 50")
    tuned = parsed(f"--dataset imagenet --pretrained {weights}")
    assert tuned.model_title == "resnet 50"
    assert tuned.recipe.learning_rate == pytest.approx(scratch.recipe.learning_rate / 10)
    assert tuned.workflow.num_epochs == 15
    assert tuned.model.norm_layer["name"] == "batch_norm"


def test_a_family_logs_once_per_epoch_outside_graphcores_commands():
    assert parsed("--model resnet --dataset cifar10").workflow.logs_per_epoch == 1
    assert parsed("--model resnet --batch-norm").workflow.logs_per_epoch == 16


def test_the_options_of_a_run_give_its_configuration_again():
    for words in (
        *("", "--dataset cifar10 --optimizer muon", "--model resnet --lr 0.1"),
        *("--lr 0.1 --lr-schedule stepped", "--config digits_demo --lr 0.05", *SEED_LINES),
    ):
        config = parsed(words)
        assert build(CnnConfig, as_plain(config)) == config


def test_a_run_from_before_there_were_recipes_keeps_its_options():
    old = as_plain(parsed("--recipe graphcore --dataset cifar10 --batch-size 8"))
    for name in ("recipe", "learning_rate", "warmup_epochs", "clip_norm", "ema"):
        del old[name]
    config = build(CnnConfig, old)
    assert (config.recipe.recipe, config.resolved_model) == ("graphcore", "toy_model")
    assert config.recipe.lr_schedule_params == {"initial_learning_rate": 0.0001}


def test_a_flag_replaces_the_learning_rate_of_a_named_configuration():
    config = parsed("--config cifar_resnet20_1gpu --lr 0.05 --optimizer adamw")
    assert (config.recipe.learning_rate, config.recipe.optimizer_params) == (0.05, {})
    assert config.recipe.lr_schedule_params == {"epochs_to_total_decay": 195}
    steeper = parsed("--config cifar10_94 --lr-schedule-params '{power: 2}'")
    assert steeper.recipe.learning_rate == 0.24


@pytest.mark.parametrize("schedule", ["const", "cosine", "stepped", "exponential"])
@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("--config resnet50_mlperf_bs16 --lr 0.4", 0.4),
        ("--config resnet50_mlperf_bs16", 0.001991319 * 2304),
        ("--config cifar10_94", 0.24),
    ],
)
def test_a_flag_replaces_the_schedule_of_a_named_configuration(words, rate, schedule):
    config = parsed(f"{words} --warmup-epochs 0 --lr-schedule {schedule}")
    rates = build_learning_rate(config, plan_events(config, 50_000))
    assert float(rates(0)) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr 0.1 --base-learning-rate -8", "base_learning_rate, an exponent"),
        (
            "--lr 0.1 --lr-schedule-params '{initial_learning_rate: 0.1}'",
            "initial_learning_rate, which is per sample",
        ),
        (
            "--lr 0.1 --lr-schedule stepped --lr-schedule-params "
            "'{boundaries: [1], values: [1, 2]}'",
            "values of a stepped schedule",
        ),
    ],
)
def test_two_learning_rates_are_an_error(words, message):
    with pytest.raises(ConfigurationError) as caught:
        parsed(words)
    assert message in str(caught.value)
    assert str(caught.value).startswith("Give learning_rate, which the optimizer sees, or")
    assert str(caught.value).endswith("not both.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr 0", "learning_rate must be more than 0, got 0."),
        ("--ema 1", "ema must be more than 0 and below 1, got 1."),
        ("--clip-norm -1", "clip_norm must be more than 0, got -1."),
        ("--warmup-epochs -1", "warmup_epochs must be 0 or more, got -1."),
        (
            "--warmup-epochs 2 --lr-warmup-params '{warmup_mode: mask, warmup_epochs: 1}'",
            "Give warmup_epochs or lr_warmup_params, not both.",
        ),
    ],
)
def test_an_impossible_option_is_an_error(words, message):
    with pytest.raises(ConfigurationError) as caught:
        parsed(words)
    assert str(caught.value) == message


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_defaults_reach_98_5_percent_on_digits(tmp_path, seed):
    done = cnn.train(seed=seed, run_dir=tmp_path / "run", quiet=True)
    assert done.metrics["validation_accuracy"] >= 0.985
