"""Training, then validation of its checkpoints; either alone; and only compiling."""

import json
import os
import re
import shutil
from importlib import resources

import jax
import numpy as np
import pytest
import yaml

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig, device, ipu
from millrace.apps.cnn.feeding import open_infeed
from millrace.apps.cnn.train import plan_events, train
from millrace.config import ConfigurationError, build, parse
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
    config = build(CnnConfig, {"run_dir": directory, **options})
    status = run_command(train, config, command="cnn-train", command_line="test")
    path = directory / "summary.json"
    return status, json.loads(path.read_text()) if path.exists() else None


def events_of(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def validations(directory):
    events = [event for event in events_of(directory) if "validation_loss" in event]
    return {e["update"]: (e["validation_loss"], e["validation_accuracy"]) for e in events}


def assert_same(found, expected):
    assert list(found) == list(expected) == UPDATES
    for update in UPDATES:
        np.testing.assert_allclose(found[update], expected[update], rtol=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose checkpoints were validated, and averaged, when it was over."""
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
    # Training was over before any of it.
    trained_until = [e["time"] for e in events_of(directory) if "train_loss" in e][-1]
    times = [e["time"] for e in events_of(directory) if "validation_loss" in e]
    assert trained_until <= times[0] <= times[-1]
    # Events round their time to milliseconds.
    assert times[-1] <= summary["time_to_train_seconds"] + 1e-3


def test_the_time_and_epoch_of_the_target_are_those_of_the_weights(trained):
    directory, summary = trained
    found = summary["target_accuracy"]
    accuracies = [accuracy for _, accuracy in validations(directory).values()]
    first = next(n for n, accuracy in enumerate(accuracies) if accuracy >= 0.5)
    assert (found["target"], found["epoch"]) == (0.5, first + 1)
    assert 0 < found["seconds"] < summary["time_to_train_seconds"]


def test_validation_in_training_finds_the_same_and_clean_dir_leaves_nothing(
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
    said = capsys.readouterr().err
    assert re.search(r"accuracy 1 +not reached", said)
    assert re.search(r"time to train +\d+\.\d s", said)
    status, again = run(tmp_path / "run", resume=True, **options)  # must not train again
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
    ]  # stopped before the last
    (directory / "metrics.jsonl").write_text("".join(lines))
    status, summary = run(directory, resume=True, **AFTERWARDS, **RECIPE)
    assert status == 0
    said = capsys.readouterr().err
    assert said.count("validation_accuracy") == 1
    assert said.count("_accuracy") == 1  # nor are the averages
    assert list(validations(directory).items()) == list(validations(trained[0]).items())
    assert [e["update"] for e in summary["validations"]] == UPDATES
    # The time is that of both parts, but nothing was trained in the second.
    assert summary["wall_seconds"] > trained[1]["wall_seconds"] + 0.01
    assert summary["seconds"]["compiling"] > trained[1]["seconds"]["compiling"]
    assert summary["time_to_train_seconds"] == trained[1]["time_to_train_seconds"]


def test_averages_are_saved_validated_and_told_of(trained):
    directory, summary = trained
    averages = summary["weight_averages"]
    assert list(averages) == AVERAGES
    assert averages[AVERAGES[0]]["made_of"] == NAMES
    assert averages[AVERAGES[1]]["made_of"] == NAMES[1:]
    for name in AVERAGES:
        accuracy = averages[name]["validation_accuracy"]
        assert accuracy > 0.5
        (event,) = [e for e in events_of(directory) if f"{name}_accuracy" in e]
        assert event[f"{name}_accuracy"] == accuracy
        assert (event["update"], event["epoch"]) == (36, 3)
        assert averages[name]["validation_loss"] != summary["metrics"]["validation_loss"]


def test_an_average_can_be_validated_like_any_checkpoint(trained, tmp_path):
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
        # Neither the replicas nor the optimizer that trained are needed to validate.
        {"validation_num_replicas": 3, "validation_micro_batch_size": 7, "optimizer_params":
            {"momentum": 0}},
    ],
    ids=str,
)  # fmt: skip
def test_validation_alone_finds_what_validation_after_training_found(
    options, trained, tmp_path
):
    options = RECIPE | {"training": False, "checkpoint_dir": trained[0]} | options
    status, summary = run(tmp_path / "run", **options)
    assert (status, summary["updates"]) == (0, 0)
    assert_same(validations(tmp_path / "run"), validations(trained[0]))


def test_the_last_checkpoint_alone_or_one_by_name(trained, tmp_path):
    folder = trained[0] / "checkpoints"
    options = {"training": False, "validate": "last", "checkpoint_input_dir": folder}
    run(tmp_path / "last", **RECIPE, **options)
    assert list(validations(tmp_path / "last")) == UPDATES[-1:]
    options = {"training": False, "checkpoint_dir": folder / "update-000000024"}
    run(tmp_path / "one", **RECIPE, **options)
    assert list(validations(tmp_path / "one")) == UPDATES[1:2]


def test_a_damaged_checkpoint_is_a_plain_line_and_status_1(trained, tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained[0] / "checkpoints", folder)
    victim = next(p for p in (folder / "update-000000024/state").rglob("*") if p.is_file())
    victim.write_bytes(b"no state")
    options = {"training": False, "checkpoint_dir": folder, "quiet": True}
    status, summary = run(tmp_path / "run", **RECIPE, **options)
    assert (status, summary["status"]) == (1, "failed")
    said = capsys.readouterr().err
    assert "update-000000024 is damaged" in said
    assert len(said.splitlines()) == 1


def test_a_checkpoint_of_another_model_is_a_plain_line_and_status_1(
    trained, tmp_path, capsys
):
    options = {"training": False, "checkpoint_dir": trained[0], "quiet": True}
    options |= {"norm_layer": {"name": "group_norm", "num_groups": 4}}
    status, _ = run(tmp_path / "run", **RECIPE, **options)
    assert status == 1
    assert "does not fit this model" in (said := capsys.readouterr().err)
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "alone"),
    [
        ({"weight_avg_exp": [0.9], "ckpts_per_epoch": 0}, True),
        ({"weight_avg_n": [2], "num_epochs": 1}, True),
        ({"weight_avg_exp": [0.9]}, False),
        ({"ckpts_per_epoch": 0}, False),
    ],
    ids=str,
)
def test_averaging_a_single_checkpoint_is_not_passed_over_in_silence(
    options, alone, tmp_path, capsys
):
    given = RECIPE | {"compile_only": True} | options
    assert run(tmp_path / "run", **given)[0] == 0
    said = " ".join(capsys.readouterr().err.split())
    assert ("Only one checkpoint is written" in said) == alone


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"training": False}, "give checkpoint_dir"),
        ({"training": False, "validation": False}, "nothing is left to do"),
        ({"training": False, "validate": "during", "checkpoint_dir": "x"}, "every or last"),
        ({"training": False, "compile_only": True, "checkpoint_dir": "x"}, "compile_only"),
        ({"checkpoint_input_dir": "x"}, "--training False"),
        ({"checkpoints": False, "validate": "every"}, "checkpoints is off"),
        ({"checkpoints": False, "resume": True, "run_dir": "x"}, "checkpoints is off"),
        ({"target_accuracy": 75.9}, "at most 1, got 75.9"),
        ({"weight_avg_exp": [1.0]}, "weight_avg_exp must be more than 0 and below 1"),
        ({"weight_avg_n": [0]}, "weight_avg_n is a number of epochs"),
        ({"weight_avg_n": [1], "checkpoints": False}, "checkpoints is off"),
        ({"validation_num_replicas": 0}, "validation_num_replicas must be at least 1"),
        ({"first_ckpt_epoch": -1}, "first_ckpt_epoch must be 0 or more"),
        ({"prefetch_depth": 0}, "prefetch_depth must be at least 1"),
        ({"max_cross_replica_buffer_size": -1}, "0 or more, got -1"),
        ({"available_memory_proportion": [15, 20]}, "takes one percentage; got 2"),
        ({"available_memory_proportion": 120}, "at most 100; got 120"),
        ({"available_memory_proportion": [15, 20, 25], "pipeline_splits": ["conv2"],
          "device_mapping": [0, 1], "gradient_accumulation_count": 4}, r"or 4 \(two for"),
        ({"auto_loss_scaling": True}, "is for float16"),
        ({"auto_loss_scaling": True, "loss_scaling": 128}, "not both"),
        ({"fused_preprocessing": True}, "accelerator_side_preprocess must be on"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_together_is_refused_before_anything_starts(options, said):
    with pytest.raises(ConfigurationError, match=said):
        build(CnnConfig, options)


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_a_folder_without_checkpoints_is_a_mistake(folder, tmp_path, capsys):
    options = {"training": False, "checkpoint_dir": tmp_path / folder, "quiet": True}
    assert run(tmp_path / "run", **options) == (2, None)
    assert "There are no checkpoints in" in capsys.readouterr().err


def test_checkpoints_of_an_earlier_run_are_never_taken_for_this_ones(
    trained, tmp_path, capsys
):
    options = RECIPE | {"checkpoint_dir": trained[0] / "checkpoints", "quiet": True}
    assert run(tmp_path / "run", **options) == (2, None)
    assert "checkpoints of an earlier run" in capsys.readouterr().err


def test_too_many_validation_replicas_are_refused_by_name(tmp_path, capsys):
    assert run(tmp_path / "run", validation_num_replicas=99, quiet=True) == (2, None)
    only = f"validation_num_replicas is 99, but there are only {jax.device_count()}"
    assert only in capsys.readouterr().err


def test_compiling_alone_tells_time_and_memory_and_trains_nothing(tmp_path, capsys):
    options = {"compile_only": True, "checkpoints": False, "micro_batch_size": 50}
    status, summary = run(tmp_path / "run", **options)
    assert (status, summary["status"], summary["updates"]) == (0, "completed", 0)
    assert summary["compile_seconds"] > 0
    # At least the staged batches: 28 of 50 images of 64 floats.
    assert summary["memory_bytes"] > 28 * 50 * 64 * 4
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert re.search(r"memory +[\d.]+ MiB on each device", capsys.readouterr().err)


def test_without_checkpoints_and_validation_there_is_neither(tmp_path, capsys):
    options = {"checkpoints": False, "micro_batch_size": 50, "validation": False}
    options |= {"weight_updates_per_epoch": 1, "target_accuracy": 0.5}
    status, summary = run(tmp_path / "run", **options)
    assert (status, summary["updates"]) == (0, 1)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "time_to_train_seconds" not in summary
    assert re.search(r"accuracy 0.5 +not validated", capsys.readouterr().err)


def test_samples_come_as_they_lie_where_they_are_not_shuffled():
    def labels(shuffle):
        config = build(CnnConfig, {"micro_batch_size": 50, "shuffle": shuffle})
        images = data.load(config)
        first = images.training[np.arange(50)]["label"]
        return (open_infeed(images, config, 28).peek()["label"] == first).all()

    assert labels(shuffle=False)
    assert not labels(shuffle=True)


def test_the_first_checkpoint_may_come_later_and_the_others_follow():
    options = RECIPE | {"num_epochs": 38, "ckpts_per_epoch": 0.25, "first_ckpt_epoch": 2}
    schedule = plan_events(build(CnnConfig, options), 1437)
    due = [e for e in range(1, 39) if schedule.due("checkpoint", 12 * e)]
    assert due == [*range(2, 39, 4)]
    with pytest.raises(ConfigurationError, match="cannot come after 40 epochs"):
        plan_events(build(CnnConfig, options | {"first_ckpt_epoch": 40}), 1437)


# Options for the device, and those for an IPU


def test_auto_loss_scaling_is_dynamic_loss_scaling():
    options = {"auto_loss_scaling": True, "precision": "16.32", "half_type": "float16"}
    assert build(CnnConfig, options).loss_scaling == "dynamic"


def test_custom_batch_norm_is_batch_norm():
    layer = {"name": "custom_batch_norm", "momentum": 0.9}
    assert build(CnnConfig, {"norm_layer": layer}).norm_layer == layer


@pytest.mark.parametrize("shares", [0.15, 1, 15, [10, 20, 30, 40]])
def test_a_share_of_an_ipus_memory_does_not_limit_the_run(shares, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    options = {"pipeline_splits": ["conv2"], "gradient_accumulation_count": 4}
    words = ["--pipeline-splits", "conv2", "--gradient-accumulation-count", "4"]
    words += ["--available-memory-proportion", *map(str, np.atleast_1d(shares))]
    file = tmp_path / "own.yml"
    file.write_text(
        yaml.safe_dump({"own": options | {"available_memory_proportion": shares}})
    )
    for given in (words, ["--config", "own"]):
        config, _ = parse(CnnConfig, given, program="", named_configs=file)
        (line,) = ipu.lines_about(config)
        assert line.startswith("--available-memory-proportion changes nothing here: ")
    assert not device.compiler_options(config)["gpu"]


def test_training_leaves_the_memory_of_the_device_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    options = {"compile_only": True, "available_memory_proportion": 0.15}
    status, _ = run(tmp_path / "run", **RECIPE | options)
    assert status == 0
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ
    assert "--available-memory-proportion changes nothing here" in capsys.readouterr().err


def test_what_xla_is_told_and_what_the_user_is_told():
    options = {"max_cross_replica_buffer_size": 0}
    config = build(CnnConfig, options)
    assert device.compiler_options(config)["gpu"] == {
        "xla_gpu_all_reduce_combine_threshold_bytes": 0,
    }
    assert device.lines_about(config, "gpu") == []
    assert len(device.lines_about(config, "cpu")) == 1
    assert device.lines_about(CnnConfig(), "cpu") == []


def test_every_option_without_effect_is_on_the_documented_list():
    config = CnnConfig(on_demand=False, nanoo=True, scheduling_algorithm="CHOOSE_BEST")
    lines = ipu.lines_about(config)
    assert [line.split()[0] for line in lines] == [
        "--on-demand",
        "--scheduling-algorithm",
        "--nanoo",
    ]
    readme = (resources.files("millrace.apps.cnn") / "README.md").read_text()
    listed = readme.split("## Without effect")[1].split("\n## ")[0]
    names = {name.replace("_", "-") for name in ipu.IpuOptions.__annotations__}
    assert set(re.findall(r"^\| `--([a-z-]+)`", listed, re.M)) == names
