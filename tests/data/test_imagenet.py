"""ImageNet and datasets in its layout: class folders, or TFRecord files."""

import os
import tarfile

import numpy as np
import pytest
from image_files import (
    SMALL,
    decode,
    encode,
    example,
    make_image,
    real_data,
    write_folders,
    write_records,
)

from millrace.config import ConfigurationError
from millrace.data.catalog import DatasetNotFound
from millrace.data.decoding import Crop
from millrace.data.imagenet import ImageFolder, load_imagenet, load_images


def test_the_folder_gives_the_label_and_validation_is_deterministic(tmp_path):
    write_folders(tmp_path)
    training, validation, *_ = load_images(tmp_path, SMALL)
    assert (len(training), len(validation)) == (15, 15)
    assert training.classes == validation.classes == ("class_0", "class_1", "class_2")
    batch = validation[np.array([14, 0, 6])]
    assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
    assert batch["label"].tolist() == [2, 0, 1]
    expected = decode(make_image(0)).astype(int)
    assert np.abs(batch["image"][1] - expected).mean() < 8  # the loss of JPEG
    np.testing.assert_array_equal(batch["image"], validation[np.array([14, 0, 6])]["image"])


@pytest.mark.parametrize("folder_name", ["val", "validation", "test"])
def test_the_validation_folder_may_have_any_of_three_names(tmp_path, folder_name):
    (write_folders(tmp_path) / "val").rename(tmp_path / folder_name)
    assert len(load_images(tmp_path, SMALL)[1]) == 15


def test_only_images_are_read_including_those_in_subfolders(tmp_path):
    folder = write_folders(tmp_path) / "train" / "class_1"
    (folder / "notes.txt").write_text("not an image")
    (folder / "._0.JPEG").write_bytes(b"left by a Mac")
    (folder / "images").mkdir()
    (folder / "images" / "9.JPG").write_bytes(encode(make_image(9)))
    training = ImageFolder(tmp_path / "train", SMALL)
    assert len(training) == 16
    assert training.name(10).endswith("class_1/images/9.JPG")
    assert training.labels.tolist() == [0] * 5 + [1] * 6 + [2] * 5


def test_a_folder_that_cannot_be_read_does_not_count_as_empty(tmp_path, monkeypatch):
    folder = write_folders(tmp_path) / "train"
    (folder / "class_1" / "more").mkdir()
    real = os.scandir

    def scan(path):
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(PermissionError, match="class_1/more"):
        ImageFolder(folder, SMALL)


def test_a_missing_validation_folder_is_named(tmp_path):
    (write_folders(tmp_path) / "val").rename(tmp_path / "unused")
    with pytest.raises(
        ConfigurationError, match=r"has training images, but none for validation"
    ):
        load_images(tmp_path, SMALL)
    training, validation, *_ = load_images(tmp_path, SMALL, needs_validation=False)
    assert (len(training), validation) == (15, None)


def test_a_missing_or_inconsistent_dataset_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigurationError) as caught:
            load_images(path, SMALL)
        for part in (str(path), "train/<class>/*.jpg", "--dataset-path"):
            assert part in str(caught.value)
    write_folders(tmp_path)
    (tmp_path / "val" / "class_7").mkdir()
    with pytest.raises(
        ValueError, match="has the class class_7, which training does not have"
    ):
        load_images(tmp_path, SMALL)
    (tmp_path / "train" / "class_7").mkdir()
    with pytest.raises(ValueError, match=r"class_7 has no images.*\.png or \.webp"):
        load_images(tmp_path, SMALL)


def test_validation_images_without_class_folders_are_an_error(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "test").mkdir()
    (tmp_path / "val").rename(tmp_path / "unused")
    (tmp_path / "test" / "ILSVRC2012_val_00000001.JPEG").write_bytes(encode(make_image(0)))
    with pytest.raises(ValueError, match="has no class folders"):
        load_images(tmp_path, SMALL)


def test_real_images_in_class_folders_are_read(tmp_path):
    path = real_data("imagenet_small/imagenette160.tar")
    with tarfile.open(path) as tar:
        tar.extractall(tmp_path, filter="data")
    training, validation, *_ = load_images(tmp_path / "imagenette160", Crop())
    assert (len(training), len(validation)) == (1000, 500)
    assert np.bincount(training.labels).tolist() == [100] * 10
    batch = training.stream(64, seed=0).batch(3)
    assert batch["image"].shape == (64, 224, 224, 3)
    colors = validation[np.arange(0, 500, 10)]["image"].mean((0, 1, 2)) / 255
    np.testing.assert_allclose(colors, [0.464, 0.458, 0.430], atol=0.05)
    assert training.corrupt == validation.corrupt == {}


def write_shards(folder, names):
    for number, name in enumerate(names):
        write_records(folder / name, [example(encode(make_image(number)), number + 1)])


def test_class_folders_determine_the_number_of_classes(tmp_path):
    write_folders(tmp_path, num_classes=4, per_class=2)
    for load in (load_imagenet, load_images):
        splits = load(tmp_path, SMALL)
        assert (len(splits.training), len(splits.validation)) == (8, 8)
        assert (splits.num_classes, splits.warning) == (4, None)


@pytest.mark.parametrize(
    ("training", "warning"),
    [
        (["train-00000-of-00002", "train-00001-of-00002"], None),
        (["train-00000-of-00002"], "1 of 2 train files are present."),
        (["train-00000-of-00002", "train-1"], "2 of 1024 train files are present."),
        (["train.tfrecord"], "1 of 1024 train files are present."),
    ],
)
def test_missing_shards_are_only_a_warning(tmp_path, training, warning):
    write_shards(tmp_path, [*training, "validation-00000-of-00001"])
    splits = load_imagenet(tmp_path, SMALL)
    assert (len(splits.training), splits.num_classes) == (len(training), 1000)
    if warning is None:
        assert splits.warning is None
    else:
        assert splits.warning == f"{tmp_path} is not all of ImageNet: {warning}"


def test_missing_shards_of_both_splits_are_one_sentence(tmp_path):
    write_shards(tmp_path, ["train-a", "validation-b"])
    splits = load_imagenet(tmp_path, SMALL)
    assert splits.warning.endswith(
        "1 of 1024 train files are present; 1 of 128 validation files are present."
    )


def test_a_missing_dataset_is_named_in_both_forms(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        load_imagenet(tmp_path, SMALL)
    for part in (str(tmp_path), "train-*", "val/<class>/*.JPEG", "image-net.org"):
        assert part in str(caught.value)


def test_programs_next_to_a_dataset_are_no_tfrecord_files(tmp_path):
    """Graphcore's commands run in a folder with train.py and validation.py."""
    for name in ("train.py", "train.log", "validation.py"):
        (tmp_path / name).write_text("#!/usr/bin/env python3\n" * 9)
    with pytest.raises(DatasetNotFound):
        load_imagenet(tmp_path, SMALL)
