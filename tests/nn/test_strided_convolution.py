import jax
import numpy as np
import pytest
from jax import lax

from millrace.nn.dense_convolution import LAYOUT
from millrace.nn.strided_convolution import folded_conv2d


@pytest.mark.parametrize(
    ("size", "kernel", "strides", "pads"),
    [
        ((16, 16), (7, 7), (2, 2), ((3, 3), (3, 3))),
        ((16, 16), (7, 7), (2, 2), ((2, 3), (2, 3))),
        ((15, 18), (3, 3), (2, 2), ((0, 1), (1, 1))),  # a last column that is not used
        ((12, 13), (4, 5), (3, 2), ((1, 2), (0, 0))),
        ((9, 9), (1, 1), (2, 2), ((0, 0), (0, 0))),  # a kernel smaller than the stride
    ],
)
def test_values_and_gradients_equal_xlas_own(size, kernel, strides, pads):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, *size, 3)).astype(np.float32)
    weights = rng.standard_normal((*kernel, 3, 5)).astype(np.float32)

    def native(x, weights):
        return lax.conv_general_dilated(x, weights, strides, pads, dimension_numbers=LAYOUT)

    def folded(x, weights):
        return folded_conv2d(x, weights, strides, pads)

    def gradients(convolve):
        return jax.grad(lambda *args: (convolve(*args) ** 2).sum(), argnums=(0, 1))(
            x, weights
        )

    np.testing.assert_allclose(folded(x, weights), native(x, weights), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(folded), gradients(native), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)
