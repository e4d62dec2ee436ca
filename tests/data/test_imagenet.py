import functools

import numpy as np
import pytest
from image_files import encode, example, picture, write_folders, write_records

from millrace.config import ConfigurationError
from millrace.data.augment import imagenet_image
from millrace.data.image_source import ImageSource
from millrace.data.imagenet import load_folders, load_imagenet
from millrace.data.stream import EvaluationBatches

SMALL = functools.partial(imagenet_image, size=16)


def write_shards(folder, names):
    for number, name in enumerate(names):
        write_records(folder / name, [example(encode(picture(number)), number + 1)])


def test_class_folders_say_how_many_classes_there_are(tmp_path):
    write_folders(tmp_path, num_classes=4, per_class=2)
    for load in (load_imagenet, load_folders):
        found = load(tmp_path, SMALL)
        assert (len(found.training), len(found.validation)) == (8, 8)
        assert (found.num_classes, found.warning) == (4, None)


@pytest.mark.parametrize(
    ("training", "complaint"),
    [
        (["train-00000-of-00002", "train-00001-of-00002"], None),
        (["train-00000-of-00002"], "1 of 2 train files are there."),
        (["train-00000-of-00002", "train-1"], "2 of 1024 train files are there."),
        (["train.tfrecord"], "1 of 1024 train files are there."),
    ],
)
def test_missing_records_are_a_warning_and_no_more(tmp_path, training, complaint):
    write_shards(tmp_path, [*training, "validation-00000-of-00001"])
    found = load_imagenet(tmp_path, SMALL)
    assert (len(found.training), found.num_classes) == (len(training), 1000)
    if complaint is None:
        assert found.warning is None
    else:
        assert found.warning == f"{tmp_path} is not all of ImageNet: {complaint}"


def test_gaps_in_both_splits_are_one_sentence(tmp_path):
    write_shards(tmp_path, ["train-a", "validation-b"])
    found = load_imagenet(tmp_path, SMALL)
    assert found.warning.endswith(
        "1 of 1024 train files are there; 1 of 128 validation files are there."
    )


def test_what_is_missing_is_named_in_both_forms(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        load_imagenet(tmp_path, SMALL)
    for part in (str(tmp_path), "train-*", "val/<class>/*.JPEG", "image-net.org"):
        assert part in str(caught.value)


class Spoilt(ImageSource):
    """Pictures of which some cannot be decoded."""

    def __init__(self, count, spoilt):
        super().__init__(count, SMALL, max_corrupt=count)
        self._spoilt = spoilt

    def name(self, index):
        return f"number {index}"

    def encoded(self, index):
        return b"" if index in self._spoilt else encode(picture(index)), index


def test_what_stands_in_for_an_unreadable_sample_is_not_evaluated():
    batches = EvaluationBatches(Spoilt(10, {3, 7}), 4)
    seen = [
        label
        for element in batches
        for label, valid in zip(element["batch"]["label"], element["valid"], strict=True)
        if valid
    ]
    assert seen == [0, 1, 2, 4, 5, 6, 8, 9]
    assert batches.num_valid == 8
    list(batches)
    assert batches.num_valid == 8  # of one pass, not of all


def test_flipping_can_be_left_to_the_device():
    image = picture(0, size=(16, 16))
    pictures = [
        SMALL(image, np.random.default_rng(seed), flip=flip)
        for flip in (True, False)
        for seed in range(20)
    ]
    pairs = list(zip(pictures[:20], pictures[20:], strict=True))
    same = [np.array_equal(a, b) for a, b in pairs]
    mirrored = [np.array_equal(a, b[:, ::-1]) for a, b in pairs]
    assert all(s or m for s, m in zip(same, mirrored, strict=True))
    assert 4 <= sum(same) <= 16
