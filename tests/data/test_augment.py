"""Crops, flips and scaling of arrays: correct, and determined by the generator."""

import itertools

import numpy as np

from millrace.data import augment
from millrace.data.source import ArraySource
from millrace.data.stream import Stream


def generator(seed=0):
    return np.random.default_rng(seed)


def images(count=200, dtype=np.uint8):
    return generator(9).integers(1, 256, (count, 6, 8, 3)).astype(dtype)


def test_random_flip_mirrors_about_half_of_the_images():
    before, after = images(), augment.random_flip(images(), generator())
    same = (after == before).all((1, 2, 3))
    mirrored = (after == before[:, :, ::-1]).all((1, 2, 3))
    assert (same ^ mirrored).all()
    assert 70 < mirrored.sum() < 130
    assert after.dtype == np.uint8


def test_pad_and_crop_shifts_each_image_and_fills_with_zeros():
    before, after = images(), augment.pad_and_crop(images(), generator(), padding=2)
    assert after.shape == before.shape and after.dtype == before.dtype
    padded = np.pad(before, ((0, 0), (2, 2), (2, 2), (0, 0)))
    shifts = set()
    for number in range(len(before)):
        offsets = [
            (top, left)
            for top, left in itertools.product(range(5), range(5))
            if (padded[number, top : top + 6, left : left + 8] == after[number]).all()
        ]
        assert len(offsets) == 1
        shifts.update(offsets)
    assert len(shifts) == 25  # every shift occurs among 200


def test_augmentation_depends_only_on_the_seed_and_the_position():
    source = ArraySource({"image": images(), "label": np.arange(200)})
    transform = augment.map_images(augment.random_flip, augment.pad_and_crop)

    def batches(seed, start):
        stream = Stream(source, 16, seed=seed, transform=transform)
        stream.seek(start)
        return [batch["image"] for batch in itertools.islice(stream, 6 - start)]

    whole, resumed, other = batches(1, 0), batches(1, 4), batches(2, 0)
    np.testing.assert_array_equal(whole[4:], resumed)
    assert not np.array_equal(whole, other)


def test_standardized_images_have_mean_0_and_std_1():
    result = augment.standardize(images(5))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result.mean((1, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(result.std((1, 2, 3)), 1, rtol=1e-5)
    np.testing.assert_allclose(augment.standardize(images(1)[0]), result[0], atol=1e-6)


def test_a_uniform_image_is_standardized_to_zeros():
    np.testing.assert_array_equal(augment.standardize(np.full((2, 4, 4, 3), 77)), 0)


def test_normalize_scales_then_subtracts_the_mean_and_divides_by_the_std():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    result = augment.normalize(images(4), mean, std)
    assert result.dtype == np.float32
    expected = (images(4) / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(result, expected, atol=1e-6)
