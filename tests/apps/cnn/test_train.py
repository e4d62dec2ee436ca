"""``cnn train`` on small data, and the named configurations."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from seed_lines import GRAPHCORE

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.learning import learning_rate_warnings
from millrace.apps.cnn.models import catalog
from millrace.apps.cnn.program import build_norm
from millrace.apps.cnn.train import plan_events, train
from millrace.config import ConfigurationError, build, load_named, load_yaml
from millrace.distributed.progress import own_activity
from millrace.run import stuck
from millrace.run.run import run_command

SEEDS = {"num_epochs": 6, "micro_batch_size": 8, "gradient_accumulation_count": 8}


def run(directory, **options):
    config = build(CnnConfig, GRAPHCORE | {"run_dir": directory, "quiet": True} | options)
    status = run_command(train, config, command="cnn-train", command_line="test")
    summary = directory / "summary.json"
    return status, json.loads(summary.read_text()) if summary.exists() else None


@pytest.mark.devices(lambda options: options.get("num_replicas", 1))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_replicas": 4, "micro_batch_size": 8, "dbn_replica_group_size": 2},
        {"norm_layer": {"name": "group_norm", "num_groups": 4}, "label_smoothing": 0.1},
        pytest.param({"optimizer": "lars", "optimizer_params": {
            "momentum": 0.9, "weight_decay": 1e-4, "eeta": 0.01, "epsilon": 0}},
            marks=pytest.mark.slow),
        pytest.param({"accelerator_side_preprocess": True, "l2_regularization": 1e-4},
            marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_digits_are_learned_with_many_kinds_of_options(options, tmp_path):
    settings = {
        "micro_batch_size": 32,
        "num_epochs": 2,
        "optimizer_params": {"momentum": 0.9},
        "lr_schedule": "cosine",
        "lr_schedule_params": {
            "initial_learning_rate": 0.003, "epochs_to_total_decay": 2},
        "bn_momentum": 0.8,
        "validations_per_epoch": 0,
        "ckpts_per_epoch": 0,
    }  # fmt: skip
    status, summary = run(tmp_path / "run", **(settings | options))
    assert (status, summary["status"]) == (0, "completed")
    assert summary["metrics"]["validation_accuracy"] > 0.9


AUGMENTED = {
    "augment": "randaugment", "random_crop": True, "color_jitter": 0.4,
    "random_erasing": 0.25, "mixup": 0.2, "cutmix": 1.0, "micro_batch_size": 16,
    "weight_updates_per_epoch": 4, "lr_schedule_params": {"initial_learning_rate": 0.01},
}  # fmt: skip


def test_the_watch_knows_of_calls_of_any_length_and_lasts_until_the_final_validation(
    tmp_path, monkeypatch
):
    watches, real = [], stuck.watching_progress
    monkeypatch.setattr(
        "millrace.run.run.watching_progress",
        lambda *args, **options: watches.append(options) or real(*args, **options),
    )
    monkeypatch.setattr(
        "millrace.apps.cnn.train.validate_checkpoints",
        lambda *_: phases.append(own_activity().phase) or [],
    )
    phases: list[str] = []
    own = {"num_epochs": 1, "validate": "last", "updates_per_execution": 1}
    status, _ = run(tmp_path, **SEEDS | own)
    assert status == 0
    assert watches == [{"has_long_calls": True}, {"has_long_calls": False}]
    assert len(phases) == 1 and phases[0]


@pytest.mark.slow
def test_augmentation_is_in_the_summary_and_shown_in_the_report(tmp_path):
    _, summary = run(tmp_path, **AUGMENTED, validation=False, checkpoints=False)
    assert summary["facts"]["augmentation"] == (
        "random crop (1 pixel of padding), RandAugment (2 ops, magnitude 9), "
        "color jitter 0.4, erasing 25 %, mixup 0.2 or cutmix 1"
    )
    section = json.loads((tmp_path / "report" / "3-augmented.json").read_text())
    assert len(section["pictures"]) == 16
    assert "What the network sees" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.devices(2)
def test_augmented_training_is_equal_for_any_number_of_replicas(tmp_path):
    results = []
    for replicas in (1, 2):
        split = {"num_replicas": replicas, "gradient_accumulation_count": 2 // replicas}
        _, summary = run(tmp_path / str(replicas), **AUGMENTED, **split)
        metrics = summary["metrics"]
        results.append((metrics["train_loss"], metrics["validation_loss"]))
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_weight_updates_per_epoch_sets_the_length_of_an_epoch(tmp_path):
    _, summary = run(tmp_path / "run", num_epochs=2, weight_updates_per_epoch=10)
    assert summary["updates"] == 20


def test_an_unknown_key_in_a_dictionary_option_gives_status_2(tmp_path, capsys):
    status, summary = run(tmp_path / "run", optimizer_params={"momentun": 0.9})
    assert (status, summary) == (2, None)
    assert "Did you mean momentum?" in capsys.readouterr().err


SIZES = {"digits": 1437, "cifar10": 50_000, "imagenet": 1_281_167}
RUNS = Path(str(resources.files("millrace.apps.cnn") / "runs.yml"))


@pytest.mark.parametrize("name", load_yaml(RUNS))
def test_every_named_configuration_has_a_valid_schedule_and_valid_splits(name):
    config = build(CnnConfig, GRAPHCORE | load_named(RUNS, name))
    schedule = plan_events(config, SIZES[config.resolved_dataset])
    assert schedule.total_updates % schedule.updates_per_execution == 0
    assert not schedule.warnings
    assert not learning_rate_warnings(config, schedule)
    norm = build_norm(config)
    model = catalog.build_layers(config.resolved_model, 10, norm, **config.network)
    splits = catalog.find_split_layers(model, config.plan.pipeline_splits)
    assert set(splits) <= {layer.name for layer in model}
    assert config.graphcore.notices() == []  # options without effect are left out


@pytest.mark.parametrize(("epochs", "warns"), [(21, False), (22, True), (200, True)])
def test_a_learning_rate_of_0_long_before_the_end_is_a_warning(epochs, warns):
    config = build(
        CnnConfig,
        GRAPHCORE | load_named(RUNS, "digits_demo") | {"num_epochs": epochs},
    )
    warnings = learning_rate_warnings(config, plan_events(config, SIZES["digits"]))
    start = f"The learning rate is 0 from epoch 20 of {epochs} on"
    assert [warning.startswith(start) for warning in warnings] == [True] * warns
    assert all("epochs_to_total_decay in --lr-schedule-params" in w for w in warnings)


def test_a_run_warns_about_a_learning_rate_of_0_before_training(tmp_path, capsys):
    steps = {"boundaries": [1], "values": [0.1, 0.0]}
    options = {"lr_schedule": "stepped", "lr_schedule_params": steps, "num_epochs": 9}
    assert run(tmp_path / "run", compile_only=True, **options)[0] == 0
    output = " ".join(capsys.readouterr().err.split())
    assert output.count("The learning rate is 0 from epoch 2 of 9 on") == 1
    assert "Change --lr-schedule-params, or --num-epochs." in output


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("resnet8_test_lars", 0.001),
        ("mk2_resnet50_16k_bn_pipeline", 2.0),
        ("mk2_resnet50_8k_bn_pipeline", 1.0),
        ("resnet50_mlperf_bs16", 4.588),
        ("resnet50_mlperf_pod16_bs20", 3.823),
    ],
)
def test_named_configurations_have_graphcores_learning_rates(name, rate):
    config = build(CnnConfig, GRAPHCORE | load_named(RUNS, name))
    per_sample = config.recipe.lr_schedule_params["initial_learning_rate"]
    assert per_sample * config.plan.batching.global_batch_size == pytest.approx(
        rate, rel=1e-4
    )


def test_logs_that_do_not_divide_an_epoch_are_moved_with_a_warning():
    quiet = {"logs_per_epoch": 10, "validation": False, "ckpts_per_epoch": 0}
    config = build(CnnConfig, GRAPHCORE | SEEDS | quiet | {"model_name": "cifar_resnet8"})
    schedule = plan_events(config, 50_000)
    assert (schedule.updates_per_epoch, schedule.updates_per_execution) == (781, 71)
    assert len(schedule.warnings) == 1
    with pytest.raises(ConfigurationError, match=r"2\.0 epochs at a time for 5 epochs"):
        plan_events(
            build(
                CnnConfig,
                GRAPHCORE | SEEDS | {"num_epochs": 5, "logs_per_epoch": 0.5},
            ),
            50_000,
        )


@pytest.mark.slow
def test_the_seed_determines_the_run(tmp_path):
    settings = {"micro_batch_size": 64, "validation": False, "deterministic": True,
                "lr_schedule_params": {"initial_learning_rate": 0.001}}  # fmt: skip
    losses = [
        run(tmp_path / str(number), seed=seed, **settings)[1]["metrics"]["train_loss"]
        for number, seed in enumerate((1, 1, 2))
    ]
    assert losses[0] == losses[1] != losses[2]
    assert np.isfinite(losses).all()
