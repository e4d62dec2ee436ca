"""Training and validation of checkpoints, each alone and together; compile_only."""

import json
import os
import re
import shutil

import jax
import numpy as np
import pytest
from seed_lines import GRAPHCORE

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.train import plan_events, train
from millrace.config import ConfigurationError, build
from millrace.run.run import run_command

RECIPE = {
    "micro_batch_size": 32,
    "num_epochs": 3,
    "weight_updates_per_epoch": 12,
    "optimizer_params": {"momentum": 0.9},
    "lr_schedule_params": {"initial_learning_rate": 0.003},
    "bn_momentum": 0.8,
    "keep_checkpoints": 1,
}
UPDATES = [12, 24, 36]
NAMES = [f"update-{update:09d}" for update in UPDATES]

AFTERWARDS = {
    "validate": "every",
    "target_accuracy": 0.5,
    "weight_avg_exp": [0.5],
    "weight_avg_n": [2],
}
AVERAGES = ["weight_avg_exp_0.5", "weight_avg_N_2"]


def run(directory, **options):
    config = build(CnnConfig, GRAPHCORE | {"run_dir": directory, **options})
    status = run_command(train, config, command="cnn-train", command_line="test")
    path = directory / "summary.json"
    return status, json.loads(path.read_text()) if path.exists() else None


