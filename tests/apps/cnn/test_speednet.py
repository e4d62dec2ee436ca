"""What ``cifar10_94`` is made of: resident images, whitening, flips, crops and views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from seed_lines import GRAPHCORE

from millrace.apps.cnn import augment, data
from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.models import catalog, speednet
from millrace.apps.cnn.program import build_metrics, set_whitening
from millrace.apps.cnn.train import train
from millrace.checkpoint.files import restore_part
from millrace.config import ConfigurationError, build
from millrace.data import augment as on_host
from millrace.data.source import ArraySource
from millrace.data.stream import Stream
from millrace.nn.layers import apply_layers, init_layers
from millrace.nn.norms import batch_norm
from millrace.program.step import Weights
from millrace.run.run import run_command

ON_DEVICE = {"accelerator_side_preprocess": True, "eight_bit_transfer": True}
FLIPS = {"flip": True, "alternating_flip": True}
CROPS = {"random_crop": True, "crop_padding": 2, "crop_reflect": True}


def configure(**options):
    return build(CnnConfig, GRAPHCORE | options)


def trained_weights(directory, **options):
    """Train on the digits for two epochs that end within a chunk; return the weights."""
    settings = {
        **{"run_dir": directory, "quiet": True, "validation": False},
        "deterministic": True,
        **{"micro_batch_size": 32, "num_epochs": 2, "optimizer_params": {"momentum": 0.9}},
        **{"learning_rate": 0.05, "ckpts_per_epoch": 0, "weight_updates_per_epoch": 7},
    }
    config = configure(**(settings | ON_DEVICE | FLIPS | CROPS | options))
    assert run_command(train, config, command="cnn-train", command_line="test") == 0
    (checkpoint,) = (directory / "checkpoints").glob("update-*")
    images = data.load(config)
    model = catalog.build_layers(config.resolved_model, images.num_classes)
    example = np.zeros((1, *images.image_shape), np.float32)
    like = Weights(*init_layers(model, jax.random.key(0), example))
    return restore_part(checkpoint, like).state


@pytest.mark.devices(lambda replicas: replicas)
@pytest.mark.parametrize("replicas", [1, 2])
def test_resident_images_train_the_same_weights(replicas, tmp_path):
    options = {"num_replicas": replicas, "micro_batch_size": 32 // replicas}
    sent = trained_weights(tmp_path / "sent", **options)
    resident = trained_weights(tmp_path / "kept", resident_data=True, **options)
    jax.tree.map(np.testing.assert_array_equal, sent, resident)


def test_images_that_do_not_fit_are_an_error_that_says_so(monkeypatch):
    source = ArraySource({"image": np.zeros((4, 8, 8, 1), np.uint8)})
    monkeypatch.setattr(data, "memory_limit", lambda device: 4 * 64 * 2 - 1)
    with pytest.raises(ConfigurationError, match="resident_data keeps 256 bytes"):
        data.hold_on_devices(source, Stream(source, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resident_data": True}, "accelerator_side_preprocess must be on"),
        ({"resident_data": True, "dataset": "imagenet"}, "decoded from files"),
        (
            {"resident_data": True, "synthetic_data": "device", **ON_DEVICE},
            "not both: synthetic images",
        ),
        (
            {**FLIPS, "accelerator_side_preprocess": False},
            "alternating_flip mirrors images on the device",
        ),
        ({"alternating_flip": True, **ON_DEVICE}, "off for digits .*: give flip as well"),
        ({"alternating_flip": True, "flip": False}, "but flip is off"),
        ({"crop_reflect": True}, "crop_reflect is for random crops, which are off"),
        ({"crop_reflect": True, "dataset": "imagenet"}, "crop_reflect is for small images"),
        ({"normalize_channels": True}, "for cifar10 and cifar100, not for digits"),
        ({"freeze_after": ["conv1"]}, "must be PATTERN=EPOCHS"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises((ValueError, ConfigurationError), match=message):
        configure(**options)


@pytest.mark.parametrize("place", ["device", "host"])
def test_crops_reflect_images_at_their_edges(place):
    images = np.random.default_rng(0).random((50, 6, 5, 2), np.float32)
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="reflect")
    if place == "device":
        top, left = np.divmod(np.arange(50) % 25, 5)
        mirrored = np.zeros(50, bool)
        given = jnp.asarray(images)
        cut = augment.crop_and_flip(given, top, left, mirrored, 2, reflect=True)
    else:
        generator = np.random.default_rng(1)
        cut = on_host.pad_and_crop(images, generator, 2, reflect=True)
        top, left = np.random.default_rng(1).integers(0, 5, (2, 50))
    for before, after, t, x in zip(padded, np.asarray(cut), top, left, strict=True):
        np.testing.assert_array_equal(before[t : t + 6, x : x + 5], after)


def test_every_image_is_mirrored_in_every_second_epoch():
    source = ArraySource({"image": np.arange(40)})
    stream = Stream(source, 10, seed=3, annotate=data.flips_by_epoch(40, 3))
    epochs = np.zeros((4, 40), bool)
    for position in range(16):
        batch = stream.batch(position)
        epochs[position // 4, batch["image"]] = batch["mirrored"]
    assert 10 < epochs[0].sum() < 30
    np.testing.assert_array_equal(epochs[1:], ~epochs[:-1])
    part = stream.share(slice(2, 5)).batch(7)
    np.testing.assert_array_equal(part["mirrored"], stream.batch(7)["mirrored"][2:5])


def test_the_first_layer_whitens_patches():
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((3, 3))
    images = (rng.standard_normal((64, 9, 8, 3)) @ mixing + 0.2).astype(np.float32)
    kernel = speednet.whiten(jnp.asarray(images))
    assert kernel.shape == (2, 2, 3, 24)
    np.testing.assert_array_equal(kernel[..., 12:], -kernel[..., :12])
    windows = np.lib.stride_tricks.sliding_window_view(images, (2, 2), (1, 2))
    outputs = np.einsum("nyxcij,ijcf->nyxf", windows, kernel[..., :12]).reshape(-1, 12)
    covariance = outputs.T @ outputs / len(outputs)
    np.testing.assert_allclose(covariance, np.eye(12), atol=5e-3)


def test_training_starts_from_whitened_images_and_random_weights_do_not():
    config = configure(model_name="speednet", dataset="mnist", synthetic_data="host")
    images = data.load(config)
    model = catalog.build_layers("speednet", 10)
    example = np.zeros((1, *images.image_shape), np.float32)
    _, state = init_layers(model, jax.random.key(0), example)
    whitened = set_whitening(state, images)
    assert whitened["whiten"]["kernel"].shape == state["whiten"]["kernel"].shape
    assert not np.allclose(whitened["whiten"]["kernel"], state["whiten"]["kernel"])
    assert {k: v for k, v in whitened.items() if k != "whiten"} == {
        k: v for k, v in state.items() if k != "whiten"
    }


@pytest.mark.parametrize("views", ["none", "flip", "shift"])
def test_views_of_an_image_are_averaged(views):
    rng = np.random.default_rng(0)
    images = rng.random((4, 5, 6, 2), np.float32)
    weights = rng.standard_normal((5 * 6 * 2, 3)).astype(np.float32)

    def classify(image):
        return np.tanh(np.reshape(image, (len(image), -1)) @ weights)

    def mirrored(image):
        return (classify(image) + classify(image[:, :, ::-1])) / 2

    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    shifted = (mirrored(padded[:, :5, :6]) + mirrored(padded[:, 2:, 2:])) / 2
    expected = {
        "none": classify(images),
        "flip": mirrored(images),
        "shift": (mirrored(images) + shifted) / 2,
    }
    found = augment.classify_views(
        lambda x: jnp.tanh(x.reshape(len(x), -1) @ weights), jnp.asarray(images), views
    )
    np.testing.assert_allclose(found, expected[views], atol=1e-5)


def test_validation_uses_the_views():
    config = configure(dataset="digits", model_name="digits_cnn")
    images = data.load(config)
    model = catalog.build_layers("digits_cnn", 10)
    example = np.zeros((1, *images.image_shape), np.float32)
    weights = init_layers(model, jax.random.key(0), example)
    batch = images.validation[np.arange(8)]
    plain, flipped = (
        build_metrics(model, images, views)(*weights, batch)["loss"]
        for views in ("none", "flip")
    )
    both = [
        apply_layers(model, *weights, image, training=False)[0]
        for image in (batch["image"], batch["image"][:, :, ::-1])
    ]
    log = jax.nn.log_softmax((both[0] + both[1]) / 2)
    expected = -np.asarray(log)[np.arange(8), batch["label"]]
    np.testing.assert_allclose(flipped, expected, rtol=1e-4)
    assert not np.allclose(flipped, plain)


def test_a_speednet_in_16_bits_is_close_to_32_bits_and_has_all_gradients():
    widths = (32, 16, 8)
    model = speednet.speednet(10, batch_norm, widths=widths, is_residual=True)
    x = jax.random.normal(jax.random.key(1), (4, 16, 16, 3))
    params, state = init_layers(model, jax.random.key(0), x)
    conv = np.asarray(params["block1/conv1"]["kernel"])
    assert conv.shape == (3, 3, 24, 32)
    np.testing.assert_array_equal(conv[1, 1, :, :24], np.eye(24))
    assert 0 < np.abs(conv[..., 24:]).max() < 0.07

    @jax.jit
    def loss(params, x):
        logits, _ = apply_layers(model, params, state, x, training=True)
        assert logits.dtype == jnp.float32
        return -jax.nn.log_softmax(logits)[:, 3].mean()

    wide, gradients = jax.jit(jax.value_and_grad(loss))(params, x)
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    assert abs(loss(half, x.astype(jnp.bfloat16)) - wide) < 0.02 * wide
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))
    assert all("scale" not in layer for layer in params.values())
