"""Values that change between calls: equal to a loop of its own, and compiled only once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from millrace.config import ConfigurationError
from millrace.nn.layers import Layer, dense
from millrace.nn.losses import LayeredLoss
from millrace.plan import Plan
from millrace.program.training import training_program

FEATURES, COUNT, RATES, TEMPERATURES = 6, 2, (0.3, 0.05, 0.2), (1.0, 0.5, 2.0)
PLANS = {
    "plain": {},
    "offloaded": {"optimizer_state_offloading": True, "min_remote_tensor_size": 0},
    "replicas": {"num_replicas": 2},
    "one_device": {
        **{"pipeline_splits": ["divide"], "pipeline_schedule": "interleaved"},
        "device_mapping": [0, 0],
    },
    "pipeline": {"pipeline_splits": ["divide"], "pipeline_schedule": "interleaved"},
    "offloaded_pipeline": {
        **{"pipeline_splits": ["divide"], "pipeline_schedule": "interleaved"},
        **{"optimizer_state_offloading": True, "min_remote_tensor_size": 0},
    },
}
traces = []


def divide(name):
    """Return a layer that divides by a temperature that the host sets."""

    def apply(params, model_state, x, call):
        del params, call
        traces.append(x.shape)
        return x / model_state["temperature"], model_state

    return Layer(name, lambda x: ({}, {"temperature": jnp.ones(())}), apply)


def make_data(plan):
    rng = np.random.default_rng(0)
    shape = (len(RATES), COUNT, plan.batching.samples_per_step, FEATURES)
    return rng.standard_normal(shape).astype(np.float32)


def build(plan, optimizer=None):
    layers = [dense("first", 4), divide("divide"), dense("last", 1)]
    loss = LayeredLoss(
        layers,
        lambda batch, key: batch,
        lambda y, batch: (jnp.square(y[:, 0] - batch.sum(-1)).mean(), {}),
        jax.ShapeDtypeStruct((plan.micro_batch_size, FEATURES), jnp.float32),
    )
    optimizer = optimizer or optax.inject_hyperparams(optax.sgd)(1.0, momentum=0.9)
    program = training_program(loss, optimizer, plan, model_state_reduction="once")
    rng = np.random.default_rng(1)
    params = {
        name: {
            "kernel": jnp.asarray(0.3 * rng.standard_normal(size), jnp.float32),
            "bias": jnp.zeros(size[1]),
        }
        for name, size in (("first", (FEATURES, 4)), ("last", (4, 1)))
    }
    return program, params, program.init(params, {"divide": {"temperature": jnp.ones(())}})


def plain_loop(params, data):
    """Train with momentum by hand, with another rate and temperature in each update."""
    velocity = jax.tree.map(jnp.zeros_like, params)
    for x, rate, temperature in zip(data, RATES, TEMPERATURES, strict=True):
        x = jnp.asarray(x.reshape(-1, FEATURES))

        def loss(params, x=x, temperature=temperature):
            h = (x @ params["first"]["kernel"] + params["first"]["bias"]) / temperature
            y = h @ params["last"]["kernel"] + params["last"]["bias"]
            return jnp.square(y[:, 0] - x.sum(-1)).mean()

        gradient = jax.grad(loss)(params)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
        params = jax.tree.map(lambda p, v, rate=rate: p - rate * v, params, velocity)
    return params


@pytest.mark.devices(2)
@pytest.mark.parametrize("name", PLANS)
def test_values_change_between_calls_without_compiling_again(name):
    options = {"micro_batch_size": 4, "gradient_accumulation_count": COUNT} | PLANS[name]
    plan = Plan(**options)
    program, params, state = build(plan)
    data, num_traces = make_data(plan), []
    for x, rate, temperature in zip(data, RATES, TEMPERATURES, strict=True):
        state = program.set_values(state, learning_rate=rate, temperature=temperature)
        state, _ = program.run(state, jax.device_put(x, program.chunk_sharding))
        num_traces.append(len(traces))
    assert num_traces[0] == num_traces[-1]
    assert len(program._compiled) == 1
    got = jax.device_get(program.unpack_state(state))
    assert got.model_state["divide"]["temperature"] == TEMPERATURES[-1]
    expected = plain_loop(params, data)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got.params, expected
    )


@pytest.mark.devices(2)
@pytest.mark.parametrize("name", ["plain", "pipeline"])
def test_a_value_that_does_not_exist_is_an_error(name):
    options = {"micro_batch_size": 4, "gradient_accumulation_count": COUNT} | PLANS[name]
    program, _, state = build(Plan(**options))
    known = "it has learning_rate, momentum, temperature"
    with pytest.raises(ConfigurationError, match=f"no value 'rate' to set; {known}"):
        program.set_values(state, rate=1.0)
    with pytest.raises(ConfigurationError, match="must be a number, got an array"):
        program.set_values(state, learning_rate=np.ones(2))


def test_a_scheduled_hyperparameter_cannot_be_set():
    """The schedule would replace it in the next update."""
    schedule = optax.cosine_decay_schedule(0.1, 5)
    optimizer = optax.inject_hyperparams(optax.sgd)(schedule, momentum=0.9)
    program, _, state = build(Plan(micro_batch_size=4), optimizer)
    with pytest.raises(ConfigurationError, match="it has momentum, temperature"):
        program.set_values(state, learning_rate=1.0)
