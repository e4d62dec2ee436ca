"""Models that have only one size: parameters, names, blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.config.commands import ValidateConfig
from millrace.apps.cnn.models import catalog
from millrace.apps.cnn.models.spec import FAMILIES, SINGLE_MODELS
from millrace.config import ConfigurationError, parse
from millrace.nn.layers import apply_layers, init_layers, init_shapes, num_parameters
from millrace.nn.norms import batch_norm, group_norm


def init_model(name, size, classes):
    """Return the layers and the shapes of the weights."""
    model = catalog.build_layers(name, classes)
    example = jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32)
    return model, init_shapes(model, example)


@pytest.mark.parametrize(
    ("name", "size", "classes", "count"),
    [
        ("toy_model", 32, 10, 242),
        ("cifar_resnet8", 32, 10, 75_290),
        ("cifar_resnet20", 32, 10, 269_722),
        ("cifar_resnet32", 32, 10, 464_154),
        ("cifar_resnet44", 32, 10, 658_586),
        ("cifar_resnet56", 32, 10, 853_018),
        ("resnet50", 224, 1000, 25_557_032),
        # torchvision has 11,689,512 and 21,797,672, without a projection in the first
        # stack: a 1 x 1 convolution of 64 channels and its norm.
        ("resnet18", 224, 1000, 11_689_512 + 64 * 64 + 128),
        ("resnet34", 224, 1000, 21_797_672 + 64 * 64 + 128),
    ],
)
def test_parameter_counts_are_the_published_ones(name, size, classes, count):
    _, (params, _) = init_model(name, size, classes)
    assert num_parameters(params) == count


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        (
            "cifar_resnet8",
            [f"conv{s}_block1_post_addition_relu" for s in (2, 3, 4)],
        ),
        ("resnet50", ["conv2_block2_out", "conv3_block1_out", "conv4_block2_out"]),
        ("resnet50", ["conv2_block1_out", "conv2_block3_out", "conv3_block4_out"]),
        ("cifar_resnet56", [f"conv2_block{b}_post_addition_relu" for b in (4, 7)]),
    ],
)
def test_graphcores_pipeline_splits_are_layers_in_order(name, splits):
    names = [layer.name for layer in catalog.build_layers(name, 10)]
    places = [names.index(split) for split in splits]
    assert places == sorted(places)
    assert len(set(names)) == len(names)


def test_a_residual_network_can_be_split_before_any_layer():
    model = catalog.build_layers("cifar_resnet8", 10)
    x = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
    params, model_state = init_layers(model, jax.random.key(0), x)
    whole, _ = apply_layers(model, params, model_state, x, training=True)
    for split in range(2, len(model), 9):
        first, between = apply_layers(model[:split], params, model_state, x, training=True)
        second, _ = apply_layers(model[split:], params, between, first, training=True)
        np.testing.assert_allclose(second, whole, atol=1e-5)


def test_the_cifar_shortcut_drops_pixels_and_pads_channels():
    model = catalog.build_layers("cifar_resnet8", 10)
    (shortcut,) = [x for x in model if x.name == "conv3_block1_shortcut"]
    x = jnp.arange(2 * 4 * 4 * 3, dtype=jnp.float32).reshape(2, 4, 4, 3)
    y, _ = shortcut.apply({}, {}, {"main": x, "skip": x}, None)
    np.testing.assert_array_equal(y["skip"][..., :3], x[:, ::2, ::2])
    assert y["skip"].shape == (2, 2, 2, 6)
    assert float(jnp.abs(y["skip"][..., 3:]).sum()) == 0


def test_blocks_without_projection_start_as_the_identity():
    asked = {}

    def norm(name, *, zero_scale=False):
        asked[name] = zero_scale
        return batch_norm(name, zero_scale=zero_scale)

    catalog.build_layers("resnet50", 10, norm)
    starting_at_zero = {name for name, zero in asked.items() if zero}
    blocks = {2: 3, 3: 4, 4: 6, 5: 3}
    assert starting_at_zero == {
        f"conv{stack}_block{block}_3_bn"
        for stack, count in blocks.items()
        for block in range(2, count + 1)
    }


def test_group_norm_can_replace_batch_norm():
    norm = functools.partial(group_norm, num_groups=4)
    model = catalog.build_layers("cifar_resnet8", 10, norm)
    x = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
    params, model_state = init_layers(model, jax.random.key(0), x)
    assert not model_state
    assert num_parameters(params) == 75_290
    one, _ = apply_layers(model, params, {}, x[:1], training=True)
    both, _ = apply_layers(model, params, {}, x, training=True)
    np.testing.assert_allclose(one[0], both[0], atol=1e-5)


def test_an_unknown_model_suggests_the_nearest():
    with pytest.raises(ConfigurationError, match="Did you mean cifar_resnet20"):
        catalog.build_layers("cifar_resnet_20", 10)


@pytest.mark.parametrize("command", [CnnConfig, ValidateConfig])
def test_an_unknown_model_is_an_error_before_data_are_loaded(command):
    with pytest.raises(ConfigurationError, match="there is no model 'alexnet'"):
        parse(command, ["--model", "alexnet"], program="x")


def test_every_model_name_can_be_built():
    assert set(SINGLE_MODELS) == set(catalog._MODELS)
    assert set(FAMILIES) == set(catalog._FAMILIES)
