"""FLOPs and bytes counted in a trace, against closed forms and published figures."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from millrace.apps.cnn.models import catalog
from millrace.apps.cnn.models.spec import find_size
from millrace.bench.applications import build_workload
from millrace.bench.roofline import count_cost
from millrace.bench.spec import Entry, parse_command
from millrace.nn.layers import apply_layers, init_shapes
from millrace.nn.norms import batch_norm


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def count_flops(function, *arguments):
    return count_cost(function, *arguments).flops


def test_a_matrix_product_takes_two_flops_per_term():
    assert count_flops(jnp.matmul, shape(3, 4, 5), shape(3, 5, 6)) == 2 * 3 * 4 * 5 * 6


def test_the_flops_of_a_loop_body_count_once_per_iteration():
    def loop(x):
        return lax.scan(lambda c, _: (c @ c, None), x, None, length=7)[0]

    assert count_flops(jax.jit(loop), shape(8, 8)) == 7 * 2 * 8**3


def test_the_most_expensive_branch_counts():
    def choose(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x)

    assert count_flops(choose, shape(4, 4)) == 2 * 2 * 4**3


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_convolution_multiplies_only_the_channels_of_its_group(groups):
    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    counted = count_flops(convolve, shape(2, 6, 6, 8), shape(3, 3, 8 // groups, 16))
    assert counted == 2 * (2 * 6 * 6 * 16) * 9 * 8 // groups


@pytest.mark.slow
def test_resnet50_has_the_published_flops():
    options = {"shape": find_size("resnet", "50", small=False).shape, "small": False}
    model = catalog.build_layers("resnet", 1000, batch_norm, **options)
    x = shape(1, 224, 224, 3)
    params, model_state = init_shapes(model, x)

    def logits(params, model_state, x):
        return apply_layers(model, params, model_state, x, training=False)[0]

    counted = count_flops(logits, params, model_state, x)
    assert counted == pytest.approx(2 * 4.09e9, rel=0.01)
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    assert weights == pytest.approx(4 * 25.6e6, rel=0.01)
    assert count_cost(logits, params, model_state, x).num_bytes > weights


def small_network(x, kernel, dense):
    x = lax.conv_general_dilated(
        x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(x).reshape(2, -1).astype(jnp.bfloat16) @ dense


def test_bytes_cover_operands_and_results():
    dense = jax.ShapeDtypeStruct((16, 10), jnp.bfloat16)
    counted = count_cost(small_network, shape(2, 4, 4, 3), shape(3, 3, 3, 4), dense)
    images, kernel, channels = 2 * 4 * 4 * 3, 3 * 3 * 3 * 4, 2 * 2 * 2 * 4
    convolution = 4 * (images + kernel + channels)
    product = 2 * (channels + 16 * 10 + 2 * 10)
    assert counted.num_bytes == convolution + product


def test_the_bytes_of_a_loop_body_count_once_per_iteration():
    def loop(x):
        return lax.scan(lambda c, _: (c @ c, None), x, None, length=7)[0]

    assert count_cost(jax.jit(loop), shape(8, 8)).num_bytes == 7 * 3 * 8 * 8 * 4


def build(command):
    entry = Entry(name="x", command=command)
    return build_workload(entry, parse_command(entry), jax.local_devices())


def traced_bytes(command):
    work = build(command)
    num_bytes = work.trace_cost().num_bytes
    work.stop()
    return num_bytes


INFERENCE = "cnn validate --dataset digits --synthetic-data --num-batches 3 --batch-size 2"


@pytest.mark.parametrize("counted_by_xla", [None, 15.0, 1e12])
def test_bytes_are_at_least_those_of_products_and_convolutions(counted_by_xla, monkeypatch):
    work = build(INFERENCE)
    monkeypatch.setattr(work, "compiled_bytes", lambda: counted_by_xla)
    work.estimate_cost()
    weights = jax.tree.leaves(work._inference.network.weights.params)
    at_least = sum(x.size * x.dtype.itemsize for x in weights if x.ndim > 1)
    touched = traced_bytes(INFERENCE)
    assert touched >= at_least
    assert work.cost.num_bytes == max(touched, counted_by_xla or 0.0)
    work.stop()


def test_the_bytes_of_an_update_grow_with_gradient_accumulation():
    command = "cnn train --dataset digits --batch-size 4 --updates-per-execution 1"
    once = traced_bytes(command)
    assert traced_bytes(f"{command} --gradient-accumulation-count 3") == 3 * once > 0
