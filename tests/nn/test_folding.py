"""Batch norm folded into convolutions: fewer layers, the same logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.apps.cnn.models import catalog
from millrace.apps.cnn.models.spec import find_size
from millrace.nn import layers
from millrace.nn.folding import SMALL_BATCH, fold
from millrace.nn.layers import (
    apply_layers,
    close_residual,
    init_layers,
    on_branch,
    open_residual,
)
from millrace.nn.norms import batch_norm, group_norm


def network(name, size=None):
    options = {}
    if size:
        options = {"shape": find_size(name, size, small=True).shape}
        options |= {"small": True} if name != "efficientnet" else {}
    norm = functools.partial(batch_norm, epsilon=1e-3)
    return catalog.build_layers(name, 10, norm, **options)


def trained(model, example, seed=0):
    """Return weights and statistics as after training: nothing is exactly zero or one."""
    params, model_state = init_layers(model, jax.random.key(seed), example)
    rng = np.random.default_rng(seed)

    def moved(x):
        return x + 0.1 * rng.standard_normal(x.shape).astype(np.float32)

    params = jax.tree.map(lambda x: moved(x) if x.ndim == 1 else np.asarray(x), params)
    statistics = {
        name: {
            "mean": moved(np.zeros(own["mean"].shape, np.float32)),
            "var": rng.uniform(0.5, 2, own["var"].shape).astype(np.float32),
        }
        for name, own in model_state.items()
    }
    return params, statistics


def logits(model, params, model_state, x):
    return apply_layers(model, params, model_state, x, training=False)[0]


@pytest.mark.parametrize(
    ("name", "size", "norms"),
    [
        ("digits_cnn", None, 2),
        ("cifar_resnet8", None, 7),
        ("resnet", "8", 7),
        ("resnext", "11", 13),
        pytest.param("efficientnet", "cifar", 49, marks=pytest.mark.slow),
    ],
)
def test_logits_are_the_same_without_any_batch_norm(name, size, norms):
    channels = 1 if name == "digits_cnn" else 3
    side = 8 if name == "digits_cnn" else 32
    x = np.random.default_rng(1).standard_normal((2, side, side, channels), np.float32)
    model = network(name, size)
    params, model_state = trained(model, x)
    if name != "digits_cnn":
        assert len(model_state) == norms
    folded = fold(model, params, model_state, x)
    assert len(folded[0]) == len(model) - len(model_state)
    assert folded[2] == {}
    expected, got = logits(model, params, model_state, x), logits(*folded, x)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    # Other statistics change the logits, so the comparison above can fail.
    other = {name: {**own, "var": 2 * own["var"]} for name, own in model_state.items()}
    assert np.abs(logits(model, params, other, x) - expected).max() > 1e-3


def test_a_convolution_with_a_bias_keeps_it():
    model = [layers.conv("conv", 4, bias=True), batch_norm("norm")]
    x = np.ones((1, 4, 4, 3), np.float32)
    params, model_state = trained(model, x)
    folded, weights, left = fold(model, params, model_state, x)
    assert [layer.name for layer in folded] == ["conv"] and left == {}
    expected = logits(model, params, model_state, x)
    np.testing.assert_allclose(logits(folded, weights, left, x), expected, rtol=1e-5)


def test_only_a_norm_right_after_its_convolution_is_folded():
    model = [
        layers.conv("first", 4),
        open_residual(batch_norm("before")),  # its input is also the skip connection
        on_branch("main", layers.conv("second", 4)),
        on_branch("skip", batch_norm("skip_norm")),
        close_residual("add"),
        layers.relu("relu"),
        batch_norm("after"),
    ]
    x = np.random.default_rng(0).standard_normal((2, 4, 4, 4)).astype(np.float32)
    params, model_state = trained(model, x)
    folded = fold(model, params, model_state, x)
    assert len(folded[0]) == len(model)
    expected = logits(model, params, model_state, x)
    np.testing.assert_allclose(logits(*folded, x), expected, rtol=1e-5)


def test_group_norm_is_kept():
    model = [layers.conv("conv", 4), group_norm("norm", num_groups=2), layers.relu("relu")]
    x = np.ones((1, 4, 4, 3), np.float32)
    params, model_state = init_layers(model, jax.random.key(0), x)
    folded, weights, _ = fold(model, params, model_state, x)
    assert len(folded) == 3 and set(weights) == {"conv", "norm"}


def test_a_relu_becomes_a_maximum_that_xla_can_fuse_except_on_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model = [
        open_residual(layers.stateless("twice", lambda x: 2 * x)),
        on_branch("main", layers.relu("relu")),
        on_branch("main", layers.stateless("swish", jax.nn.silu)),
        on_branch("main", layers.dropout("dropout", 0.5)),
        close_residual("add"),
    ]
    x = jnp.array([[-1.0, 0.0, 3.0]])
    folded = fold(model, {}, {}, x)[0]
    jaxpr = str(jax.make_jaxpr(lambda x: logits(folded, {}, {}, x))(x))
    assert "max" in jaxpr and "select_n" not in jaxpr
    np.testing.assert_allclose(logits(folded, {}, {}, x), logits(model, {}, {}, x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.clip(x, 0, 6),
        lambda x: jnp.clip(x, 0, 5000),
        lambda x: jnp.where(x > 1e-3, x, 0),
        lambda x: jnp.where(x > 0, x, 1e-3 * x),
        lambda x: jax.nn.relu((x + jnp.roll(x, 1, 1)) / 2),
    ],
    ids=["relu6", "high limit", "threshold", "leaky", "blur"],
)
@pytest.mark.parametrize("branch", [False, True])
def test_a_function_that_equals_relu_only_for_some_inputs_is_kept(
    function, branch, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    layer = layers.stateless("activation", function)
    model = [layer]
    if branch:
        twice = layers.stateless("twice", lambda x: 2 * x)
        model = [open_residual(twice), on_branch("main", layer), close_residual("add")]
    x = np.array([-8.0, 1e-4, 0.5, 3.0, 9.0, 9000.0] * 6, np.float32).reshape(1, 6, 6, 1)
    folded = fold(model, {}, {}, x)
    expected = logits(model, {}, {}, x)
    np.testing.assert_array_equal(logits(*folded, x), expected)


def test_networks_with_depthwise_convolutions_fuse_more_except_on_cpu(monkeypatch):
    """In a small batch, a pointwise convolution becomes a product, and an activation that
    cuDNN cannot fuse is kept apart from a dense convolution.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    swish = functools.partial(layers.stateless, function=jax.nn.silu)
    model = [
        layers.conv("dense", 4),
        batch_norm("dense/norm"),
        swish("dense/swish"),
        layers.conv("depthwise", 4, groups=4),
        batch_norm("depthwise/norm"),
        swish("depthwise/swish"),
        layers.conv("pointwise", 8, 1),
        batch_norm("pointwise/norm"),
        swish("pointwise/swish"),
        layers.dropout("dropout", 0.5),
    ]
    x = np.random.default_rng(0).standard_normal((2, 6, 6, 3)).astype(np.float32)
    params, model_state = trained(model, x)
    folded = fold(model, params, model_state, x)
    jaxpr = str(jax.make_jaxpr(lambda x: logits(*folded, x))(x))
    assert jaxpr.count("optimization_barrier") == 1
    assert jaxpr.count("conv_general_dilated[") == 2 and "dot_general" in jaxpr
    large = jax.ShapeDtypeStruct((SMALL_BATCH + 1, 6, 6, 3), np.float32)
    jaxpr = str(jax.make_jaxpr(lambda x: logits(*folded, x))(large))
    assert jaxpr.count("conv_general_dilated[") == 3 and "barrier" not in jaxpr
    np.testing.assert_allclose(
        logits(*folded, x), logits(model, params, model_state, x), rtol=1e-4, atol=1e-5
    )


def test_narrow_groups_are_merged_except_on_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model = [
        open_residual(layers.conv("first", 32, 1)),
        on_branch("main", layers.conv("narrow", 32, groups=8)),
        on_branch("main", batch_norm("narrow/norm")),
        on_branch("main", layers.conv("wide", 64, groups=2)),
        on_branch("main", layers.conv("back", 3, 1)),
        close_residual("add"),
    ]
    x = np.random.default_rng(0).standard_normal((2, 6, 6, 3)).astype(np.float32)
    params, model_state = trained(model, x)
    folded = fold(model, params, model_state, x)
    assert folded[1]["narrow"]["kernel"].shape == (3, 3, 16, 32)
    assert folded[1]["wide"]["kernel"].shape == (3, 3, 16, 64)
    jaxpr = str(jax.make_jaxpr(lambda x: logits(*folded, x))(x))
    assert "dot_general" not in jaxpr and "barrier" not in jaxpr
    np.testing.assert_allclose(
        logits(*folded, x), logits(model, params, model_state, x), rtol=1e-4, atol=1e-4
    )
