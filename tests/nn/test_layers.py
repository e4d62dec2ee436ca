"""Layers, norms and losses agree with NumPy and can be split anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from millrace.apps.cnn.models.catalog import build_layers
from millrace.config import ConfigurationError
from millrace.nn import layers
from millrace.nn.losses import correct, cross_entropy
from millrace.nn.norms import batch_norm, group_norm


def init_one(layer: layers.Layer, shape: tuple[int, ...]):
    return layers.init_layers([layer], jax.random.key(0), jnp.zeros(shape))


def test_weights_are_keyed_by_layer_name_and_counted():
    model = build_layers("digits_cnn", 10)
    params, model_state = layers.init_layers(
        model, jax.random.key(0), jnp.zeros((2, 8, 8, 1))
    )
    assert params["conv1"]["kernel"].shape == (3, 3, 1, 16)
    assert set(model_state) == {"conv1_bn", "conv2_bn", "conv3_bn"}
    assert layers.num_parameters(params) == 24_058


def test_weights_depend_on_the_name_of_a_layer_and_not_on_its_position():
    x = jnp.zeros((2, 6))
    one, _ = layers.init_layers(
        [layers.dense("a", 6), layers.dense("b", 6)], jax.random.key(0), x
    )
    other, _ = layers.init_layers(
        [layers.dense("b", 6), layers.dense("a", 6)], jax.random.key(0), x
    )
    np.testing.assert_array_equal(one["b"]["kernel"], other["b"]["kernel"])
    assert (one["a"]["kernel"] != one["b"]["kernel"]).any()


def test_two_layers_with_the_same_name_are_an_error():
    with pytest.raises(ValueError, match="used twice: a"):
        layers.init_layers(
            [layers.relu("a"), layers.relu("a")], jax.random.key(0), jnp.zeros((1, 2))
        )


def test_splitting_a_model_changes_nothing():
    model = build_layers("digits_cnn", 10)
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))
    params, model_state = layers.init_layers(model, jax.random.key(0), x)
    whole, moved = layers.apply_layers(model, params, model_state, x, training=True)
    for split in range(1, len(model)):
        first, between = layers.apply_layers(
            model[:split], params, model_state, x, training=True
        )
        second, after = layers.apply_layers(
            model[split:], params, between, first, training=True
        )
        np.testing.assert_array_equal(second, whole)
        jax.tree.map(np.testing.assert_array_equal, after, moved)


def test_he_initialization_preserves_the_scale_of_activations():
    params, _ = init_one(layers.conv("c", 256), (1, 16, 16, 64))
    kernel = params["c"]["kernel"]
    assert float(kernel.std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)


def test_dropout_keeps_the_mean_and_does_nothing_in_evaluation():
    layer = layers.dropout("d", 0.3)
    x = jnp.ones((100, 100))
    y, _ = layer.apply({}, {}, x, layers.Call(True, jax.random.key(0)))
    kept = float((y > 0).mean())
    assert abs(kept - 0.7) < 4 * (0.21 / x.size) ** 0.5
    assert float(y.max()) == pytest.approx(1 / 0.7)
    unchanged, _ = layer.apply({}, {}, x, layers.Call(False))
    np.testing.assert_array_equal(unchanged, x)
    with pytest.raises(ValueError, match="pass a key"):
        layer.apply({}, {}, x, layers.Call(True))
    for wrong in (1.0, -0.1):
        with pytest.raises(ValueError, match="dropout rate"):
            layers.dropout("d", wrong)
    unchanged, _ = layers.dropout("d", 0.0).apply({}, {}, x, layers.Call(True))
    np.testing.assert_array_equal(unchanged, x)


def test_dropout_of_whole_samples_drops_all_of_a_sample_or_none():
    layer = layers.dropout("d", 0.25, whole_samples=True)
    x = jnp.ones((2000, 3, 2, 4))
    y, _ = layer.apply({}, {}, x, layers.Call(True, jax.random.key(0)))
    per_sample = y.reshape(2000, -1)
    np.testing.assert_array_equal(per_sample.min(1), per_sample.max(1))
    assert float((y > 0).mean()) == pytest.approx(0.75, abs=0.04)
    assert float(y.max()) == pytest.approx(4 / 3)
    other, _ = layer.apply({}, {}, x, layers.Call(True, jax.random.key(1)))
    assert not np.array_equal(y, other)


def test_he_initialization_can_count_outputs_instead_of_inputs():
    params, _ = init_one(layers.conv("c", 64, fan="out"), (1, 8, 8, 16))
    wanted = (2 / (9 * 64)) ** 0.5
    assert float(params["c"]["kernel"].std()) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("stable", [False, True])
def test_batch_norm_agrees_with_numpy(stable):
    x = np.random.default_rng(0).normal(3, 2, (16, 5, 5, 4)).astype(np.float32)
    layer = batch_norm("bn", momentum=0.9, epsilon=1e-3, stable=stable)
    params, model_state = layer.init(x)
    params = {"scale": jnp.array([1.0, 2, 3, 4]), "bias": jnp.arange(4.0)}
    y, moved = layer.apply(params, model_state, jnp.asarray(x), layers.Call(True))
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    expected = (x - mean) / np.sqrt(var + 1e-3) * [1, 2, 3, 4] + np.arange(4)
    np.testing.assert_allclose(y, expected, atol=2e-4)
    np.testing.assert_allclose(moved["mean"], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(moved["var"], 0.9 + 0.1 * var, rtol=1e-4)
    still, same = layer.apply(params, moved, jnp.asarray(x), layers.Call(False))
    assert same is moved
    moved = jax.tree.map(np.asarray, moved)
    by_hand = (x - moved["mean"]) / np.sqrt(moved["var"] + 1e-3)
    np.testing.assert_allclose(still, by_hand * [1, 2, 3, 4] + np.arange(4), atol=1e-3)


def test_the_stable_variance_survives_a_large_mean():
    """E[x^2] - E[x]^2 loses everything in float32 when the mean is 10,000."""
    x = 10_000 + np.random.default_rng(0).standard_normal((4096, 1)).astype(np.float32)
    errors = {}
    for stable in (False, True):
        layer = batch_norm("bn", momentum=0.0, stable=stable)
        params, model_state = layer.init(x)
        _, moved = layer.apply(params, model_state, jnp.asarray(x), layers.Call(True))
        errors[stable] = abs(float(moved["var"][0]) - x.var())
    assert errors[True] < 1e-2 < errors[False]


def test_group_norm_agrees_with_numpy():
    x = np.random.default_rng(0).normal(1, 3, (3, 4, 4, 8)).astype(np.float32)
    layer = group_norm("gn", num_groups=2, epsilon=1e-3)
    params, model_state = layer.init(x)
    y, _ = layer.apply(params, model_state, jnp.asarray(x), layers.Call(True))
    split = x.reshape(3, 4, 4, 2, 4)
    mean = split.mean((1, 2, 4), keepdims=True)
    var = split.var((1, 2, 4), keepdims=True)
    expected = ((split - mean) / np.sqrt(var + 1e-3)).reshape(x.shape)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    same, _ = group_norm("gn", channels_per_group=4, epsilon=1e-3).apply(
        params, model_state, jnp.asarray(x), layers.Call(True)
    )
    np.testing.assert_array_equal(same, y)
    with pytest.raises(ValueError, match="8 channels cannot be divided into 3 groups"):
        group_norm("gn", num_groups=3).init(x)
    with pytest.raises(ValueError, match="8 channels cannot be divided into groups of 3"):
        group_norm("gn", channels_per_group=3).init(x)
    for wrong in ({}, {"num_groups": 2, "channels_per_group": 4}):
        with pytest.raises(ValueError, match="only one of them"):
            group_norm("gn", **wrong)


@pytest.mark.parametrize("smoothing", [None, 0.0, 0.1])
@pytest.mark.parametrize("over", ["all", "others"])
def test_cross_entropy_agrees_with_numpy(smoothing, over):
    options = {} if smoothing is None else {"label_smoothing": smoothing}
    smoothing = smoothing or 0.0  # the default
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((7, 5)).astype(np.float32)
    labels = rng.integers(0, 5, 7)
    label = np.eye(5)[labels]
    rest = np.full((7, 5), 1 / 5) if over == "all" else (1 - label) / 4
    target = label * (1 - smoothing) + smoothing * rest
    log_probability = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = -(target * log_probability).sum(1)
    got = cross_entropy(jnp.asarray(logits), jnp.asarray(labels), over=over, **options)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_array_equal(
        correct(jnp.asarray(logits), jnp.asarray(labels)), logits.argmax(1) == labels
    )


def test_the_gradient_of_max_pooling_goes_to_the_largest_value():
    pool = layers.max_pool("pool", 2, 2)
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    call = layers.Call(training=True)
    gradient = jax.jit(jax.grad(lambda x: pool.apply({}, {}, x, call)[0].sum()))(x)
    np.testing.assert_array_equal(gradient[0, :, :, 0][1::2, 1::2], np.ones((2, 2)))
    assert gradient.sum() == 4


def test_an_input_too_small_for_the_model_names_the_layer_that_fails():
    model = build_layers("toy_model", 10)
    with pytest.raises(ConfigurationError, match=r"max_pooling\w* leaves nothing of"):
        layers.init_layers(model, jax.random.key(0), jnp.zeros((1, 4, 4, 3)))


def test_norms_have_the_documented_defaults():
    x = jnp.full((2, 4, 4, 2), 0.0).at[0].set(0.01)  # a variance near epsilon
    layer = batch_norm("bn")
    params, model_state = layer.init(x)
    y, moved = layer.apply(params, model_state, x, layers.Call(True))
    np.testing.assert_allclose(moved["mean"], 0.03 * 0.005, rtol=1e-4)
    np.testing.assert_allclose(moved["var"], 0.97 + 0.03 * 0.005**2, rtol=1e-6)
    expected = 0.005 / np.sqrt(0.005**2 + 1.001e-5)
    np.testing.assert_allclose(y[0], expected, rtol=1e-3)
    pixels = jnp.zeros((1, 2, 1, 2)).at[0, 0].set(0.01)
    y, _ = group_norm("gn", num_groups=1).apply(params, {}, pixels, layers.Call(True))
    np.testing.assert_allclose(y[0, 0], expected, rtol=1e-3)


@pytest.mark.parametrize(
    "layer",
    [
        batch_norm("n", zero_scale=True),
        group_norm("n", num_groups=2, zero_scale=True),
    ],
    ids=["batch", "group"],
)
def test_a_norm_with_zero_scale_outputs_zero(layer):
    x = np.random.default_rng(0).standard_normal((4, 3, 3, 2)).astype(np.float32)
    params, model_state = layer.init(x)
    y, _ = layer.apply(params, model_state, jnp.asarray(x), layers.Call(True))
    assert not np.any(y)


@pytest.mark.parametrize("momentum", [1.0, -0.1])
def test_a_momentum_outside_of_0_to_1_is_an_error(momentum):
    with pytest.raises(ValueError, match="momentum must be at least 0 and below 1"):
        batch_norm("bn", momentum=momentum)


def test_simple_layers_agree_with_numpy():
    x = np.random.default_rng(0).standard_normal((3, 4, 5, 2)).astype(np.float32)
    call = layers.Call(training=False)

    def output(layer, x, params=None):
        return layer.apply(params or {}, {}, jnp.asarray(x), call)[0]

    np.testing.assert_array_equal(output(layers.relu("r"), x), np.maximum(x, 0))
    np.testing.assert_array_equal(output(layers.flatten("f"), x), x.reshape(3, -1))
    pooled = output(layers.global_average_pool("p"), x)
    np.testing.assert_allclose(pooled, x.mean((1, 2)), rtol=1e-5, atol=1e-6)
    params, _ = init_one(layers.dense("d", 300), (1, 400))
    kernel, bias = params["d"]["kernel"], np.arange(300.0, dtype=np.float32)
    assert float(kernel.std()) == pytest.approx(400**-0.5, rel=0.02)
    assert not np.any(params["d"]["bias"])
    weights = {"kernel": kernel, "bias": bias}
    with jax.default_matmul_precision("float32"):
        y = output(layers.dense("d", 300), np.ones((1, 400)), weights)
    np.testing.assert_allclose(y[0], np.asarray(kernel).sum(0) + bias, rtol=1e-4, atol=1e-4)


def test_the_mean_over_pixels_is_computed_in_float32():
    """A sum of ones in bfloat16 stops at 256."""
    x = jnp.ones((1, 64, 64, 1), jnp.bfloat16)
    y, _ = layers.global_average_pool("p").apply({}, {}, x, layers.Call(training=True))
    assert y.dtype == jnp.bfloat16 and y.item() == 1


def test_a_relu_has_no_gradient_where_it_is_zero():
    relu = layers.relu("r")
    gradient = jax.grad(lambda x: relu.apply({}, {}, x, layers.Call(True))[0].sum())
    np.testing.assert_array_equal(gradient(jnp.array([-1.0, 0.0, 2.0])), [0, 0, 1])
