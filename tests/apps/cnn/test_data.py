import numpy as np
import pytest

from millrace.apps.cnn import data
from millrace.apps.cnn.config import CnnConfig
from millrace.config import ConfigurationError, build


@pytest.fixture(scope="module")
def cifar_folder(tmp_path_factory):
    """The official binary layout, with 20 random pictures a file instead of 10,000."""
    folder = tmp_path_factory.mktemp("cifar")
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        records = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / f"{name}.bin")
    return folder


def images(folder, **options):
    return data.load(CnnConfig(dataset="cifar10", dataset_path=folder, **options))


def standardised(image):
    image = image.astype(np.float64)
    mean = image.mean((1, 2, 3), keepdims=True)
    return (image - mean) / image.std((1, 2, 3), keepdims=True)


def test_validation_images_are_the_same_wherever_they_are_prepared(cifar_folder):
    settings = [
        {},
        {"accelerator_side_preprocess": True},
        {"accelerator_side_preprocess": True, "eight_bit_transfer": True},
    ]
    prepared = []
    for options in settings:
        loaded = images(cifar_folder, **options)
        batch = loaded.validation[np.arange(8)]["image"]
        prepared.append((batch.dtype, np.asarray(loaded.prepare(batch, None))))
    assert [str(dtype) for dtype, _ in prepared] == ["float32", "float32", "uint8"]
    raw = images(cifar_folder, **settings[2]).validation[np.arange(8)]["image"]
    for _, image in prepared:
        np.testing.assert_allclose(image, standardised(raw), atol=1e-4)


def test_training_images_are_shifted_by_at_most_four_pixels_and_flipped(cifar_folder):
    loaded = images(cifar_folder, accelerator_side_preprocess=True, eight_bit_transfer=True)
    batch = loaded.training[np.arange(60)]
    moved = loaded.transform(batch, np.random.default_rng(0))["image"]
    padded = np.pad(batch["image"], ((0, 0), (4, 4), (4, 4), (0, 0)))
    places = set()
    for before, after in zip(padded, moved, strict=True):
        windows = [
            (i, j)
            for i in range(9)
            for j in range(9)
            if np.array_equal(before[i : i + 32, j : j + 32], after)
        ]
        assert len(windows) == 1
        places.add(windows[0])
    assert len(places) > 30


def test_about_half_of_the_images_are_flipped_on_either_side(cifar_folder):
    import jax

    on_device = images(cifar_folder, accelerator_side_preprocess=True)
    batch = on_device.training[np.arange(100)]["image"].astype(np.float32)
    plain = np.asarray(on_device.prepare(batch, None))
    prepared = np.asarray(on_device.prepare(batch, jax.random.key(0)))
    flipped = [
        np.allclose(new, old[:, ::-1], atol=1e-5)
        for new, old in zip(prepared, plain, strict=True)
    ]
    kept = [np.allclose(n, o, atol=1e-5) for n, o in zip(prepared, plain, strict=True)]
    assert all(f or k for f, k in zip(flipped, kept, strict=True))
    assert 30 <= sum(flipped) <= 70

    host = images(cifar_folder)
    ramp = np.tile(np.arange(32, dtype=np.uint8)[:, None], (200, 32, 1, 3))
    seen = host.transform({"image": ramp, "label": None}, np.random.default_rng(1))
    falling = (seen["image"][:, 16, 20] < seen["image"][:, 16, 10])[:, 0]
    assert 60 <= falling.sum() <= 140


def test_mnist_is_scaled_and_digits_stay_as_they_are():
    assert float(data._normalised(np.full((1, 2, 2, 1), 255.0), "mnist", np).max()) == 1.0
    loaded = data.load(CnnConfig())
    batch = loaded.training[np.arange(4)]
    same = loaded.transform(batch, np.random.default_rng(0))
    np.testing.assert_array_equal(same["image"], batch["image"])


def test_a_missing_data_set_names_the_files_and_the_folder(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no cifar10 in .*data_batch_1.bin"):
        images(tmp_path)


@pytest.mark.parametrize(
    ("options", "dataset", "model"),
    [
        ({}, "digits", "digits_cnn"),
        ({"model_name": "cifar_resnet8"}, "cifar10", "cifar_resnet8"),
        ({"dataset": "mnist"}, "mnist", "toy_model"),
        ({"model_name": "digits_cnn"}, "digits", "digits_cnn"),
    ],
)
def test_what_is_not_given_follows_from_what_is(options, dataset, model):
    config = build(CnnConfig, options)
    assert (config.resolved_dataset, config.resolved_model) == (dataset, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eight_bit_transfer": True}, "accelerator_side_preprocess must be on"),
        ({"norm_layer": {"name": "layer_norm"}}, "must be batch_norm or group_norm"),
        ({"norm_layer": {"name": "group_norm"}}, "only one of them; got neither"),
        ({"norm_layer": {"name": "batch_norm", "groups": 2}}, "got groups as well"),
        ({"num_replicas": 4, "dbn_replica_group_size": 3}, "cannot be divided into groups"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        build(CnnConfig, options)