def read_events(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def validations(directory):
    events = [event for event in read_events(directory) if "validation_loss" in event]
    return {e["update"]: (e["validation_loss"], e["validation_accuracy"]) for e in events}


def assert_same(found, expected):
    assert list(found) == list(expected) == UPDATES
    for update in UPDATES:
        np.testing.assert_allclose(found[update], expected[update], rtol=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose checkpoints were validated and averaged after training."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    status, summary = run(directory, **AFTERWARDS, **RECIPE)
    assert (status, summary["status"]) == (0, "completed")
    return directory, summary


def test_every_checkpoint_is_kept_and_validated_after_training(trained):
    directory, summary = trained
    kept = {path.name for path in (directory / "checkpoints").iterdir()}
    assert kept == {*NAMES, *AVERAGES}
    assert [event["update"] for event in summary["validations"]] == UPDATES
    assert [event["epoch"] for event in summary["validations"]] == [1, 2, 3]
    assert list(validations(directory)) == UPDATES
    last = summary["validations"][-1]["validation_accuracy"]
    assert summary["metrics"]["validation_accuracy"] == last > 0.5
    # Training ended before the first validation.
    trained_until = [e["time"] for e in read_events(directory) if "train_loss" in e][-1]
    times = [e["time"] for e in read_events(directory) if "validation_loss" in e]
    assert trained_until <= times[0] <= times[-1]
    # Times of events are rounded to milliseconds.
    assert times[-1] <= summary["time_to_train_seconds"] + 1e-3


def test_the_target_is_reached_when_the_weights_were_saved(trained):
    directory, summary = trained
    found = summary["target_accuracy"]
    accuracies = [accuracy for _, accuracy in validations(directory).values()]
    first = next(n for n, accuracy in enumerate(accuracies) if accuracy >= 0.5)
    assert (found["target"], found["epoch"]) == (0.5, first + 1)
    assert 0 < found["seconds"] < summary["time_to_train_seconds"]


def test_validation_during_training_gives_the_same_and_clean_dir_deletes_checkpoints(
    trained, tmp_path, capsys
):
    options = RECIPE | {"checkpoint_dir": tmp_path / "apart", "clean_dir": True}
    options |= {"target_accuracy": 1.0}
    options |= {"validation_num_replicas": min(4, jax.device_count())}
    status, summary = run(tmp_path / "run", **options)
    assert status == 0
    assert_same(validations(tmp_path / "run"), validations(trained[0]))
    assert not (tmp_path / "apart").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert summary["target_accuracy"]["epoch"] is None
    output = capsys.readouterr().err
    assert re.search(r"accuracy 1 +not reached", output)
    assert re.search(r"time to train +[\d.]+ m?s", output)
    status, again = run(tmp_path / "run", resume=True, **options)  # does not train again
    assert status == 0
    assert "clean_dir has deleted its checkpoints" in capsys.readouterr().err
    assert again["metrics"] == summary["metrics"]


def test_a_resumed_run_does_not_validate_twice(trained, tmp_path, capsys):
    directory = tmp_path / "run"
    shutil.copytree(trained[0], directory)
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    before = [json.loads(line) for line in lines]
    lines = [
        line
        for line, event in zip(lines, before, strict=True)
        if event["update"] < UPDATES[-1] or "validation_loss" not in event
    ]  # as if interrupted before the last validation
    (directory / "metrics.jsonl").write_text("".join(lines))
    status, summary = run(directory, resume=True, **AFTERWARDS, **RECIPE)
    assert status == 0
    output = capsys.readouterr().err
    assert output.count("validation_accuracy") == 1
    assert output.count("_accuracy") == 1  # the averages are not validated again
    assert list(validations(directory).items()) == list(validations(trained[0]).items())
    assert [e["update"] for e in summary["validations"]] == UPDATES
    # Times add up over both parts, but the second did not train.
    assert summary["wall_seconds"] > trained[1]["wall_seconds"] + 0.01
    assert summary["seconds"]["compiling"] > trained[1]["seconds"]["compiling"]
    assert summary["time_to_train_seconds"] == trained[1]["time_to_train_seconds"]


def test_averages_are_saved_validated_and_reported(trained):
    directory, summary = trained
    averages = summary["weight_averages"]
    assert list(averages) == AVERAGES
    assert averages[AVERAGES[0]]["made_of"] == NAMES
    assert averages[AVERAGES[1]]["made_of"] == NAMES[1:]
    for name in AVERAGES:
        accuracy = averages[name]["validation_accuracy"]
        assert accuracy > 0.5
        (event,) = [e for e in read_events(directory) if f"{name}_accuracy" in e]
        assert event[f"{name}_accuracy"] == accuracy
        assert (event["update"], event["epoch"]) == (36, 3)
        assert averages[name]["validation_loss"] != summary["metrics"]["validation_loss"]


def test_an_average_can_be_validated_like_a_checkpoint(trained, tmp_path):
    directory, summary = trained
    given = directory / "checkpoints" / AVERAGES[1]
    status, alone = run(
        tmp_path / "run", training=False, checkpoint_dir=given, micro_batch_size=32
    )
    assert status == 0
    wanted = summary["weight_averages"][AVERAGES[1]]
    for name in ("validation_loss", "validation_accuracy"):
        np.testing.assert_allclose(alone["metrics"][name], wanted[name], rtol=1e-5)


@pytest.mark.devices(lambda options: options.get("validation_num_replicas", 1))
@pytest.mark.parametrize(
    "options",
    [
        {},
        # Validation needs neither the replicas nor the optimizer of training.
        {"validation_num_replicas": 3, "validation_micro_batch_size": 7, "optimizer_params":
            {"momentum": 0}},
    ],
    ids=str,
)  # fmt: skip
def test_validation_alone_agrees_with_validation_after_training(options, trained, tmp_path):
    options = RECIPE | {"training": False, "checkpoint_dir": trained[0]} | options
    status, summary = run(tmp_path / "run", **options)
    assert (status, summary["updates"]) == (0, 0)
    assert_same(validations(tmp_path / "run"), validations(trained[0]))


def test_only_the_last_checkpoint_or_a_named_one_is_validated(trained, tmp_path):
    folder = trained[0] / "checkpoints"
    options = {"training": False, "validate": "last", "checkpoint_input_dir": folder}
    run(tmp_path / "last", **RECIPE, **options)
    assert list(validations(tmp_path / "last")) == UPDATES[-1:]
    options = {"training": False, "checkpoint_dir": folder / "update-000000024"}
    run(tmp_path / "one", **RECIPE, **options)
    assert list(validations(tmp_path / "one")) == UPDATES[1:2]


def test_a_damaged_checkpoint_is_a_one_line_error(trained, tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained[0] / "checkpoints", folder)
    victim = next(p for p in (folder / "update-000000024/state").rglob("*") if p.is_file())
    victim.write_bytes(b"no state")
    options = {"training": False, "checkpoint_dir": folder, "quiet": True}
    status, summary = run(tmp_path / "run", **RECIPE, **options)
    assert (status, summary["status"]) == (1, "failed")
    output = capsys.readouterr().err
    assert "update-000000024 is damaged" in output
    assert len(output.splitlines()) == 1


def test_a_checkpoint_of_another_model_is_a_one_line_error(trained, tmp_path, capsys):
    options = {"training": False, "checkpoint_dir": trained[0], "quiet": True}
    options |= {"norm_layer": {"name": "group_norm", "num_groups": 4}}
    status, _ = run(tmp_path / "run", **RECIPE, **options)
    assert status == 1
    assert "does not fit this model" in (output := capsys.readouterr().err)
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"weight_avg_exp": [0.9], "ckpts_per_epoch": 0}, True),
        ({"weight_avg_n": [2], "num_epochs": 1}, True),
        ({"weight_avg_exp": [0.9]}, False),
        ({"ckpts_per_epoch": 0}, False),
    ],
    ids=str,
)
def test_averaging_a_single_checkpoint_is_a_warning(options, warns, tmp_path, capsys):
    given = RECIPE | {"compile_only": True} | options
    assert run(tmp_path / "run", **given)[0] == 0
    output = " ".join(capsys.readouterr().err.split())
    assert ("Only one checkpoint is written" in output) == warns


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nowhere", "There is no {}/nowhere"), (".", "There are no checkpoints in {}")],
)
def test_a_folder_without_checkpoints_is_an_error(folder, message, tmp_path, capsys):
    options = {"training": False, "checkpoint_dir": tmp_path / folder, "quiet": True}
    assert run(tmp_path / "run", **options) == (2, None)
    assert message.format(tmp_path) in capsys.readouterr().err


