"""Arrays and random images in memory, as sources of batches."""

import numpy as np
import pytest

from millrace.data.source import ArraySource, SyntheticImages, random_pixels


def test_arrays_of_different_lengths_are_rejected():
    with pytest.raises(ValueError, match="different numbers of samples"):
        ArraySource({"a": np.zeros(3), "b": np.zeros(4)})
    with pytest.raises(ValueError, match="at least one array"):
        ArraySource({})
    with pytest.raises(ValueError, match=r"needs a dict of arrays.* got ndarray"):
        ArraySource(np.ones((5, 2)))


def test_lists_become_arrays_and_anything_else_is_rejected():
    source = ArraySource({"x": [1, 2, 3], "y": ((1.0, 2.0),) * 3})
    assert source[np.array([2, 0])]["x"].tolist() == [3, 1]
    assert source[np.array([1])]["y"].tolist() == [[1.0, 2.0]]
    for wrong in (3, 2.5, None, np.float32(1), [[1], [1, 2]], [None, {}], object()):
        with pytest.raises(
            ValueError, match=r"x (must be|cannot be converted to) an array"
        ):
            ArraySource({"x": wrong})


def test_synthetic_pixels_follow_a_truncated_normal_distribution():
    values = random_pixels(np.random.default_rng(0), (200, 20, 20, 3)).astype(float)
    assert values.min() >= 127 - 2 * 60 and values.max() <= 127 + 2 * 60
    # A normal distribution truncated at 2 std has 0.8796 of its std.
    np.testing.assert_allclose(values.std(), 0.8796 * 60, rtol=0.01)
    np.testing.assert_allclose(values.mean(), 126.5, atol=0.5)  # bytes are rounded down


def test_synthetic_images_have_the_length_of_the_real_dataset():
    source = SyntheticImages(1_281_167, (8, 8, 3), 1000, seed=1)
    assert len(source) == 1_281_167
    batch = source[np.array([0, 1, 1_281_166, 0])]
    assert batch["image"].dtype == np.uint8 and batch["image"].shape == (4, 8, 8, 3)
    assert batch["label"].dtype == np.int32
    np.testing.assert_array_equal(batch["image"][0], batch["image"][3])
    assert not np.array_equal(batch["image"][0], batch["image"][1])
    labels = source[np.arange(256)]["label"]
    assert 0 <= labels.min() and labels.max() < 1000 and len(set(labels)) > 200


def test_synthetic_images_are_prepared_once_and_depend_on_the_seed():
    calls = []

    def prepare(image):
        calls.append(len(image))
        return image.astype(np.float32)

    first = SyntheticImages(10, (4, 4, 1), 10, prepare=prepare, seed=3)
    again = SyntheticImages(10, (4, 4, 1), 10, seed=3)
    other = SyntheticImages(10, (4, 4, 1), 10, seed=4)
    everything = np.arange(10)
    assert first[everything]["image"].dtype == np.float32
    first[everything]
    assert calls == [10]
    np.testing.assert_array_equal(first[everything]["image"], again[everything]["image"])
    assert not np.array_equal(other[everything]["image"], again[everything]["image"])
