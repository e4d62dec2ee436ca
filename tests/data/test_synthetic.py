import numpy as np

from millrace.data.synthetic import SyntheticImages, truncated_normal


def test_pixels_have_the_stated_distribution():
    values = truncated_normal(np.random.default_rng(0), (200, 20, 20, 3)).astype(float)
    assert values.min() >= 127 - 2 * 60 and values.max() <= 127 + 2 * 60
    # A normal distribution cut off at two deviations has 0.8796 of its deviation.
    np.testing.assert_allclose(values.std(), 0.8796 * 60, rtol=0.01)
    np.testing.assert_allclose(values.mean(), 126.5, atol=0.5)  # bytes are rounded down


def test_there_seem_to_be_as_many_samples_as_in_the_real_set():
    source = SyntheticImages(1_281_167, (8, 8, 3), 1000, seed=1)
    assert len(source) == 1_281_167
    batch = source[np.array([0, 1, 1_281_166, 0])]
    assert batch["image"].dtype == np.uint8 and batch["image"].shape == (4, 8, 8, 3)
    assert batch["label"].dtype == np.int32
    np.testing.assert_array_equal(batch["image"][0], batch["image"][3])
    assert not np.array_equal(batch["image"][0], batch["image"][1])
    labels = source[np.arange(256)]["label"]
    assert 0 <= labels.min() and labels.max() < 1000 and len(set(labels)) > 200


def test_preparing_is_done_once_and_the_seed_decides():
    calls = []

    def prepare(image):
        calls.append(len(image))
        return image.astype(np.float32)

    first = SyntheticImages(10, (4, 4, 1), 10, prepare=prepare, seed=3)
    again = SyntheticImages(10, (4, 4, 1), 10, seed=3)
    other = SyntheticImages(10, (4, 4, 1), 10, seed=4)
    every = np.arange(10)
    assert first[every]["image"].dtype == np.float32
    first[every]
    assert calls == [10]
    np.testing.assert_array_equal(first[every]["image"], again[every]["image"])
    assert not np.array_equal(other[every]["image"], again[every]["image"])
