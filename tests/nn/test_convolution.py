"""Convolutions equal XLA's own, and stay fast inside loops on CPU."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from millrace.config import ConfigurationError
from millrace.nn.convolution import conv2d, space_to_depth_conv2d
from millrace.nn.dense_convolution import LAYOUT
from millrace.nn.layers import (
    Call,
    apply_layers,
    close_residual,
    conv,
    init_layers,
    on_branch,
    open_residual,
    relu,
)
from millrace.nn.norms import batch_norm

CASES = [
    # (height, width), channels, features, kernel, strides, padding, groups
    ((9, 9), 3, 5, (3, 3), (1, 1), "SAME", 1),
    ((9, 8), 3, 5, (3, 3), (2, 2), "SAME", 1),
    ((8, 8), 4, 4, (3, 3), (1, 1), "VALID", 1),
    ((12, 11), 3, 8, (7, 7), (2, 2), ((3, 3), (3, 3)), 1),
    ((8, 8), 6, 4, (1, 1), (1, 1), "SAME", 1),
    ((9, 8), 6, 4, (1, 1), (2, 2), "VALID", 1),
    ((8, 8), 6, 4, (1, 1), (1, 1), ((1, 1), (0, 0)), 1),
    ((10, 7), 2, 3, (5, 2), (3, 1), ((2, 1), (0, 1)), 1),
    ((7, 7), 2, 3, (2, 2), (2, 2), "VALID", 1),
    ((5, 5), 2, 3, (5, 5), (1, 1), "VALID", 1),
    # images smaller than the kernel
    ((2, 2), 4, 5, (3, 3), (1, 1), "SAME", 1),
    ((2, 3), 4, 5, (3, 3), (2, 2), ((1, 1), (1, 1)), 1),
    ((5, 2), 3, 4, (5, 5), (2, 1), ((2, 2), (3, 1)), 1),
    # depthwise, the last two with several features per channel
    ((9, 8), 5, 5, (3, 3), (1, 1), "SAME", 5),
    ((9, 8), 5, 5, (3, 3), (2, 2), "SAME", 5),
    ((11, 12), 3, 3, (5, 5), (2, 3), "VALID", 3),
    ((10, 7), 4, 4, (5, 2), (3, 1), ((2, 1), (0, 1)), 4),
    ((7, 7), 3, 3, (2, 2), (3, 3), "VALID", 3),  # pixels at the edge go unused
    ((6, 6), 4, 4, (1, 1), (2, 2), "SAME", 4),
    ((7, 9), 4, 12, (3, 3), (2, 2), "SAME", 4),
    ((6, 6), 2, 4, (3, 3), (1, 1), ((4, 0), (1, 3)), 2),
    # groups: all in one block, several blocks, blocks of one group
    ((9, 8), 6, 4, (3, 3), (1, 1), "SAME", 2),
    ((9, 8), 48, 24, (3, 3), (2, 2), "SAME", 12),
    ((5, 6), 80, 10, (1, 1), (1, 1), "SAME", 2),
    ((7, 7), 27, 18, (5, 3), (2, 1), ((2, 2), (0, 1)), 9),
]


def plain(x, kernel, strides, padding, groups):
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        dimension_numbers=LAYOUT,
        feature_group_count=groups,
    )


def with_gradients(function, x, kernel, dy):
    """Return the value and both gradients, from one compiled program."""

    @jax.jit
    def run(x, kernel, dy):
        y, backward = jax.vjp(function, x, kernel)
        return y, *backward(dy)

    return run(x, kernel, dy)


def make_operands(case):
    """Return random images and a random kernel."""
    size, channels, features, kernel_size, *_, groups = case
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, *size, channels))
    kernel = rng.standard_normal((*kernel_size, channels // groups, features))
    return jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_equal_xla(case):
    x, kernel = make_operands(case)
    strides, padding, groups = case[-3:]

    def ours(x, kernel):
        return conv2d(x, kernel, strides=strides, padding=padding, groups=groups)

    def reference(x, kernel):
        return plain(x, kernel, strides, padding, groups)

    shape = jax.eval_shape(reference, x, kernel).shape
    dy = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    found = with_gradients(ours, x, kernel, dy)
    expected = with_gradients(reference, x, kernel, dy)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case[3] == (1, 1)], ids=str)
def test_a_pointwise_convolution_can_be_a_product_except_on_cpu(case, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x, kernel = make_operands(case)
    strides, padding, groups = case[-3:]
    options = {"strides": strides, "padding": padding, "groups": groups}
    is_pointwise = strides == (1, 1) and padding == "SAME" and groups == 1

    def is_product(x, **more):
        jaxpr = jax.make_jaxpr(lambda x: conv2d(x, kernel, **options, **more))(x)
        return "conv_general_dilated" not in str(jaxpr)

    assert is_product(x, as_product=True) == is_pointwise
    assert not is_product(x)
    y = conv2d(x, kernel, **options, as_product=True)
    np.testing.assert_allclose(y, plain(x, kernel, strides, padding, groups), atol=2e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_convolutions_keep_their_dtype_and_round_once(dtype, groups):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 5, 5, 4)), dtype)
    kernel = jnp.asarray(rng.standard_normal((3, 3, 4 // groups, 4)), dtype)
    wide = plain(x.astype(jnp.float32), kernel.astype(jnp.float32), (1, 1), "SAME", groups)
    y, backward = jax.vjp(lambda x, k: conv2d(x, k, groups=groups), x, kernel)
    assert {str(a.dtype) for a in (y, *backward(y))} == {dtype}
    spacing = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(y.astype(jnp.float32), wide, rtol=spacing, atol=1e-6)


@pytest.mark.parametrize(
    ("channels", "kernel", "groups", "message"),
    [
        (6, (3, 3, 2, 8), 3, "groups must divide the channels .6. and the features .8."),
        (6, (3, 3, 6, 6), 0, "got 0"),
        (
            6,
            (3, 3, 3, 6),
            3,
            "6 channels in 3 groups need a kernel with 2 input channels, got 3",
        ),
    ],
)
def test_groups_that_do_not_divide_the_channels_are_an_error(
    channels, kernel, groups, message
):
    with pytest.raises(ValueError, match=message):
        conv2d(jnp.ones((1, 4, 4, channels)), jnp.ones(kernel), groups=groups)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("size", "strides"), [((2, 5), 1), ((5, 1), 2)])
def test_images_smaller_than_the_kernel_are_a_clear_error(groups, size, strides):
    x = jnp.ones((1, *size, 4))
    kernel = jnp.ones((3, 3, 4 // groups, 4))
    message = f"Images of {size[0]} x {size[1]}.*smaller than the kernel of 3 x 3"
    with pytest.raises(ValueError, match=message):
        conv2d(x, kernel, strides=(strides, strides), padding="VALID", groups=groups)
    model = [conv("small", 4, 3, groups=groups, padding="VALID", strides=strides)]
    with pytest.raises(ConfigurationError, match="small leaves nothing of"):
        init_layers(model, jax.random.key(0), x)


def test_a_grouped_layer_has_a_kernel_with_the_channels_of_one_group():
    layer = conv("conv", 12, 3, groups=4)
    x = jnp.ones((1, 5, 5, 8))
    params = init_layers([layer], jax.random.key(0), x)[0]["conv"]
    assert params["kernel"].shape == (3, 3, 2, 12)
    y, _ = layer.apply(params, {}, x, Call(training=True))
    np.testing.assert_allclose(y, plain(x, params["kernel"], (1, 1), "SAME", 4), atol=1e-5)
    with pytest.raises(ValueError, match="groups must divide"):
        conv("conv", 12, groups=3).init(x)


def test_many_groups_compile_as_few_convolutions():
    """One per block would make EfficientNet-B4 G16 compile for many minutes."""

    def num_convolutions(groups):
        x = jax.ShapeDtypeStruct((1, 6, 6, 16 * groups), jnp.float32)
        kernel = jax.ShapeDtypeStruct((3, 3, 16, 16 * groups), jnp.float32)
        loss = lambda x, k: conv2d(x, k, groups=groups).sum()  # noqa: E731
        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(x, kernel)
        return lowered.as_text().count("stablehlo.convolution")

    if jax.default_backend() == "cpu":
        assert num_convolutions(48) == num_convolutions(8) <= 3


@pytest.mark.parametrize("groups", [1, 8, 64])
def test_a_gradient_costs_the_same_inside_a_loop_as_outside(groups):
    """XLA's own is about 40 times slower inside; a factor of 4 leaves room for noise."""
    x = jnp.ones((8, 28, 28, 64))
    kernel = jnp.full((3, 3, 64 // groups, 64), 0.01)
    gradient = jax.grad(lambda k: (conv2d(x, k, groups=groups) ** 2).mean())
    outside = jax.jit(gradient)
    inside = jax.jit(
        lambda k: lax.scan(lambda k, _: (k - gradient(k), None), k, None, length=5)[0]
    )

    def fastest(function, repeats):
        function(kernel).block_until_ready()
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            function(kernel).block_until_ready()
            times.append(time.perf_counter() - started)
        return min(times)

    assert fastest(inside, 3) / 5 < 4 * fastest(outside, 9)


def test_images_smaller_than_the_kernel_are_not_slow():
    """XLA's own took 20 times as long as for padded images."""
    kernel = jnp.ones((3, 3, 256, 256))
    small, large = jnp.ones((8, 2, 2, 256)), jnp.ones((8, 4, 4, 256))

    def seconds(x):
        run = jax.jit(lambda x: conv2d(x, kernel, padding=((1, 1), (1, 1))))
        jax.block_until_ready(run(x))
        times = []
        for _ in range(5):
            started = time.perf_counter()
            jax.block_until_ready(run(x))
            times.append(time.perf_counter() - started)
        return min(times)

    assert seconds(small) < 3 * seconds(large)


def test_a_residual_block_is_not_recomputed_by_later_blocks():
    """XLA:CPU would do so if it could: time would grow with the square of the depth."""
    model = [
        layer
        for block in "abcdefgh"
        for layer in (
            open_residual(conv(f"{block}_conv", 4)),
            on_branch("main", batch_norm(f"{block}_bn")),
            close_residual(f"{block}_add"),
            relu(f"{block}_relu"),
        )
    ]
    x = jnp.ones((2, 7, 7, 4))
    params, model_state = init_layers(model, jax.random.key(0), x)

    def loss(params):
        return apply_layers(model, params, model_state, x, training=True)[0].sum()

    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    sized = set(re.findall(r"(%[\w.\-]+) = f32\[2,7,7,4\]", text))
    read = [
        len(sized & set(re.findall(r"%[\w.\-]+", operands)))
        for operands in re.findall(r" fusion\((.*?)\)", text)
    ]
    assert 1 <= max(read) < 8


@pytest.mark.parametrize(
    ("size", "kernel", "strides", "pads"),
    [
        ((16, 16), (7, 7), (2, 2), ((3, 3), (3, 3))),
        ((16, 16), (7, 7), (2, 2), ((2, 3), (2, 3))),
        ((15, 18), (3, 3), (2, 2), ((0, 1), (1, 1))),  # the last column is not used
        ((12, 13), (4, 5), (3, 2), ((1, 2), (0, 0))),
        ((9, 9), (1, 1), (2, 2), ((0, 0), (0, 0))),  # kernel smaller than the stride
    ],
)
def test_space_to_depth_equals_xla(size, kernel, strides, pads):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, *size, 3)).astype(np.float32)
    weights = rng.standard_normal((*kernel, 3, 5)).astype(np.float32)

    def reference(x, weights):
        return plain(x, weights, strides, pads, 1)

    def ours(x, weights):
        return space_to_depth_conv2d(x, weights, strides, pads)

    def gradients(convolve):
        return jax.grad(lambda *args: (convolve(*args) ** 2).sum(), argnums=(0, 1))(
            x, weights
        )

    np.testing.assert_allclose(
        ours(x, weights), reference(x, weights), rtol=1e-5, atol=1e-5
    )
    for got, wanted in zip(gradients(ours), gradients(reference), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-3)
