import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from millrace.nn.convolution import conv2d

CASES = [
    # (height, width), channels in, out, kernel, strides, padding
    ((9, 9), 3, 5, (3, 3), (1, 1), "SAME"),
    ((9, 8), 3, 5, (3, 3), (2, 2), "SAME"),
    ((8, 8), 4, 4, (3, 3), (1, 1), "VALID"),
    ((12, 11), 3, 8, (7, 7), (2, 2), ((3, 3), (3, 3))),
    ((8, 8), 6, 4, (1, 1), (1, 1), "SAME"),
    ((9, 8), 6, 4, (1, 1), (2, 2), "VALID"),
    ((8, 8), 6, 4, (1, 1), (1, 1), ((1, 1), (0, 0))),
    ((10, 7), 2, 3, (5, 2), (3, 1), ((2, 1), (0, 1))),
    ((7, 7), 2, 3, (2, 2), (2, 2), "VALID"),
    ((5, 5), 2, 3, (5, 5), (1, 1), "VALID"),
]


def plain(x, kernel, strides, padding):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=layout)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_equal_xlas_own(case):
    size, channels, features, kernel_size, strides, padding = case
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, *size, channels)), jnp.float32)
    kernel = jnp.asarray(
        rng.standard_normal((*kernel_size, channels, features)), jnp.float32
    )

    def ours(x, kernel):
        return conv2d(x, kernel, strides=strides, padding=padding)

    expected, pull = jax.vjp(lambda x, k: plain(x, k, strides, padding), x, kernel)
    got, our_pull = jax.vjp(ours, x, kernel)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    dy = jnp.asarray(rng.standard_normal(expected.shape), jnp.float32)
    for mine, theirs in zip(our_pull(dy), pull(dy), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_convolutions_keep_their_type(dtype):
    x = jnp.ones((1, 4, 4, 2), dtype)
    kernel = jnp.ones((3, 3, 2, 3), dtype)
    y, pull = jax.vjp(conv2d, x, kernel)
    dx, dkernel = pull(y)
    assert {str(a.dtype) for a in (y, dx, dkernel)} == {dtype}


def test_a_gradient_inside_a_loop_costs_what_it_costs_outside():
    """XLA's own is some 40 times slower inside; a factor of 4 leaves room for noise."""
    x = jnp.ones((8, 28, 28, 32))
    kernel = jnp.full((3, 3, 32, 32), 0.01)
    gradient = jax.grad(lambda k: (conv2d(x, k) ** 2).mean())
    outside = jax.jit(gradient)
    inside = jax.jit(
        lambda k: lax.scan(lambda k, _: (k - gradient(k), None), k, None, length=5)[0]
    )

    def fastest(function, repeats):
        function(kernel).block_until_ready()
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            function(kernel).block_until_ready()
            times.append(time.perf_counter() - began)
        return min(times)

    assert fastest(inside, 3) / 5 < 4 * fastest(outside, 9)
