"""Options of ``cnn train``: how they combine, and which combinations are errors."""

import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import yaml
from seed_lines import GRAPHCORE

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.graphcore import GraphcoreOptions
from millrace.config import ConfigurationError, build, parse

SHARED = {"dbn_replica_group_size": 2, "num_replicas": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training": False}, "needs checkpoint_dir"),
        ({"training": False, "validation": False}, "nothing to do"),
        ({"training": False, "validate": "during", "checkpoint_dir": "x"}, "every or last"),
        ({"training": False, "compile_only": True, "checkpoint_dir": "x"}, "compile_only"),
        ({"checkpoint_input_dir": "x"}, "--training False"),
        ({"checkpoints": False, "validate": "every"}, "checkpoints is off"),
        ({"checkpoints": False, "resume": True, "run_dir": "x"}, "checkpoints is off"),
        ({"target_accuracy": 75.9}, "at most 1, got 75.9"),
        ({"weight_avg_exp": [1.0]}, "weight_avg_exp must be more than 0 and below 1"),
        ({"weight_avg_n": [0]}, "weight_avg_n must be a positive number of epochs"),
        ({"weight_avg_n": [1], "checkpoints": False}, "checkpoints is off"),
        ({"validation_num_replicas": 0}, "validation_num_replicas must be at least 1"),
        ({"first_ckpt_epoch": -1}, "first_ckpt_epoch must be 0 or more"),
        ({"prefetch_depth": 0}, "prefetch_depth must be at least 1"),
        ({"max_cross_replica_buffer_size": -1}, "0 or more, got -1"),
        ({"available_memory_proportion": [15, 20]}, "takes one percentage; got 2"),
        ({"available_memory_proportion": 120}, "at most 100; got 120"),
        ({"available_memory_proportion": [15, 20, 25], "pipeline_splits": ["conv2"],
          "device_mapping": [0, 1], "gradient_accumulation_count": 4}, r"or 4 \(two per"),
        ({"auto_loss_scaling": True}, "is for float16"),
        ({"auto_loss_scaling": True, "loss_scaling": 128}, "not both"),
        ({"fused_preprocessing": True}, "accelerator_side_preprocess must be on"),
        ({"eight_bit_transfer": True}, "accelerator_side_preprocess must be on"),
        ({"norm_layer": {"name": "layer_norm"}}, "must be batch_norm or .*group_norm"),
        ({"norm_layer": {"name": "group_norm"}}, "only one of them; got neither"),
        ({"norm_layer": {"name": "batch_norm", "groups": 2}}, "got groups as well"),
        ({"num_replicas": 4, "dbn_replica_group_size": 3}, "cannot be divided into groups"),
        ({"dataset": "cifar10", "image_size": 64}, "images of cifar10 keep their size"),
        ({"dataset": "imagenet", "image_size": 4}, "image_size must be at least 8, got 4"),
        ({"num_workers": -1}, "num_workers must be 0 or more, got -1"),
        ({"max_corrupt": -1}, "max_corrupt must be 0 or more, got -1"),
        ({"dataset": "imagnet"}, r"Did you mean imagenet\?"),
        ({"mixup_alpha": 0.2}, "micro_batch_size must be at least 2, got 1"),
        ({"mixup_alpha": -1, "micro_batch_size": 4}, "mixup_alpha must be 0 or more"),
        ({"cutmix_lambda": 0, "micro_batch_size": 4}, "more than 0 and at most 1"),
        ({"mixup": 0.2}, "micro_batch_size must be at least 2, got 1"),
        ({"mixup": 0.2, "cutmix_lambda": 0.5, "micro_batch_size": 4}, "cannot be combined"),
        ({"cutmix": -1, "micro_batch_size": 4}, "cutmix must be 0 or more"),
        ({"random_erasing": 1.5}, "must be between 0 and 1, got 1.5"),
        ({"color_jitter": -1}, "color_jitter must be 0 or more, got -1"),
        ({"randaugment_ops": 2}, "is for augment randaugment, but augment is basic"),
        ({"augment": "randaugment", "randaugment_ops": 0}, "must be at least 1, got 0"),
        ({"augment": "randaugment", "randaugment_magnitude": 31}, "between 0 and 30"),
        ({"augment": "randaugment", "accelerator_side_preprocess": False},
         "augment randaugment changes images on the device"),
        ({"color_jitter": 0.4, "accelerator_side_preprocess": False},
         "color_jitter changes images on the device"),
        ({"dataset": "cifar10", "crop_padding": 32}, "must be between 1 and 31"),
        ({"dataset": "digits", "crop_padding": 2}, "off for digits .* give random_crop"),
        ({"dataset": "cifar10", "random_crop": False, "crop_padding": 2}, "random_crop is"),
        ({"dataset": "cifar10", "crop_scale": [0.1, 1]}, "is for imagenet and imagefolder"),
        ({"dataset": "imagenet", "crop_padding": 4}, "crop_padding is for small images"),
        ({"dataset": "imagenet", "crop_scale": [1, 0.1]}, "takes two numbers.*got 1 0.1"),
        ({"dataset": "imagenet", "crop_ratio": [1]}, "takes two numbers"),
        ({"dataset": "imagenet", "augment": "none", "crop_scale": [0.1, 1]},
         "off for imagenet with augment none"),
        ({"pretrained": "x", "model_name": "resnet", "training": False,
          "checkpoint_dir": "x"}, "pretrained is for training, but training is off"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ConfigurationError, match=message):
        build(CnnConfig, GRAPHCORE | options)


@pytest.mark.parametrize(
    ("options", "dataset", "model"),
    [
        ({}, "digits", "digits_cnn"),
        ({"model_name": "cifar_resnet8"}, "cifar10", "cifar_resnet8"),
        ({"dataset": "mnist"}, "mnist", "toy_model"),
        ({"model_name": "digits_cnn"}, "digits", "digits_cnn"),
    ],
)
def test_model_and_dataset_determine_each_others_default(options, dataset, model):
    config = build(CnnConfig, GRAPHCORE | options)
    assert (config.resolved_dataset, config.resolved_model) == (dataset, model)


@pytest.mark.parametrize(
    ("file", "options", "dataset"),
    [
        ("train/a/1.jpg", {}, "imagefolder"),
        ("train-0.tar", {}, "imagefolder"),
        ("dataset.json", {}, "imagefolder"),
        ("train.parquet", {}, "imagefolder"),
        ("train-00000-of-01024", {}, "imagenet"),
        ("dataset.json", {"dataset": "imagenet"}, "imagenet"),
        ("dataset.json", {"dataset": "cifar10"}, "cifar10"),
        ("dataset.json", {"synthetic_data": "host"}, "digits"),
        ("data_batch_1.bin", {"model_name": "cifar_resnet8"}, "cifar10"),
    ],
)
def test_the_dataset_is_recognized_by_its_files(tmp_path, file, options, dataset):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    config = build(CnnConfig, GRAPHCORE | {"dataset_path": tmp_path, **options})
    assert config.resolved_dataset == dataset
    is_decoded = dataset.startswith("image")
    assert config.scales_on_device == config.sends_bytes == is_decoded


@pytest.mark.parametrize(("name", "problem"), [("none", "is missing"), ("", "no images")])
def test_a_folder_without_images_is_not_replaced_by_the_digits(tmp_path, name, problem):
    config = build(CnnConfig, {"dataset_path": tmp_path / name})
    with pytest.raises(ConfigurationError, match=f"The folder .* {problem}"):
        data.load(config)


def test_the_current_folder_is_not_searched_for_images(tmp_path, monkeypatch):
    (tmp_path / "dataset.json").touch()
    monkeypatch.chdir(tmp_path)
    assert build(CnnConfig, {}).resolved_dataset == "digits"


def test_auto_loss_scaling_is_dynamic_loss_scaling():
    options = {"auto_loss_scaling": True, "precision": "16.32", "half_type": "float16"}
    assert build(CnnConfig, options).plan.loss_scaling == "dynamic"


@pytest.mark.parametrize(
    ("options", "validation"),
    [
        ({}, True),
        ({"synthetic_data": "device"}, False),
        ({"generated_data": True}, False),
        ({"synthetic_data": "host", "validation": True}, True),
        ({"synthetic_data": "host", "training": False, "checkpoint_dir": "x"}, True),
    ],
    ids=str,
)
def test_training_on_synthetic_data_validates_only_if_asked(options, validation):
    assert build(CnnConfig, options).workflow.validation is validation


def test_custom_batch_norm_is_batch_norm():
    layer = {"name": "custom_batch_norm", "momentum": 0.9}
    assert build(CnnConfig, {"norm_layer": layer}).model.norm_layer == layer


@pytest.mark.parametrize("shares", [0.15, 1, 15, [10, 20, 30, 40]])
def test_available_memory_proportion_has_no_effect(shares, tmp_path, monkeypatch):
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
        (notice,) = config.graphcore.notices()
        assert notice.startswith("--available-memory-proportion has no effect: ")
        assert not config.workflow.compiler_options()["gpu"]


def test_max_cross_replica_buffer_size_is_an_xla_option_on_gpus_only():
    config = build(CnnConfig, {"max_cross_replica_buffer_size": 1000})
    assert config.workflow.compiler_options()["gpu"] == {
        "xla_gpu_all_reduce_combine_threshold_bytes": 1000,
    }
    assert config.workflow.platform_notices("gpu") == []
    assert len(config.workflow.platform_notices("cpu")) == 1
    assert CnnConfig().workflow.platform_notices("cpu") == []


def test_the_options_of_older_runs_without_effect_are_read():
    unset = ("gather_conv_output", "min_remote_tensor_size", "no_dataset_cache")
    older = build(CnnConfig, dict.fromkeys(unset), expand=False)
    assert older == build(CnnConfig, {}, expand=False)


@pytest.mark.parametrize(
    ("options", "notices"),
    [
        ({"stable_norm": True, "batch_norm": True}, []),
        ({"stable_norm": True, "groups": 4}, ["--stable-norm"]),
        ({"gather_conv_output": True}, ["--gather-conv-output"]),
        ({"gather_conv_output": True, **SHARED}, []),
        (
            {"gather_conv_output": True, "groups": 4, **SHARED},
            ["--dbn-replica-group-size", "--gather-conv-output"],
        ),
    ],
)
def test_options_of_batch_norm_get_a_notice_where_they_do_nothing(options, notices):
    found = build(CnnConfig, options).model.notices()
    assert [notice.split(" has no effect")[0] for notice in found] == notices


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"dataset": "imagenet"}, 0),
        ({"dataset": "imagenet", "validation": False}, 1),
        ({"dataset": "imagenet", "synthetic_data": "host"}, 1),
        ({"dataset": "cifar10"}, 1),
    ],
)
def test_a_cache_that_is_turned_off_gets_a_notice_where_there_is_none(options, count):
    assert build(CnnConfig, options).cache_notices() == []
    notices = build(CnnConfig, options | {"no_dataset_cache": True}).cache_notices()
    assert len(notices) == count


