"""Files of TensorFlow Datasets, read where they are and without TensorFlow."""

import dataclasses
import io

import numpy as np
import pytest
from image_files import SMALL, encode, make_image
from PIL import Image

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.config import ConfigurationError, build
from millrace.data import catalog, tfrecord
from millrace.data.imagenet import load_imagenet
from millrace.data.layouts import find_tfds
from millrace.data.source import DatasetError
from millrace.data.tfds import load_tfds


def make_example(image: bytes, label: int) -> bytes:
    """Encode what TFDS writes: an encoded image, a label from 0 on, and more."""
    values = {"id": b"train_0001", "image": image, "label": label}
    entries = (tfrecord._field(1, tfrecord._feature(*item)) for item in values.items())
    return tfrecord._field(1, b"".join(entries))


def write_split(folder, name, split, examples, shards=1):
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        records = b"".join(map(tfrecord.frame_record, examples[shard::shards]))
        path = folder / f"{name}-{split}.tfrecord-{shard:05}-of-{shards:05}"
        path.write_bytes(records)


def as_png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def images(monkeypatch):
    """Return 4 training and 2 test images of a smaller CIFAR-10."""
    known = dict(catalog.CATALOG)
    known["cifar10"] = dataclasses.replace(
        known["cifar10"], num_training=4, num_validation=2
    )
    for module in (catalog, data):
        monkeypatch.setattr(module, "CATALOG", known)
    monkeypatch.setattr("millrace.data.tfds.CATALOG", known)
    return np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)


def write_cifar(root, images, version="3.0.2"):
    folder = root / "cifar10" / version
    examples = [make_example(as_png(image), n) for n, image in enumerate(images)]
    write_split(folder, "cifar10", "train", examples[:4])
    write_split(folder, "cifar10", "test", examples[4:])
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("part", [".", "cifar10", "cifar10/3.0.2"])
def test_small_images_are_read_from_any_of_the_folders(tmp_path, images, part):
    write_cifar(tmp_path, images[::-1], "3.0.1")
    write_cifar(tmp_path, images)
    options = {"dataset": "cifar10", "dataset_path": str(tmp_path / part)}
    loaded = data.load(build(CnnConfig, options))
    batch = loaded.training[np.arange(4)]
    np.testing.assert_array_equal(batch["image"], images[:4])
    assert batch["label"].tolist() == [0, 1, 2, 3]
    assert batch["label"].dtype == np.int32
    assert len(loaded.validation) == 2


def test_the_data_directory_of_tfds_is_searched(tmp_path, images, monkeypatch):
    folder = write_cifar(tmp_path / "tfds", images)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "none"))
    options = {"dataset": "cifar10", "dataset_path": str(tmp_path)}
    assert len(data.load(build(CnnConfig, options)).training) == 4
    assert find_tfds(folder, "digits") is None
    assert build(CnnConfig, {"dataset_path": str(folder)}).data.dataset == "cifar10"


def test_a_damaged_or_incomplete_dataset_is_an_error(tmp_path, images):
    folder = write_cifar(tmp_path, images)
    write_split(folder, "cifar10", "test", [make_example(b"no image", 1)] * 2)
    with pytest.raises(DatasetError, match="byte 12 cannot be read"):
        load_tfds(folder, "cifar10")
    write_split(folder, "cifar10", "test", [make_example(as_png(images[0]), 10)] * 2)
    with pytest.raises(DatasetError, match="label 10; labels must be between 0 and 9"):
        load_tfds(folder, "cifar10")
    write_split(folder, "cifar10", "test", [make_example(as_png(images[0]), 1)])
    with pytest.raises(DatasetError, match="has 2 images, but there are 1"):
        load_tfds(folder, "cifar10")
    (folder / "cifar10-test.tfrecord-00000-of-00001").rename(
        folder / "cifar10-test.tfrecord-00000-of-00002"
    )
    with pytest.raises(DatasetError, match="1 of 2 files are present"):
        load_tfds(folder, "cifar10")


def test_imagenet_has_labels_from_zero_on_and_several_files(tmp_path):
    rng = np.random.default_rng(1)
    folder = tmp_path / "imagenet2012" / "5.1.0"
    examples = [make_example(encode(make_image(rng)), n) for n in (0, 999, 7)]
    write_split(folder, "imagenet2012", "train", examples, shards=2)
    with pytest.raises(ConfigurationError, match="no validation images"):
        load_imagenet(tmp_path, SMALL)
    write_split(folder, "imagenet2012", "validation", examples[:1])
    splits = load_imagenet(tmp_path, SMALL)
    assert splits.training[np.arange(3)]["label"].tolist() == [0, 7, 999]
    assert splits.num_classes == 1000 and splits.warning is None
    assert len(splits.validation) == 1
