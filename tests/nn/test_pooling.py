"""Our max pooling is XLA's, value for value and gradient for gradient."""

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
        ((8, 8), 3, 2, ((1, 1), (1, 1))),  # ResNet's
        ((10, 7), 5, 5, ((0, 0), (0, 0))),  # the toy model's
        ((7, 9), 3, 2, ((0, 1), (1, 0))),
        ((6, 6), 2, 1, ((0, 0), (0, 0))),
        ((9, 9), 2, 3, ((0, 0), (1, 1))),  # some values are in no window
        ((20, 18), 17, 3, ((1, 0), (0, 1))),  # more places than a byte has values
    ],
)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
def test_values_and_gradients_are_xlas(size, window, strides, pads, dtype):
    rng = np.random.default_rng(0)
    # Few distinct values: many windows have several that are the largest.
    x = jnp.asarray(rng.integers(-2, 3, (2, *size, 3)), dtype)
    ours, pull = jax.vjp(lambda x: max_pool(x, window, strides, pads), x)
    theirs, their_pull = jax.vjp(lambda x: xla(x, window, strides, pads), x)
    np.testing.assert_array_equal(ours, theirs)
    dy = jnp.asarray(rng.integers(-3, 4, ours.shape), dtype)
    np.testing.assert_array_equal(pull(dy)[0], their_pull(dy)[0])
