"""Families of models: parameters, names, blocks."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from seed_lines import GRAPHCORE

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.models import catalog
from millrace.apps.cnn.models.efficientnet import efficientnet, squeeze_excite
from millrace.apps.cnn.models.spec import EfficientNetShape, find_size
from millrace.config import ConfigurationError, build
from millrace.nn.layers import Call, apply_layers, init_layers, init_shapes, num_parameters
from millrace.nn.norms import batch_norm, group_norm

GROUP_NORM = functools.partial(group_norm, num_groups=4)

# Only shapes are needed, and on CPU a depthwise convolution is many operations.
quick_shapes = mock.patch("jax.default_backend", lambda: "gpu")


def network(family, size, *, small=False, norm=GROUP_NORM, classes=1000, **options):
    shape = find_size(family, size, small=small).shape
    if family != "efficientnet":
        options["small"] = small
    return catalog.build_layers(family, classes, norm, shape=shape, **options)


@quick_shapes
def parameters(model, size):
    example = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    return num_parameters(init_shapes(model, example)[0])


@pytest.mark.parametrize(
    ("family", "size", "options", "count"),
    [
        # from torchvision
        ("resnet", "18", {}, 11_689_512),
        ("resnet", "50", {}, 25_557_032),
        pytest.param("resnet", "34", {}, 21_797_672, marks=pytest.mark.slow),
        pytest.param("resnet", "101", {}, 44_549_160, marks=pytest.mark.slow),
        pytest.param("resnet", "152", {}, 60_192_808, marks=pytest.mark.slow),
        pytest.param("resnext", "50", {}, 25_028_904, marks=pytest.mark.slow),
        pytest.param(
            "resnext", "101", {"group_dim": 8}, 88_791_336, marks=pytest.mark.slow
        ),
        pytest.param("efficientnet", "7", {}, 66_347_960, marks=pytest.mark.slow),
        # from the tests and the README of Graphcore's application
        ("resnext", "14", {}, 9_411_880),
        ("resnext", "101", {}, 44_177_704),
        ("efficientnet", "B0", {}, 5_288_548),
        ("efficientnet", "0", {"group_dim": 16, "expand_ratio": 4}, 5_913_796),
        ("efficientnet", "b1", {}, 7_794_184),
        ("efficientnet", "4", {}, 19_341_616),
        ("efficientnet", "4", {"group_dim": 16, "expand_ratio": 4}, 19_328_168),
    ],
)
def test_parameter_counts_are_the_published_ones(family, size, options, count):
    assert parameters(network(family, size, **options), 64) == count


def test_networks_for_small_images_are_those_of_he_et_al():
    model = network("resnet", "20", small=True, classes=10)
    assert parameters(model, 32) == 269_722
    # Depth 56 exists with basic blocks and with bottlenecks, which are used.
    names = {layer.name for layer in network("resnet", "56", small=True)}
    assert "b1/0/conv3" in names


@pytest.mark.parametrize(
    ("family", "size", "splits", "layers"),
    [
        ("resnet", "50", ["b1/2/relu", "b2/3/relu", "b3/3/relu"], None),
        ("resnext", "101", ["b3/3/relu"], None),
        ("resnet", "18", ["b2/0", "reduce_mean"], ["b2/0/conv1", "reduce_mean"]),
        ("efficientnet", "4", ["block2c", "block4c", "block6a"],
         ["block2c/a/conv", "block4c/a/conv", "block6a/a/conv"]),
        ("efficientnet", "0", ["block1a", "block2a/SE", "block3a/b", "Top"],
         ["block1a/b/conv", "block2a/SE", "block3a/b/conv", "Top/conv"]),
    ],
)  # fmt: skip
def test_graphcores_pipeline_splits_are_layers_or_blocks(family, size, splits, layers):
    model = network(family, size)
    names = [layer.name for layer in model]
    found = catalog.find_split_layers(model, splits)
    assert found == (layers or splits)
    places = [names.index(split) for split in found]
    assert places == sorted(places)
    assert len(set(names)) == len(names)
    assert catalog.find_split_layers(model, [4]) == [4]
    assert catalog.find_split_layers(model, ["nowhere"]) == ["nowhere"]  # an error later


@quick_shapes
@pytest.mark.parametrize("family", ["resnext", "efficientnet"])
def test_a_network_can_be_split_before_any_layer(family):
    if family == "resnext":
        model = network("resnext", "11", small=True, norm=batch_norm, classes=10)
    else:
        model = efficientnet(
            EfficientNetShape(0.25, 0.5, 0.2, 32), 10, batch_norm, group_dim=4
        )
    x = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    params, model_state = init_shapes(model, x)

    def run(layers, x):
        def apply(params, model_state, x):
            key = jax.random.key(0)
            return apply_layers(layers, params, model_state, x, training=True, key=key)[0]

        return jax.eval_shape(apply, params, model_state, x)

    for layer in model:  # only float32 arrays pass between layers
        x = run([layer], x)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(x))
    assert x.shape == (2, 10)


def test_two_parts_of_a_network_give_the_output_of_the_whole():
    model = efficientnet(EfficientNetShape(0.25, 1.0, 0.2, 32), 10, GROUP_NORM)
    model = [layer for layer in model if layer.name.startswith("block2b")]
    x = jax.random.normal(jax.random.key(1), (4, 4, 4, 8))
    params, model_state = init_layers(model, jax.random.key(0), x)
    run = functools.partial(apply_layers, training=True, key=jax.random.key(2))
    inside = next(n for n, layer in enumerate(model) if layer.name == "block2b/SE")

    @jax.jit
    def both(params, x):
        first, _ = run(model[:inside], params, model_state, x)
        assert set(first) == {"main", "skip"}
        second, _ = run(model[inside:], params, model_state, first)
        return run(model, params, model_state, x)[0], second

    np.testing.assert_allclose(*both(params, x), atol=1e-6)


def test_blocks_without_a_projection_start_as_the_identity():
    asked = {}

    def norm(name, *, zero_scale=False):
        asked[name] = zero_scale
        return batch_norm(name, zero_scale=zero_scale)

    network("resnext", "26", norm=norm)
    assert {name for name, zero in asked.items() if zero} == {
        f"b{stack}/1/norm3" for stack in range(1, 5)
    }


@quick_shapes
def test_the_number_of_groups_is_channels_divided_by_group_dim():
    def kernels(**options):
        model = network("efficientnet", "0", **options)
        params, _ = init_shapes(model, jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32))
        return {name: value["kernel"].shape for name, value in params.items()
                if name.endswith("b/conv")}  # fmt: skip

    assert kernels()["block3a/b/conv"] == (5, 5, 1, 144)
    modified = kernels(group_dim=16, expand_ratio=4)
    assert modified["block3a/b/conv"] == (5, 5, 16, 96)
    assert modified["block1a/b/conv"] == (3, 3, 16, 32)


def test_deeper_branches_are_dropped_more_often():
    model = network("efficientnet", "0")
    drops = [layer for layer in model if layer.name.endswith("drop_connect")]
    x = {"main": jnp.ones((4000, 1, 1, 2)), "skip": jnp.zeros((4000, 1, 1, 2))}

    def kept(layer):
        y, _ = layer.apply({}, {}, x, Call(True, jax.random.key(3)))
        return float((y["main"][:, 0, 0, 0] > 0).mean())

    # Of 16 blocks, 9 are residual; the last one, block6d, is the 15th.
    assert len(drops) == 9
    assert drops[-1].name == "block6d/drop_connect"
    assert kept(drops[-1]) == pytest.approx(1 - 0.2 * 14 / 16, abs=0.03)
    assert kept(drops[0]) == pytest.approx(1 - 0.2 * 2 / 16, abs=0.03)


def test_squeeze_and_excite_scales_channels_by_their_means():
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 4, 5, 6)).astype(np.float32)
    layer = squeeze_excite("SE", 2)
    params, model_state = layer.init(x)
    params = jax.tree.map(lambda p: random.standard_normal(p.shape, np.float32), params)
    found = jax.jit(lambda *values: layer.apply(*values, Call(False))[0])(
        params, model_state, x
    )

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    means = x.astype(np.float64).mean((1, 2))
    hidden = means @ params["reduce"]["kernel"] + params["reduce"]["bias"]
    hidden = hidden * sigmoid(hidden)
    gate = sigmoid(hidden @ params["expand"]["kernel"] + params["expand"]["bias"])
    np.testing.assert_allclose(found, x * gate[:, None, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_name": "resnet", "model_size": "51"}, "no resnet of size 51.*101, 152"),
        ({"model_name": "resnext", "model_size": "18"}, "no resnext of size 18"),
        ({"model_name": "efficientnet", "model_size": "8"}, "B7, cifar"),
        (
            {"model_name": "resnet50", "model_size": "50"},
            "model_size is for --model resnet",
        ),
        ({"model_name": "resnet", "group_dim": 4}, "group_dim is for --model resnext"),
        ({"model_name": "efficientnet", "expand_ratio": 0}, "at least 1, got 0"),
        ({"model_name": "efficientnet", "group_dim": 7}, "--group-dim 7 .*: 4 or 8"),
        (
            {"model_name": "resnext", "group_dim": 3, "dataset": "cifar10"},
            "--group-dim 3 .*24 channels in 32 groups.*: 4",
        ),
        ({"model_name": "resnet18", "pretrained": "x"}, "pretrained is for --model"),
    ],
    ids=str,
)
def test_invalid_sizes_are_rejected(options, message):
    with pytest.raises(ConfigurationError, match=message):
        build(CnnConfig, GRAPHCORE | {"dataset": "imagenet"} | options)


def test_the_model_size_determines_the_image_size():
    for options, side in [
        ({"model_name": "EfficientNet", "model_size": 4}, 380),
        ({"model_name": "efficientnet"}, 224),
        ({"model_name": "resnext"}, 224),
        ({"model_name": "efficientnet", "image_size": 96}, 96),
    ]:
        config = build(CnnConfig, GRAPHCORE | {"dataset": "imagenet"} | options)
        assert config.resolved_image_size == side
    small = build(
        CnnConfig,
        GRAPHCORE | {"model_name": "efficientnet", "dataset": "cifar10"},
    )
    assert small.model_title == "efficientnet cifar"
