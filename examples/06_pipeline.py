"""Train a network as a pipeline of four stages, with the same weights as without.

A model is a list of named layers, and a plan can start a stage at any of them. Activations
are passed between stages automatically; the loss stays the same. Each stage gets its own
device if there are four; otherwise stages share them.
"""

import jax
import numpy as np
import optax

import millrace as mr

jax.config.update("jax_num_cpu_devices", 4)  # virtual devices; no effect on GPUs
jax.config.update("jax_default_matmul_precision", "float32")  # to compare weights

rng = np.random.default_rng(0)
x = rng.standard_normal((4096, 32), np.float32)
samples = mr.ArraySource({"x": x, "y": np.tanh(x @ rng.standard_normal((32, 1)))})

network = []
for number in range(4):
    network += [mr.layers.dense(f"dense{number}", 64), mr.layers.relu(f"relu{number}")]
network.append(mr.layers.dense("out", 1))

loss = mr.LayeredLoss(
    network,
    inputs=lambda batch, key: batch["x"],
    outputs=lambda y, batch: (((y - batch["y"]) ** 2).mean(), {}),
)
params, model_state = mr.layers.init_layers(network, jax.random.key(0), x[:1])


def train(**pipeline):
    """Run 50 updates of 8 micro-batches; return the weights and the last loss."""
    plan = mr.Plan(micro_batch_size=16, gradient_accumulation_count=8, **pipeline)
    program = mr.training_program(loss, optax.adam(1e-3), plan)
    outfeed = mr.Outfeed(mode="last")
    with mr.Infeed(mr.Stream(samples, batch_size=16)) as infeed:
        state = program.init(params, model_state)
        state = mr.train(program, state, infeed=infeed, updates=50, outfeed=outfeed)
    return program.unpack_state(state).params, float(outfeed.dequeue()["loss"])


plain, last = train()
print(f"one device: loss {last:.4f}")
splits = ["dense1", "dense2", "dense3"]
mapping = [stage * min(4, jax.device_count()) // 4 for stage in range(4)]
for schedule in ("grouped", "interleaved", "sequential", "zero-bubble"):
    weights, last = train(
        pipeline_splits=splits, device_mapping=mapping, pipeline_schedule=schedule
    )
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(plain), strict=True)
    worst = max(float(np.abs(a - np.asarray(b)).max()) for a, b in pairs)
    print(f"four stages, {schedule}: loss {last:.4f}, weights within {worst:.0e}")
    assert worst < 1e-5
