"""Train on one device and on four, with the same resulting weights.

Every replica has a copy of the weights and processes a part of the batch; gradients are
averaged once per update. Only the plan mentions replicas, the loss does not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import millrace as mr

# Virtual devices for machines with fewer than four; set them before using any device.
jax.config.update("jax_num_cpu_devices", 4)
devices = jax.devices() if len(jax.devices()) >= 4 else jax.devices("cpu")

rng = np.random.default_rng(0)
x = rng.standard_normal((1024, 8), np.float32)
samples = mr.ArraySource({"x": x, "y": np.sin(x.sum(1))})
start = {
    "hidden": rng.standard_normal((8, 32), np.float32) / 3,
    "out": np.zeros(32, np.float32),
}


def loss_fn(params, model_state, batch, key):
    """Return the mean squared error over the samples of `batch`."""
    prediction = jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"]
    return ((prediction - batch["y"]) ** 2).mean(), (model_state, {})


def train(plan):
    """Run 200 weight updates with `plan`; return the weights and the losses."""
    program = mr.training_program(loss_fn, optax.adam(0.01), plan, devices=devices)
    state = program.init(start)
    outfeed = mr.Outfeed()
    # An element of the infeed has one micro-batch for every replica.
    stream = mr.Stream(samples, plan.micro_batch_size * plan.num_replicas)
    with mr.Infeed(stream) as infeed:
        state = mr.train(program, state, infeed=infeed, updates=200, outfeed=outfeed)
    return jax.device_get(state.params), outfeed.dequeue()["loss"]


plain, losses = train(mr.Plan(micro_batch_size=64))
print(f"1 replica of 64 samples: loss from {losses[0]:.4f} to {losses[-1]:.4f}")

# Two other ways to split an update of 64 samples.
for plan in (
    mr.Plan(num_replicas=4, micro_batch_size=16),
    mr.Plan(num_replicas=4, micro_batch_size=4, gradient_accumulation_count=4),
):
    assert plan.batching.global_batch_size == 64
    weights, losses = train(plan)
    difference = max(abs(weights[name] - plain[name]).max() for name in plain)
    counts = f"{plan.micro_batch_size} x {plan.gradient_accumulation_count or 1} samples"
    print(f"4 replicas of {counts}: the same weights within {difference:.0e}")
    assert difference < 1e-4  # the order of a sum changes its rounding
