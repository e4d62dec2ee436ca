"""A dataset on disk is compared with the catalog."""

import dataclasses

import numpy as np
import pytest
from image_files import SMALL, write_folders

from millrace.data import packed
from millrace.data.catalog import CATALOG
from millrace.data.imagenet import load_images
from millrace.data.source import ArraySource
from millrace.data.verify import verify

EXPECTED = dataclasses.replace(
    CATALOG["cifar10"], num_training=20, num_validation=10, image_shape=(4, 4, 3)
)


def source(count, shape=(4, 4, 3), image_dtype=np.uint8, label_dtype=np.int32, labels=None):
    label = np.arange(count) % 10 if labels is None else np.resize(labels, count)
    return ArraySource(
        {
            "image": np.zeros((count, *shape), image_dtype),
            "label": label.astype(label_dtype),
        }
    )


def test_a_correct_dataset_has_no_differences():
    assert verify((source(20), source(10)), EXPECTED) == []


@pytest.mark.parametrize(
    ("validation", "sentence"),
    [
        (source(9), "cifar10 has 9 validation samples; expected 10."),
        (
            source(10, shape=(4, 5, 3)),
            "validation images have the shape (4, 5, 3); expected (4, 4, 3).",
        ),
        (
            source(10, image_dtype=np.float32),
            "validation images are float32; expected uint8.",
        ),
        (
            source(10, label_dtype=np.int64),
            "validation labels are int64; expected int32.",
        ),
        (
            source(10, labels=[1, 10]),
            "validation labels range from 1 to 10; expected 0 to 9.",
        ),
        (
            source(10, labels=[-1, 3]),
            "validation labels range from -1 to 3; expected 0 to 9.",
        ),
    ],
)
def test_each_difference_is_a_sentence(validation, sentence):
    assert verify((source(20), validation), EXPECTED) == [sentence]


def test_all_differences_are_listed():
    without_labels = ArraySource({"image": np.zeros((3, 2, 2, 1), np.uint8)})
    assert verify((without_labels, source(10)), EXPECTED) == [
        "cifar10 has 3 training samples; expected 20.",
        "training samples have no label.",
        "training images have the shape (2, 2, 1); expected (4, 4, 3).",
    ]


@pytest.mark.parametrize(("num_samples", "notices"), [(4, False), (None, True)])
def test_the_checksums_of_packed_files_are_checked_if_all_is_read(
    tmp_path, num_samples, notices
):
    splits = load_images(write_folders(tmp_path / "folders"), SMALL)
    packed.pack(
        {"train": splits.training, "validation": splits.validation},
        tmp_path / "packed",
        packed.Encoding(),
        num_classes=3,
        source="here",
        num_workers=1,
        progress=lambda *_: None,
    )
    index = tmp_path / "packed" / "train-00000-of-00001"
    content = bytearray(index.read_bytes())
    content[8] ^= 1  # a checksum of a length, which is not read if there is an index
    index.write_bytes(content)
    expected = dataclasses.replace(
        EXPECTED, num_training=15, num_validation=15, image_shape=(16, 16, 3), num_classes=3
    )
    sources = load_images(tmp_path / "packed", SMALL)[:2]
    found = verify(sources, expected, num_samples=num_samples)
    damaged = f"{index} is damaged: its checksum does not match."
    assert found == ([damaged] if notices else [])


@pytest.mark.parametrize("num_samples", [4, None])
def test_images_in_folders_are_decoded_and_corrupt_ones_named(tmp_path, num_samples):
    write_folders(tmp_path)
    expected = dataclasses.replace(
        EXPECTED, num_training=15, num_validation=15, image_shape=(16, 16, 3), num_classes=3
    )
    sources = load_images(tmp_path, SMALL)[:2]
    assert verify(sources, expected, num_samples=num_samples) == []
    victim = tmp_path / "train" / "class_0" / "0.JPEG"
    victim.write_bytes(b"")
    two = dataclasses.replace(expected, num_classes=2)
    wrong_label, corrupt, wrong_too = verify(sources, two, num_samples=num_samples)
    assert "to 2; expected 0 to 1." in wrong_label
    assert wrong_too == "validation labels range from 0 to 2; expected 0 to 1."
    assert str(victim) in corrupt and "cannot be read" in corrupt
