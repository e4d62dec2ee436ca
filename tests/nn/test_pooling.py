"""Max pooling equals XLA's, value for value and gradient for gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from millrace.nn.pooling import max_pool


def xla(x, window, strides, pads):
    return lax.reduce_window(
        x,
        -jnp.inf,
        lax.max,
        (1, window, window, 1),
        (1, strides, strides, 1),
        ((0, 0), *pads, (0, 0)),
    )


@pytest.mark.parametrize(
    ("size", "window", "strides", "pads"),
    [
        ((8, 8), 3, 2, ((1, 1), (1, 1))),  # ResNet
        ((10, 7), 5, 5, ((0, 0), (0, 0))),  # the toy model
        ((7, 9), 3, 2, ((0, 1), (1, 0))),
        ((6, 6), 2, 1, ((0, 0), (0, 0))),
        ((9, 9), 2, 3, ((0, 0), (1, 1))),  # some values are in no window
        ((20, 18), 17, 3, ((1, 0), (0, 1))),  # more positions than uint8 holds
    ],
)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
def test_values_and_gradients_equal_xla(size, window, strides, pads, dtype):
    rng = np.random.default_rng(0)
    # Few distinct values, so that many windows have several largest ones.
    x = jnp.asarray(rng.integers(-2, 3, (2, *size, 3)), dtype)
    ours, backward = jax.vjp(lambda x: max_pool(x, window, strides, pads), x)
    reference, reference_backward = jax.vjp(lambda x: xla(x, window, strides, pads), x)
    np.testing.assert_array_equal(ours, reference)
    dy = jnp.asarray(rng.integers(-3, 4, ours.shape), dtype)
    np.testing.assert_array_equal(backward(dy)[0], reference_backward(dy)[0])