def test_checkpoints_of_an_earlier_run_are_an_error(trained, tmp_path, capsys):
    options = RECIPE | {"checkpoint_dir": trained[0] / "checkpoints", "quiet": True}
    assert run(tmp_path / "run", **options) == (2, None)
    assert "has checkpoints of an earlier run" in capsys.readouterr().err


def test_too_many_validation_replicas_are_an_error(tmp_path, capsys):
    assert run(tmp_path / "run", validation_num_replicas=99, quiet=True) == (2, None)
    expected = f"validation_num_replicas is 99, but there are only {jax.device_count()}"
    assert expected in capsys.readouterr().err


def test_compile_only_reports_time_and_memory_and_does_not_train(tmp_path, capsys):
    options = {"compile_only": True, "checkpoints": False, "micro_batch_size": 50}
    status, summary = run(tmp_path / "run", **options)
    assert (status, summary["status"], summary["updates"]) == (0, "completed", 0)
    assert summary["compile_seconds"] > 0
    # At least the staged batches: 28 of 50 images with 64 floats each.
    assert summary["memory_bytes"] > 28 * 50 * 64 * 4
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert re.search(r"memory +[\d.]+ MiB on each device", capsys.readouterr().err)


def test_checkpoints_and_validation_can_be_turned_off(tmp_path, capsys):
    options = {"checkpoints": False, "micro_batch_size": 50, "validation": False}
    options |= {"weight_updates_per_epoch": 1, "target_accuracy": 0.5}
    status, summary = run(tmp_path / "run", **options)
    assert (status, summary["updates"]) == (0, 1)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "time_to_train_seconds" not in summary
    assert re.search(r"accuracy 0.5 +not validated", capsys.readouterr().err)


def test_shuffle_false_keeps_the_order_of_samples():
    def in_order(shuffle):
        config = build(
            CnnConfig,
            GRAPHCORE | {"micro_batch_size": 50, "shuffle": shuffle},
        )
        images = data.load(config)
        first = images.training[np.arange(50)]["label"]
        return (data.open_infeed(images, config, 28).peek()["label"] == first).all()

    assert in_order(shuffle=False)
    assert not in_order(shuffle=True)


def test_first_ckpt_epoch_delays_all_checkpoints():
    options = RECIPE | {"num_epochs": 38, "ckpts_per_epoch": 0.25, "first_ckpt_epoch": 2}
    schedule = plan_events(build(CnnConfig, GRAPHCORE | options), 1437)
    due = [e for e in range(1, 39) if schedule.due("checkpoint", 12 * e)]
    assert due == [*range(2, 39, 4)]
    with pytest.raises(ConfigurationError, match="cannot come after 40 epochs"):
        plan_events(
            build(CnnConfig, GRAPHCORE | options | {"first_ckpt_epoch": 40}),
            1437,
        )


def test_training_does_not_limit_the_memory_of_the_device(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    options = {"compile_only": True, "available_memory_proportion": 0.15}
    status, _ = run(tmp_path / "run", **RECIPE | options)
    assert status == 0
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ
    assert "--available-memory-proportion has no effect: " in capsys.readouterr().err
