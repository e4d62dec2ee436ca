"""A moving average of the weights is that of a plain loop, whatever the plan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_loop import (
    GLOBAL_BATCH,
    largest_difference,
    loss_fn,
    make_data,
    make_model_state,
    make_params,
    stage,
    train_with,
)

from millrace.checkpoint.store import restore_part, write_checkpoint
from millrace.nn.layers import Call
from millrace.nn.norms import batch_norm
from millrace.plan import Plan
from millrace.program import offload
from millrace.program.ema import averaged_params, with_ema
from millrace.program.step import Weights
from millrace.program.training import training_program

DECAY = 0.15  # reached in the first of three updates: (1 + 1) / (10 + 1) is larger
SLOW = 0.999  # never reached in three updates


def decays(decay, num_updates):
    return [min(decay, (1 + n) / (10 + n)) for n in range(1, num_updates + 1)]


def numpy_average(decay):
    """Average the weights of a plain loop in NumPy; also return the last weights."""
    params, optimizer = make_params(), optax.adam(1e-2)
    average = jax.tree.map(np.float64, params)
    state, data = optimizer.init(params), make_data()

    @jax.jit
    def gradient(params, batch):
        def loss(params):
            return loss_fn(params, make_model_state(), batch, None)[0]

        return jax.grad(loss)(params)

    for update, kept in enumerate(decays(decay, 3)):
        batch = {name: leaf[update] for name, leaf in data.items()}
        updates, state = optimizer.update(gradient(params, batch), state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, w, k=kept: k * a + (1 - k) * w, average, params)
    return average, params


@pytest.mark.devices(2)
@pytest.mark.parametrize("decay", [DECAY, SLOW])
def test_the_average_is_that_of_a_numpy_loop(decay, monkeypatch):
    monkeypatch.setattr(offload, "_BUCKET_BYTES", 1)
    expected, last = numpy_average(decay)
    plans = [Plan(micro_batch_size=GLOBAL_BATCH)]
    if decay == SLOW:
        plans.append(
            Plan(
                micro_batch_size=GLOBAL_BATCH // 4,
                gradient_accumulation_count=2,
                num_replicas=2,
                optimizer_state_offloading=True,
            )
        )
    for plan in plans:
        state, _, _ = train_with(plan, optimizer=with_ema(optax.adam(1e-2), decay))
        assert largest_difference(averaged_params(state), expected) < 1e-6
        assert largest_difference(state.params, last) < 1e-6
    assert largest_difference(last, expected) > 1e-3


def test_the_average_is_the_same_bits_after_a_checkpoint(tmp_path):
    plan = Plan(micro_batch_size=GLOBAL_BATCH)
    optimizer = with_ema(optax.sgd(0.1, 0.9), SLOW)
    whole, _, _ = train_with(plan, optimizer=optimizer)
    program = training_program(loss_fn, optimizer, plan)
    state = program.init(make_params(), make_model_state(), seed=3)
    for part in (slice(0, 1), slice(1, 3)):
        data = {name: leaf[part] for name, leaf in make_data().items()}
        state, _ = program.run(state, stage(program, data))
        state = program.place_state(jax.device_get(program.unpack_state(state)))
    assert largest_difference(averaged_params(state), averaged_params(whole)) == 0
    assert largest_difference(state.params, averaged_params(state)) > 1e-3
    # Whoever reads the weights of a checkpoint gets the average.
    host = jax.device_get(state)
    write_checkpoint(tmp_path / "update-3", host, 3, {"epoch": 1.0, "time": 0.0})
    shapes = jax.eval_shape(lambda: Weights(make_params(), make_model_state()))
    restored, _ = restore_part(tmp_path / "update-3", shapes)
    assert largest_difference(restored.params, averaged_params(host)) == 0
    assert largest_difference(restored.model_state, host.model_state) == 0


def test_batch_norm_averages_its_statistics_over_the_same_updates():
    layer = batch_norm("bn", ema=0.3)
    rng = np.random.default_rng(0)
    batches = [rng.normal(3, 2, (16, 4)).astype(np.float32) for _ in range(5)]
    params, state = layer.init(jax.ShapeDtypeStruct((16, 4), jnp.float32))
    mean, var = np.zeros(4), np.ones(4)
    call = Call(training=True, key=None)
    for x, kept in zip(batches, decays(0.3, 5), strict=True):
        _, state = layer.apply(params, state, jnp.asarray(x), call)
        mean = kept * mean + (1 - kept) * x.mean(0)
        var = kept * var + (1 - kept) * x.var(0)
    np.testing.assert_allclose(state["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(state["var"], var, rtol=1e-5)
