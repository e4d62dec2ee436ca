"""Datasets of small images, preprocessed on the host or on the device."""

import jax
import numpy as np
import pytest
from image_files import write_folders
from seed_lines import GRAPHCORE

from millrace.apps.cnn import augment, data
from millrace.apps.cnn.augment import get_preprocessing
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.data import DataOptions
from millrace.config import ConfigurationError, build
from millrace.data import cifar as cifar_files


@pytest.fixture(autouse=True)
def small_cifar(monkeypatch):
    """Accept files of 20 images as complete."""
    monkeypatch.setattr(cifar_files, "_num_images", lambda name, layout, file: 20)


@pytest.fixture(scope="module")
def cifar_folder(tmp_path_factory):
    """The official binary layout, with 20 random images per file instead of 10,000."""
    folder = tmp_path_factory.mktemp("cifar")
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        records = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / f"{name}.bin")
    return folder


def images(folder, **options):
    given = {"dataset": "cifar10", "dataset_path": folder, **options}
    return data.load(build(CnnConfig, GRAPHCORE | given))


def standardized(image):
    image = image.astype(np.float64)
    mean = image.mean((1, 2, 3), keepdims=True)
    return (image - mean) / image.std((1, 2, 3), keepdims=True)


BYTES = {"accelerator_side_preprocess": True, "eight_bit_transfer": True}


def test_validation_images_are_the_same_preprocessed_on_host_or_device(cifar_folder):
    prepared = []
    for options in [{}, {"accelerator_side_preprocess": True}, BYTES]:
        loaded = images(cifar_folder, **options)
        batch = loaded.validation[np.arange(8)]["image"]
        prepared.append((batch.dtype, np.asarray(loaded.preprocess(batch, None))))
    assert [str(dtype) for dtype, _ in prepared] == ["float32", "float32", "uint8"]
    raw = images(cifar_folder, **BYTES).validation[np.arange(8)]["image"]
    for _, image in prepared:
        np.testing.assert_allclose(image, standardized(raw), atol=1e-4)


def crop(raw, top, left, flipped):
    """Pad standardized images with zeros, crop and mirror them, one at a time."""
    padded = np.pad(standardized(raw), ((0, 0), (4, 4), (4, 4), (0, 0)))
    cut = [p[t : t + 32, x : x + 32] for p, t, x in zip(padded, top, left, strict=True)]
    return np.stack([c[:, ::-1] if f else c for c, f in zip(cut, flipped, strict=True)])


def find_crops(raw, prepared):
    """Return the crop and flip of each image; exactly one must match."""
    found = []
    for before, after in zip(raw, prepared, strict=True):
        top, left, flipped = np.unravel_index(np.arange(162), (9, 9, 2))
        candidates = crop(np.repeat(before[None], 162, 0), top, left, flipped)
        fits = np.abs(candidates - after).max((1, 2, 3)) < 1e-3
        assert fits.sum() == 1
        found.append(int(fits.argmax()))
    return found


def test_the_device_crops_and_flips_at_the_given_offsets(cifar_folder):
    raw = images(cifar_folder, **BYTES).training[np.arange(81)]["image"]
    top, left = np.divmod(np.arange(81), 9)
    flipped = np.arange(81) % 2 == 0
    cut = augment.crop_and_flip(augment.standardize(raw), top, left, flipped)
    np.testing.assert_allclose(cut, crop(raw, top, left, flipped), atol=1e-4)
    assert np.all(np.asarray(cut)[0, :4] == 0)  # zero is the mean of the image


@pytest.mark.parametrize("place", ["device", "host"])
def test_every_training_image_is_cropped_and_flipped_independently(cifar_folder, place):
    raw = images(cifar_folder, **BYTES).training[np.arange(60)]["image"]
    if place == "device":
        loaded = images(cifar_folder, **BYTES)
        prepared = loaded.preprocess(raw, jax.random.key(0))
        again = loaded.preprocess(raw, jax.random.key(0))
        other = loaded.preprocess(raw, jax.random.key(1))
    else:
        transform = images(cifar_folder).transform
        prepared, again, other = (
            transform({"image": raw}, np.random.default_rng(seed))["image"]
            for seed in (0, 0, 1)
        )
    found = find_crops(raw, np.asarray(prepared))
    assert len({place // 2 for place in found}) > 25
    assert 15 <= sum(place % 2 for place in found) <= 45
    np.testing.assert_array_equal(prepared, again)
    assert not np.array_equal(prepared, other)


def test_the_host_only_gathers_bytes_for_eight_bit_transfer(cifar_folder):
    loaded = images(cifar_folder, **BYTES)
    assert loaded.transform is None
    batch = loaded.training[np.array([3, 1])]
    assert batch["image"].dtype == np.uint8 and batch["image"].flags.c_contiguous
    np.testing.assert_array_equal(batch["image"], loaded.training.arrays["image"][[3, 1]])


def test_the_device_preprocesses_in_float32_and_rounds_to_the_compute_type(cifar_folder):
    loaded = images(cifar_folder, **BYTES, precision="16.32")
    raw = loaded.validation[np.arange(8)]["image"]
    prepared = loaded.preprocess(raw, None)
    assert prepared.dtype == np.float16 or str(prepared.dtype) == "bfloat16"
    exact = np.asarray(augment.standardize(raw)).astype(prepared.dtype)
    np.testing.assert_array_equal(np.asarray(prepared), exact)


def test_a_constant_image_becomes_zeros():
    constant = np.full((1, 32, 32, 3), 7, np.uint8)
    np.testing.assert_array_equal(augment.standardize(constant), 0)


def test_mnist_and_digits_are_scaled():
    white = np.full((1, 2, 2, 1), 255, np.uint8)
    scaled = get_preprocessing("mnist")
    assert float(scaled.scale_on_host(white).max()) == 1.0
    assert float(scaled.scale_on_device(white).max()) == 1.0
    for options in ({}, {"accelerator_side_preprocess": True}, BYTES):
        loaded = data.load(build(CnnConfig, GRAPHCORE | options))
        batch = loaded.validation[np.arange(360)]["image"]
        assert (batch.dtype == np.uint8) == (options is BYTES)
        prepared = np.asarray(loaded.preprocess(batch, None))
        assert (prepared.min(), prepared.max()) == (0, 1)
        assert len(np.unique(prepared)) == 17


def test_a_missing_dataset_names_the_files_and_the_folder(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no cifar10 in .*data_batch_1.bin"):
        images(tmp_path)


def test_the_host_prepares_as_many_images_in_parallel_as_asked_for():
    asked = [DataOptions(pipeline_num_parallel=n) for n in (None, 1, 16, 17, 48)]
    assert [options.parallel_batches(16) for options in asked] == [2, 1, 1, 2, 3]
    with pytest.raises(ValueError, match="pipeline_num_parallel must be at least 1, got 0"):
        DataOptions(pipeline_num_parallel=0)


@pytest.mark.parametrize(
    ("options", "decoded"),
    [({}, 4), ({"no_dataset_cache": True}, 8), ({"dataset_cache_gib": 0.0}, 8)],
    ids=str,
)
def test_decoded_validation_images_stay_in_memory_if_allowed(options, decoded, tmp_path):
    folder = write_folders(tmp_path)
    given = {"dataset": "imagefolder", "image_size": 32, "num_workers": 0, **options}
    validation = images(folder, **given).validation
    for _ in range(2):
        _ = validation[np.arange(4)]
    assert validation.num_decoded == decoded
