"""Training on image files of any size: folders and TFRecord files."""

import json
import logging
import re

import jax
import numpy as np
import pytest
from image_files import encode, example, make_image, write_folders, write_records
from seed_lines import GRAPHCORE

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.predictor import load_trained
from millrace.cli import main
from millrace.config import build
from millrace.data.decoding import NUM_DRAWS

BYTES = {"accelerator_side_preprocess": True, "eight_bit_transfer": True}
TRAIN = (
    *("cnn", "train", "--micro-batch-size", "4", "--image-size", "32"),
    *("--recipe", "graphcore", "--run-dir", "run"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("images"))


def load(folder, **options):
    values = {"dataset": "imagefolder", "dataset_path": folder, "image_size": 16}
    return data.load(build(CnnConfig, GRAPHCORE | values | options))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run a command in this process; return its status and output."""
    logger = logging.getLogger("millrace")
    kept = logger.handlers, logger.level, logger.propagate
    monkeypatch.chdir(tmp_path)

    def call(*words):
        with pytest.raises(SystemExit) as left:
            main(words)
        output = capsys.readouterr()
        return left.value.code, output.out + output.err

    yield call
    logger.handlers, logger.level, logger.propagate = kept


def summary(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def test_images_are_sent_as_bytes_and_normalized_on_the_device(folders):
    raw = load(folders, **BYTES).validation[np.arange(15)]["image"]
    assert raw.dtype == np.uint8 and raw.shape == (15, 16, 16, 3)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (raw / 255 - mean) / std
    for options in ({}, {"accelerator_side_preprocess": True}, BYTES):
        loaded = load(folders, **options)
        assert (loaded.num_classes, loaded.image_shape) == (3, (16, 16, 3))
        batch = loaded.validation[np.arange(15)]["image"]
        assert batch.dtype == np.uint8
        np.testing.assert_allclose(loaded.preprocess(batch, None), expected, atol=1e-5)


def test_training_images_are_flipped_either_on_the_host_or_on_the_device(folders):
    device = load(folders, **BYTES)
    batch = next(iter(device.stream(15, 1, seed=1)))["image"]
    plain = np.asarray(device.preprocess(batch, None))
    flipped = np.asarray(device.preprocess(batch, jax.random.key(0)))
    kept = [np.array_equal(a, b) for a, b in zip(plain, flipped, strict=True)]
    turned = [np.array_equal(a[:, ::-1], b) for a, b in zip(plain, flipped, strict=True)]
    assert all(k or t for k, t in zip(kept, turned, strict=True))
    assert 3 <= sum(turned) <= 12
    host = next(iter(load(folders).stream(15, 1, seed=1)))["image"]
    kept = [np.array_equal(a, b) for a, b in zip(host, batch, strict=True)]
    turned = [np.array_equal(a[:, ::-1], b) for a, b in zip(host, batch, strict=True)]
    assert all(k or t for k, t in zip(kept, turned, strict=True))
    assert 3 <= sum(turned) <= 12


def test_random_crops_of_files_can_be_limited_or_turned_off(folders):
    centers = load(folders).training[np.arange(15)]["image"]
    off = load(folders, augment="none").stream(15, 1, seed=1, shuffle=False)
    np.testing.assert_array_equal(off.batch(0)["image"], centers)
    flipped = load(folders, augment="none", flip=True).stream(15, 1, seed=1, shuffle=False)
    mirrored = [
        np.array_equal(image, center[:, ::-1]) and not np.array_equal(image, center)
        for image, center in zip(flipped.batch(0)["image"], centers, strict=True)
    ]
    assert 3 <= sum(mirrored) <= 12
    options = {"crop_scale": [0.5, 0.6], "crop_ratio": [1, 1]}
    crop = load(folders, **options).training.crop
    for draw in (0.0, 0.999):
        _, _, width, height = crop.choose_box(1000, 1000, [draw] * NUM_DRAWS)
        assert width == height
        assert 0.49 <= width * height / 1e6 <= 0.6  # edges snap to 8 pixels


def test_files_are_augmented_on_the_device(folders):
    loaded = load(folders, augment="trivialaugment", random_erasing=0.5)
    raw = loaded.training[np.arange(15)]["image"]
    preprocess = jax.jit(loaded.preprocess)
    plain = np.asarray(jax.jit(lambda x: loaded.preprocess(x, None))(raw))
    first, again, other = (
        np.asarray(preprocess(raw, jax.random.key(n))) for n in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    changed = [not np.allclose(a, b, atol=1e-5) for a, b in zip(first, plain, strict=True)]
    assert sum(changed) > 9
    assert not np.array_equal(first, other)


def test_a_folder_of_images_can_be_trained_on(command, folders, tmp_path):
    status, output = command(
        *TRAIN, *("--dataset", "imagefolder", "--dataset-path", str(folders)),
        "--accelerator-side-preprocess", "--eight-bit-transfer",
    )  # fmt: skip
    assert status == 0, output
    assert f"from {folders}, 15 training and 15 validation samples, 3 classes" in output
    assert summary(tmp_path)["corrupt_samples"] == {}
    assert 0 <= summary(tmp_path)["metrics"]["validation_accuracy"] <= 1


def test_a_folder_without_validation_images_needs_no_validation(command, tmp_path):
    (write_folders(tmp_path) / "val").rename(tmp_path / "unused")
    words = (*TRAIN, "--dataset", "imagefolder")
    status, output = command(*words)
    assert status == 2
    assert (
        f"{tmp_path} has training images, but none for validation" in output
        and "--no-validation" in output
    )
    status, output = command(*words, "--no-validation")
    assert status == 0, output
    assert "15 training and 0 validation samples, 3 classes" in output
    assert load_trained(tmp_path / "run").classes == ["class_0", "class_1", "class_2"]


def test_the_warning_about_unreadable_images_names_a_few(command, tmp_path):
    for name in sorted((write_folders(tmp_path) / "train").rglob("*.JPEG"))[:6]:
        name.write_bytes(b"no make_image")
    status, output = command(*TRAIN, "--dataset", "imagefolder")
    assert status == 0, output
    (warning,) = (line for line in output.splitlines() if "could not be read" in line)
    assert "6 samples" in warning and "and 3 more (see summary.json)" in warning
    assert warning.count(".JPEG") == 3


def records(count, label=lambda number: number % 3 + 1):
    return [example(encode(make_image(number)), label(number)) for number in range(count)]


def test_unreadable_records_are_replaced_and_reported(command, tmp_path):
    write_records(tmp_path / "train-0", [*records(7), example(b"no make_image", 1)])
    write_records(tmp_path / "validation-0", [*records(4), example(b"none either", 1)])
    words = [*TRAIN, "--dataset", "gc-imagenet"]  # in the current folder
    status, output = command(*words)
    assert status == 0, output
    assert f"imagenet from {tmp_path}, 8 training and 5 validation samples" in output
    assert (
        "1 of 1024 train files are present; 1 of 128 validation files are present" in output
    )
    assert "warning: 2 samples could not be read and were replaced by others:" in output
    corrupt = summary(tmp_path)["corrupt_samples"]
    assert [name.split(",")[0] for name in corrupt] == ["train-0", "validation-0"]
    assert set(corrupt.values()) == {"not a JPEG, PNG or WebP image"}
    status, output = command(*words[:-3], "limited", *words[-2:], "--max-corrupt", "0")
    assert status == 1
    assert "1 of 8 samples cannot be read; at most 0 may be replaced" in output
    assert "train-0, byte" in output and "Traceback" not in output


def test_a_label_out_of_range_is_a_one_line_error(command, tmp_path):
    write_records(tmp_path / "train-0", records(4, label=lambda _: 1001))
    write_records(tmp_path / "validation-0", records(4))
    status, output = command(*TRAIN, "--dataset", "imagenet", "--validation", "False")
    assert status == 1
    assert re.search(r"train-0, byte \d+ has the label 1001; .* between 1 and 1000", output)
    assert "ValueError" not in output


def test_a_class_without_training_images_is_a_one_line_error(command, tmp_path):
    write_folders(tmp_path, num_classes=2, per_class=2)
    (tmp_path / "val" / "class_1").rename(tmp_path / "val" / "stranger")
    status, output = command(*TRAIN, "--dataset", "imagefolder")
    assert status == 1
    assert "val has the class stranger, which training does not have." in output
