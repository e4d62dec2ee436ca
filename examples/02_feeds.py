"""Watch the loss while a compiled loop runs, and measure how fast its data arrives.

A loop fills its outfeed as it runs, so another thread can log results, plot them, or serve
predictions.
"""

import json
import threading

import jax
import numpy as np

import millrace as mr

NUM_STEPS = 20_000

# Points of a noisy plane in batches of 64, reshuffled every epoch, forever.
rng = np.random.default_rng(0)
x = rng.standard_normal((4096, 16), np.float32)
y = x @ np.arange(16, dtype=np.float32) + rng.standard_normal(4096, np.float32)
stream = mr.Stream(mr.ArraySource({"x": x, "y": y}), batch_size=64)
infeed, outfeed = mr.Infeed(stream), mr.Outfeed()
losses, read_at = [], []  # read_at: the step of the loop when a loss was read


def body(weights, batch):
    """Run one step of gradient descent; the output is the loss before it."""

    def loss_fn(weights):
        return ((batch["x"] @ weights - batch["y"]) ** 2).mean()

    loss, gradient = jax.value_and_grad(loss_fn)(weights)
    return weights - 0.001 * gradient, loss


def watch():
    """Read the losses in order as they arrive, until the loop ends."""
    for step, loss in enumerate(outfeed):
        losses.append(loss)
        read_at.append(infeed.position)
        if step in (0, 100, 1000, 10_000):
            print(f"step {step:6,}: loss {loss:8.2f}, read at step {read_at[-1]:,}")


watcher = threading.Thread(target=watch)
watcher.start()
with infeed:
    mr.repeat(NUM_STEPS, body, np.zeros(16, np.float32), infeed=infeed, outfeed=outfeed)
watcher.join()
assert len(losses) == NUM_STEPS and np.mean(losses[-100:]) < losses[0] / 100
assert read_at[0] < NUM_STEPS, "the first loss was read only after the loop had ended"

# A loop is no faster than its data: read it alone, then with the copy to the device.
reports = {"dataset": mr.dataset_benchmark(stream, 3, 1000)}
with infeed:
    reports["infeed"] = mr.infeed_benchmark(infeed, 3, 1000)
for name, report in reports.items():
    best = max(epoch["elements_per_second"] for epoch in json.loads(report)["epochs"])
    print(f"{name}_benchmark: {best:,.0f} batches per second")
