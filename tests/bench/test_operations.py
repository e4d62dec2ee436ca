"""Operations counted in a trace, against closed forms and a published figure."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from millrace.apps.cnn import models
from millrace.apps.cnn.families import find_size
from millrace.bench.operations import operations
from millrace.nn.layers import apply_layers, init_shapes
from millrace.nn.norms import batch_norm


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_a_product_is_two_operations_for_each_of_its_terms():
    assert operations(jnp.matmul, shape(3, 4, 5), shape(3, 5, 6)) == 2 * 3 * 4 * 5 * 6


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    def loop(x):
        return lax.scan(lambda c, _: (c @ c, None), x, None, length=7)[0]

    assert operations(jax.jit(loop), shape(8, 8)) == 7 * 2 * 8**3


def test_of_branches_the_dearest_counts():
    def choose(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x)

    assert operations(choose, shape(4, 4)) == 2 * 2 * 4**3


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_convolution_sees_only_its_group_s_channels(groups):
    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    counted = operations(convolve, shape(2, 6, 6, 8), shape(3, 3, 8 // groups, 16))
    assert counted == 2 * (2 * 6 * 6 * 16) * 9 * 8 // groups


def test_resnet50_has_the_published_operations():
    options = {"shape": find_size("resnet", "50", small=False).shape, "small": False}
    model = models.build("resnet", 1000, batch_norm, **options)
    x = shape(1, 224, 224, 3)
    params, carried = init_shapes(model, x)

    def logits(params, carried, x):
        return apply_layers(model, params, carried, x, training=False)[0]

    counted = operations(logits, params, carried, x)
    assert counted == pytest.approx(2 * 4.09e9, rel=0.01)
