"""Winograd convolutions: the results of others, and where they are used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from millrace.apps.cnn.models.catalog import build_layers
from millrace.nn import winograd
from millrace.nn.convolution import conv2d
from millrace.nn.dense_convolution import LAYOUT
from millrace.nn.folding import add_transformed
from millrace.nn.layers import apply_layers, init_layers


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("size", "pads"),
    [
        ((8, 8), ((1, 1), (1, 1))),
        ((7, 9), ((0, 2), (1, 0))),
        ((5, 6), ((0, 0), (0, 0))),
        ((3, 3), ((0, 0), (0, 0))),
    ],
)
def test_outputs_are_those_of_a_convolution_in_float64(size, pads):
    x, kernel = draw(3, *size, 32), draw(3, 3, 32, 40)
    with jax.enable_x64(True):
        exact = np.asarray(
            lax.conv_general_dilated(
                np.float64(x), np.float64(kernel), (1, 1), pads, dimension_numbers=LAYOUT
            )
        )
    y = winograd.winograd_conv2d(
        jnp.asarray(x), jnp.asarray(winograd.transform_kernel(kernel)), pads
    )
    scale = np.abs(exact).max()
    np.testing.assert_allclose(y / scale, exact / scale, atol=2e-6)


def count_products(x, **options):
    def convolve(x, kernel, transformed):
        return conv2d(x, kernel, transformed=transformed, **options)

    kernel = draw(3, 3, 32, 32)
    transformed = jnp.asarray(winograd.transform_kernel(kernel))
    text = str(jax.make_jaxpr(convolve)(x, jnp.asarray(kernel), transformed))
    return text.count("dot_general")


@pytest.mark.cpu("other devices have fast convolutions")
def test_small_images_and_strides_use_the_kernel_as_it_is():
    large = jnp.asarray(draw(1, 8, 8, 32))
    assert count_products(large) == 1
    assert count_products(large[:, :4, :4]) == 0
    assert count_products(large, strides=(2, 2)) == 0


@pytest.mark.cpu("other devices have fast convolutions")
def test_a_network_has_the_same_logits_with_transformed_kernels():
    model, x = build_layers("resnet18_small", 10), jnp.asarray(draw(2, 32, 32, 3))
    params, model_state = init_layers(model, jax.random.key(0), x)
    transformed = add_transformed(model, params)
    names = [name for name, each in transformed.items() if winograd.TRANSFORMED in each]
    strided = {layer.name for layer in model if layer.strides > 1}
    assert len(names) > 10 and strided and not strided & set(names)

    def predict(params):
        return apply_layers(model, params, model_state, x, training=False)[0]

    assert "conv_general_dilated" in str(jax.make_jaxpr(predict)(transformed))
    plain, fast = predict(params), predict(transformed)
    np.testing.assert_allclose(fast, plain, atol=1e-5 * np.abs(plain).max())
    assert not np.array_equal(fast, plain)
