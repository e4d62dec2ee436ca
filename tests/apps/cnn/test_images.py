"""Pictures of any size, from files to the network, as a user trains on them."""

import json
import logging
import re

import jax
import numpy as np
import pytest
from image_files import encode, example, make_image, write_folders, write_records

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.predictor import load_trained
from millrace.cli import main
from millrace.config import ConfigurationError, build

BYTES = {"accelerator_side_preprocess": True, "eight_bit_transfer": True}
TRAIN = (
    *("cnn", "train", "--micro-batch-size", "4", "--image-size", "32"),
    *("--run-dir", "run"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("pictures"))


def load(folder, **options):
    values = {"dataset": "imagefolder", "dataset_path": folder, "image_size": 16}
    return data.load(build(CnnConfig, values | options))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a command in this process; return its status and what it said."""
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    monkeypatch.chdir(tmp_path)

    def call(*words):
        with pytest.raises(SystemExit) as left:
            main(words)
        said = capsys.readouterr()
        return left.value.code, said.out + said.err

    yield call
    logger.handlers, logger.level, logger.propagate = kept


def summary(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def test_pictures_are_the_same_wherever_they_are_normalized(folders):
    raw = load(folders, **BYTES).validation[np.arange(15)]["image"]
    assert raw.dtype == np.uint8 and raw.shape == (15, 16, 16, 3)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (raw / 255 - mean) / std
    for options in ({}, {"accelerator_side_preprocess": True}, BYTES):
        loaded = load(folders, **options)
        assert (loaded.num_classes, loaded.image_shape) == (3, (16, 16, 3))
        batch = loaded.validation[np.arange(15)]["image"]
        assert batch.dtype == (np.uint8 if options is BYTES else np.float32)
        np.testing.assert_allclose(loaded.prepare(batch, None), expected, atol=1e-5)


def test_training_pictures_are_flipped_once_on_one_side_or_the_other(folders):
    device = load(folders, **BYTES)
    batch = next(iter(device.stream(15, seed=1)))["image"]
    plain = np.asarray(device.prepare(batch, None))
    flipped = np.asarray(device.prepare(batch, jax.random.key(0)))
    kept = [np.array_equal(a, b) for a, b in zip(plain, flipped, strict=True)]
    turned = [np.array_equal(a[:, ::-1], b) for a, b in zip(plain, flipped, strict=True)]
    assert all(k or t for k, t in zip(kept, turned, strict=True))
    assert 3 <= sum(turned) <= 12
    host = next(iter(load(folders).stream(15, seed=1)))["image"]
    kept = [np.allclose(a, b, atol=1e-5) for a, b in zip(host, plain, strict=True)]
    turned = [
        np.allclose(a[:, ::-1], b, atol=1e-5) for a, b in zip(host, plain, strict=True)
    ]
    assert all(k or t for k, t in zip(kept, turned, strict=True))
    assert 3 <= sum(turned) <= 12


def test_anyones_pictures_can_be_trained_on(command, folders, tmp_path):
    status, said = command(
        *TRAIN, *("--dataset", "imagefolder", "--dataset-path", str(folders)),
        "--accelerator-side-preprocess", "--eight-bit-transfer",
    )  # fmt: skip
    assert status == 0, said
    assert f"from {folders}, 15 training and 15 validation samples, 3 classes" in said
    assert summary(tmp_path)["corrupt_samples"] == {}
    assert 0 <= summary(tmp_path)["metrics"]["validation_accuracy"] <= 1


def test_pictures_without_a_validation_folder_are_trained_on_if_asked(command, tmp_path):
    (write_folders(tmp_path) / "val").rename(tmp_path / "unused")
    words = (*TRAIN, "--dataset", "imagefolder")
    status, said = command(*words)
    assert status == 2
    assert f"{tmp_path} has train/, but no val/" in said and "--no-validation" in said
    status, said = command(*words, "--no-validation")
    assert status == 0, said
    assert "15 training and 0 validation samples, 3 classes" in said
    assert load_trained(tmp_path / "run").classes == ["class_0", "class_1", "class_2"]


def test_of_many_damaged_pictures_the_warning_names_a_few(command, tmp_path):
    for name in sorted((write_folders(tmp_path) / "train").rglob("*.JPEG"))[:6]:
        name.write_bytes(b"no image")
    status, said = command(*TRAIN, "--dataset", "imagefolder")
    assert status == 0, said
    (warning,) = (line for line in said.splitlines() if "could not be read" in line)
    assert "6 samples" in warning and "and 3 more (see summary.json)" in warning
    assert warning.count(".JPEG") == 3


def records(count, label=lambda number: number % 3 + 1):
    return [example(encode(make_image(number)), label(number)) for number in range(count)]


def test_records_with_some_damage_are_trained_on_and_the_damage_is_named(command, tmp_path):
    write_records(tmp_path / "train-0", [*records(7), example(b"no image", 1)])
    write_records(tmp_path / "validation-0", [*records(4), example(b"none either", 1)])
    words = [*TRAIN, "--dataset", "gc-imagenet"]  # in the current folder
    status, said = command(*words)
    assert status == 0, said
    assert f"imagenet from {tmp_path}, 8 training and 5 validation samples" in said
    assert (
        "1 of 1024 train files are present; 1 of 128 validation files are present" in said
    )
    assert "warning: 2 samples could not be read, and others took their place:" in said
    corrupt = summary(tmp_path)["corrupt_samples"]
    assert [name.split(",")[0] for name in corrupt] == ["train-0", "validation-0"]
    assert set(corrupt.values()) == {"not a JPEG, PNG or WebP image"}
    status, said = command(*words[:-3], "limited", *words[-2:], "--max-corrupt", "0")
    assert status == 1
    assert "1 of 8 samples cannot be read; at most 0 may be replaced" in said
    assert "train-0, byte" in said and "Traceback" not in said


def test_a_label_out_of_range_is_a_plain_error(command, tmp_path):
    write_records(tmp_path / "train-0", records(4, label=lambda _: 1001))
    write_records(tmp_path / "validation-0", records(4))
    status, said = command(*TRAIN, "--dataset", "imagenet", "--validation", "False")
    assert status == 1
    assert re.search(r"train-0, byte \d+ has the label 1001; .* between 1 and 1000\.", said)
    assert "ValueError" not in said


def test_a_class_that_training_does_not_know_is_a_plain_error(command, tmp_path):
    write_folders(tmp_path, num_classes=2, per_class=2)
    (tmp_path / "val" / "class_1").rename(tmp_path / "val" / "stranger")
    status, said = command(*TRAIN, "--dataset", "imagefolder")
    assert status == 1
    assert "val has the class stranger, which training does not have." in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "cifar10", "image_size": 64}, "images of cifar10 keep their size"),
        ({"dataset": "imagenet", "image_size": 4}, "image_size must be at least 8, got 4"),
        ({"max_corrupt": -1}, "max_corrupt must be 0 or more, got -1"),
        ({"dataset": "imagnet"}, "Did you mean imagenet?"),
    ],
)
def test_sizes_and_limits_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message.replace("?", r"\?")):
        build(CnnConfig, options)