def test_options_without_effect_have_one_reason_in_the_notice_and_the_documents():
    readme = (resources.files("millrace.apps.cnn") / "README.md").read_text()
    listed = readme.split("## Options without effect")[1].split("\n## ")[0]
    page = (Path(__file__).parents[3] / "docs" / "from_graphcore.md").read_text()
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.*) \|$", listed, re.M)
    rows += re.findall(r"^\| `(--[a-z-]+)` \| no effect: (.*) \|$", page, re.M)
    assert len(rows) >= 20
    for option, reason in rows:
        value = "balanced" if option.startswith("--internal-exchange") else "1"
        words = [option, value, "--accelerator-side-preprocess"]
        config, _ = parse(CnnConfig, words, program="x")
        expected = f"{option} has no effect: {reason.replace('`', '')}."
        assert config.graphcore.notices() == [expected]


def test_options_without_effect_are_documented_and_get_a_notice():
    options = {"on_demand": False, "nanoo": True, "scheduling_algorithm": "CHOOSE_BEST"}
    notices = build(CnnConfig, options).graphcore.notices()
    assert [notice.split()[0] for notice in notices] == [
        "--on-demand",
        "--scheduling-algorithm",
        "--nanoo",
    ]
    readme = (resources.files("millrace.apps.cnn") / "README.md").read_text()
    listed = readme.split("## Options without effect")[1].split("\n## ")[0]
    names = {
        name.replace("_", "-")
        for name, field in GraphcoreOptions.__dataclass_fields__.items()
        if "without_effect" in field.metadata
    }
    assert set(re.findall(r"^\| `--([a-z-]+)`", listed, re.M)) == names
    for name in names:
        value = "balanced" if name.startswith("internal-exchange") else "1"
        words = [f"--{name}", value, "--accelerator-side-preprocess"]
        config, _ = parse(CnnConfig, words, program="x")
        (notice,) = config.graphcore.notices()
        assert notice.startswith(f"--{name} has no effect: ")
