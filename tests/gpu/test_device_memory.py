"""Tests that need a device with its own memory.

On a machine with a GPU: ``JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/gpu``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_loop import (
    GLOBAL_BATCH,
    largest_difference,
    make_data,
    make_optimizer,
    plain_loop,
    train_with,
)

from millrace.nn.layers import apply_layers, conv, init_layers, relu
from millrace.nn.norms import batch_norm
from millrace.plan import Plan
from millrace.program.training import training_program

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def full_precision_products():
    with jax.default_matmul_precision("highest"):
        yield


def peak_bytes() -> int:
    return jax.devices()[0].memory_stats()["peak_bytes_in_use"]


def test_offloading_lowers_the_peak_memory_by_most_of_the_state():
    """The offloaded run comes first: the peak only ever rises within a process."""
    size, layers = 2048, 24
    rng = np.random.default_rng(0)
    params = [rng.standard_normal((size, size), np.float32) / 64 for _ in range(layers)]
    state_bytes = 2 * sum(p.nbytes for p in params)
    batch = rng.standard_normal((2, 64, size), np.float32)

    def loss(params, model_state, batch, key):
        x = batch
        for p in params:
            x = jnp.tanh(x @ p)
        return jnp.square(x).mean(), (model_state, {})

    peaks, ends = {}, {}
    for offloading in (True, False):
        plan = Plan(
            micro_batch_size=64,
            gradient_accumulation_count=2,
            optimizer_state_offloading=offloading,
        )
        program = training_program(loss, optax.adam(1e-3), plan)
        state = program.init(params)
        before = peak_bytes()
        for _ in range(3):
            chunk = jax.device_put(batch, program.chunk_sharding)
            state, _ = program.run(state, chunk)
        jax.block_until_ready(state)
        peaks[offloading] = peak_bytes()
        assert peaks[offloading] >= before
        ends[offloading] = np.asarray(state.params[5])
        del state
    np.testing.assert_allclose(ends[True], ends[False], atol=1e-5)
    fall = (peaks[False] - peaks[True]) / state_bytes
    assert fall > 0.8, (peaks, state_bytes)


def test_recomputation_keeps_one_activation_per_convolution_instead_of_two():
    model = [
        layer
        for n in range(12)
        for layer in (conv(f"c{n}", 64), batch_norm(f"b{n}"), relu(f"r{n}"))
    ]

    def loss(params, model_state, batch, key):
        x, model_state = apply_layers(model, params, model_state, batch, training=True)
        return jnp.square(x.astype(jnp.float32)).mean(), (model_state, {})

    images = np.random.default_rng(0).standard_normal((2, 32, 56, 56, 64), np.float32)
    params, model_state = init_layers(model, jax.random.key(0), images[0])
    held, weights = {}, {}
    for recomputation in (False, True):
        plan = Plan(micro_batch_size=32, precision="16.32", recomputation=recomputation)
        program = training_program(loss, optax.sgd(0.1), plan)
        state = program.init(params, model_state)
        state, _ = program.run(state, jax.device_put(images, program.chunk_sharding))
        (compiled,) = program._compiled.values()
        held[recomputation] = compiled.memory_analysis().temp_size_in_bytes
        weights[recomputation] = np.asarray(state.params["c5"]["kernel"])
    activation = images[0].size * 2  # in bfloat16
    # The results of twelve convolutions and a few more, instead of also their inputs.
    assert held[False] > 24 * activation
    assert held[True] < 18 * activation
    np.testing.assert_allclose(weights[True], weights[False], atol=2e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_count": 4},
        {"optimizer_state_offloading": True},
        {"recomputation": True, "gradient_accumulation_count": 2},
        {"loss_scaling": 128.0, "fp_exceptions": True},
    ],
    ids=str,
)
def test_features_give_the_weights_of_the_plain_loop_on_a_gpu(options):
    params, _, _ = plain_loop(make_optimizer(), make_data())
    pieces = options.get("gradient_accumulation_count", 1)
    plan = Plan(micro_batch_size=GLOBAL_BATCH // pieces, **options)
    state, _, _ = train_with(plan)
    assert largest_difference(state.params, params) < 1e-5
