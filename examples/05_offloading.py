"""Keep the optimizer state in host memory and stream it to the device for each update.

Adam has two numbers per weight and needs them only in the update. During the micro-batches
of a long accumulation they do not have to occupy device memory.
"""

import jax.numpy as jnp
import numpy as np
import optax

import millrace as mr

rng = np.random.default_rng(0)
x = rng.standard_normal((1024, 64), np.float32)
samples = mr.ArraySource({"x": x, "y": np.sin(x.sum(1))})
start = {
    "hidden": rng.standard_normal((64, 256), np.float32) / 8,
    "out": np.zeros(256, np.float32),
}


def loss_fn(params, model_state, batch, key):
    """Return the mean squared error over the samples of `batch`."""
    prediction = jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"]
    return ((prediction - batch["y"]) ** 2).mean(), (model_state, {})


def train(offloading):
    """Run 50 updates of 8 micro-batches; return the weights and the state of Adam."""
    plan = mr.Plan(
        micro_batch_size=16,
        gradient_accumulation_count=8,
        optimizer_state_offloading=offloading,
    )
    program = mr.training_program(loss_fn, optax.adam(0.001), plan)
    with mr.Infeed(mr.Stream(samples, batch_size=16)) as infeed:
        state = mr.train(program, program.init(start), infeed=infeed, updates=50)
    return state.params, state.optimizer_state[0]


resident, _ = train(offloading=False)
offloaded, adam = train(offloading=True)

# Arrays under 4 KiB stay on the device: moving them would save nothing.
for name in start:
    for what, array in (
        ("weights", offloaded[name]),
        ("first moment", adam.mu[name]),
        ("second moment", adam.nu[name]),
    ):
        memory = array.sharding.memory_kind
        print(f"{name:6} {what:13} {array.nbytes:6,} bytes in {memory} memory")
assert adam.mu["hidden"].sharding.memory_kind == "pinned_host"

difference = max(abs(offloaded[name] - resident[name]).max() for name in start)
print(f"largest difference from the weights without offloading: {difference:g}")
assert difference < 1e-6
