"""Synthetic images for measuring speed."""

import json
import logging
import math

import jax
import numpy as np
import pytest
from seed_lines import GRAPHCORE

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.cli import main
from millrace.config import build

BYTES = {"accelerator_side_preprocess": True, "eight_bit_transfer": True}


def load(**options):
    config = build(CnnConfig, GRAPHCORE | options)
    return config, data.load(config)


@pytest.mark.parametrize(
    ("options", "shape", "sizes"),
    [
        ({"dataset": "cifar10"}, (32, 32, 3), (50_000, 10_000)),
        ({"dataset": "fashion-mnist"}, (28, 28, 1), (60_000, 10_000)),
        ({"dataset": "digits"}, (8, 8, 1), (1437, 360)),
        ({"dataset": "imagenet", "image_size": 40}, (40, 40, 3), (1_281_167, 50_000)),
    ],
)
@pytest.mark.parametrize("where", ["host", "device"])
def test_synthetic_data_have_the_sizes_of_the_dataset(options, shape, sizes, where):
    config, images = load(synthetic_data=where, **options)
    assert (len(images.training), len(images.validation)) == sizes
    assert images.image_shape == shape
    with data.open_infeed(images, config, 1) as infeed:
        element = infeed.peek()
    assert element["image"].shape == (1, *shape)
    is_bytes = options["dataset"] == "imagenet"
    assert element["image"].dtype == (np.uint8 if is_bytes else np.float32)
    assert element["label"].shape == (1,) and element["label"].dtype == np.int32


@pytest.mark.parametrize("where", ["host", "device"])
def test_synthetic_images_are_mirrored_in_every_second_epoch_as_well(where):
    flips = {"dataset": "cifar10", "alternating_flip": True, **BYTES}
    config, images = load(synthetic_data=where, micro_batch_size=50, **flips)
    with data.open_infeed(images, config, 1) as infeed:
        mirrored = np.asarray(infeed.chunk(1).data["mirrored"][0])
    assert mirrored.shape == (50,) and mirrored.dtype == bool
    assert 0 < mirrored.sum() < 50


@pytest.mark.parametrize("dataset", ["cifar10", "digits", "mnist", "imagenet"])
@pytest.mark.parametrize("options", [{}, {"accelerator_side_preprocess": True}, BYTES])
def test_images_from_host_and_device_reach_the_model_in_the_same_range(dataset, options):
    size = {"image_size": 16} if dataset == "imagenet" else {}
    is_bytes = options is BYTES or dataset == "imagenet"
    ranges = []
    for where in ("host", "ipu"):
        config, images = load(
            synthetic_data=where, dataset=dataset, micro_batch_size=64, **options, **size
        )
        with data.open_infeed(images, config, 2) as infeed:
            batch = infeed.chunk(2).data
        assert batch["image"].dtype == (np.uint8 if is_bytes else np.float32)
        labels = np.asarray(batch["label"])
        assert labels.min() >= 0 and labels.max() < images.num_classes
        assert len(np.unique(labels)) >= 10
        prepared = images.preprocess(batch["image"][0], jax.random.key(0))
        ranges.append((float(prepared.mean()), float(prepared.std())))
    np.testing.assert_allclose(*ranges, atol=0.02)
    if dataset == "imagenet":
        np.testing.assert_allclose(ranges[0], (0.22, 0.93), atol=0.05)
    elif dataset == "cifar10":
        np.testing.assert_allclose(ranges[0], (0, 1), atol=0.1)
    else:
        np.testing.assert_allclose(ranges[0], (127 / 255, 0.88 * 60 / 255), atol=0.01)


def test_the_seed_determines_synthetic_data():
    batches = []
    for seed in (0, 0, 1):
        config, images = load(synthetic_data="device", dataset="mnist", seed=seed)
        chunk = data.open_infeed(images, config, 2).chunk(2)
        batches.append(np.asarray(chunk.data["image"]))
    np.testing.assert_array_equal(batches[0], batches[1])
    assert not np.array_equal(batches[0], batches[2])


@pytest.mark.parametrize("validation", [[], ["--validation"], ["--no-validation"]])
def test_training_on_synthetic_data_needs_no_files_and_validates_only_if_asked(
    validation, tmp_path, monkeypatch, capsys
):
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    monkeypatch.chdir(tmp_path)
    replicas = str(min(2, jax.device_count()))
    with pytest.raises(SystemExit) as left:
        main(
            [
                *("cnn", "train", "--model", "digits_cnn", "--micro-batch-size", "32"),
                *("--synthetic-data", "device", "--num-replicas", replicas),
                *("--weight-updates-per-epoch", "6", "--gradient-accumulation", "2"),
                *("--run-dir", "run", *validation),
            ]
        )
    logger.handlers, logger.level, logger.propagate = kept
    output = capsys.readouterr().err
    assert left.value.code == 0, output
    assert "digits (synthetic, generated on the device), 1,437 training" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["updates"] == 6
    assert math.isfinite(summary["metrics"]["train_loss"])
    validates = validation == ["--validation"]
    assert ("Validation is skipped" in output) != validates
    assert ("validation_accuracy" in summary["metrics"]) == validates
