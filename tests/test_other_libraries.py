"""Model state of other libraries changes once per update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import millrace as mr

# --- batch norm state of other libraries, with the formulas of their releases ---

UPDATES, BATCH, CHANNELS, DECAY = 3, 16, 4, 0.9


def haiku_state(x, old):
    """Update Haiku's ``ExponentialMovingAverage`` of mean and variance."""

    def moved(old, value):
        counter = old["counter"] + 1
        hidden = old["hidden"] * DECAY + value * (1 - DECAY)
        average = hidden / (1 - DECAY**counter)
        return {"counter": counter, "hidden": hidden, "average": average}

    return {"mean": moved(old["mean"], x.mean(0)), "var": moved(old["var"], x.var(0))}


def equinox_state(x, old):
    """Update Equinox's ``BatchNorm(mode="batch")``, which is debiased only when used."""
    return {
        "counter": old["counter"] + 1,
        "mean": old["mean"] * DECAY + x.mean(0) * (1 - DECAY),
        "var": old["var"] * DECAY + x.var(0) * (1 - DECAY),
    }


def equinox_ema_state(x, old):
    """Update Equinox's ``BatchNorm(mode="ema")``, which starts with the first batch."""

    def moved(old_value, value):
        mixed = old_value * DECAY + value * (1 - DECAY)
        return jnp.where(old["first_time"], value, mixed)

    return {
        "first_time": jnp.array(False),
        "mean": moved(old["mean"], x.mean(0)),
        "var": moved(old["var"], x.var(0)),
    }


def zeros():
    return jnp.zeros(CHANNELS)


def haiku_start():
    def average():
        return {"counter": jnp.int32(0), "hidden": zeros(), "average": zeros()}

    return {"mean": average(), "var": average()}


KINDS = {
    "haiku": (haiku_state, haiku_start),
    "equinox": (
        equinox_state,
        lambda: {"counter": jnp.int32(0), "mean": zeros(), "var": zeros() + 1},
    ),
    "equinox ema": (
        equinox_ema_state,
        lambda: {"first_time": jnp.array(True), "mean": zeros(), "var": zeros()},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_count": 4},
        {"gradient_accumulation_count": 4, "optimizer_state_offloading": True},
        pytest.param({"num_replicas": 4}, marks=pytest.mark.devices(4)),
        pytest.param(
            {"num_replicas": 2, "gradient_accumulation_count": 2},
            marks=pytest.mark.devices(2),
        ),
    ],
    ids=str,
)
def test_batch_norm_of_other_libraries_moves_once_per_update(kind, options):
    move, start = KINDS[kind]
    x = np.random.default_rng(0).normal(1, 2, (UPDATES, BATCH, CHANNELS))
    x = x.astype(np.float32)

    def loss_fn(params, model_state, batch, key):
        return (params["w"] * batch).mean(), (move(batch, model_state), {})

    plan = mr.Plan(micro_batch_size=4, **options)
    program = mr.training_program(loss_fn, optax.sgd(0.1), plan)
    state = program.init({"w": jnp.ones(CHANNELS)}, start())
    chunk = x.reshape(-1, plan.batching.samples_per_step, CHANNELS)
    state, _ = program.run(state, jax.device_put(chunk, program.chunk_sharding))

    expected = start()
    for update in x:  # one move, by the average of the micro-batches' statistics
        moves = [move(part, expected) for part in np.split(update, 4)]
        expected = jax.tree.map(
            lambda *v: v[0] if v[0].ndim == 0 else jnp.mean(jnp.stack(v), 0), *moves
        )
    assert jax.tree.structure(state.model_state) == jax.tree.structure(expected)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6),
        state.model_state,
        expected,
    )
    if kind == "haiku":
        assert int(state.model_state["var"]["counter"]) == UPDATES
