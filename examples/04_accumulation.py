"""Accumulate the gradients of 250 micro-batches, and compare accumulator types.

With precision 16.16, weights and gradients are bfloat16, which has two to three digits. A
long sum needs a wider accumulator, for all variables or for some.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import millrace as mr

rng = np.random.default_rng(0)
x = rng.standard_normal((1000, 64), np.float32)
samples = mr.ArraySource({"x": x, "y": np.tanh(x.sum(1))})
start = {"kernel": rng.standard_normal(64, np.float32) / 8, "bias": np.float32([0.5])}


def loss_fn(params, model_state, batch, key):
    """Return the mean squared error of a linear regression."""
    error = batch["x"] @ params["kernel"] + params["bias"] - batch["y"]
    return (error**2).mean(), (model_state, {})


def gradient(dtype, reduction):
    """Run one update and return the gradient that reached the optimizer."""
    plan = mr.Plan(
        micro_batch_size=4,
        gradient_accumulation_count=250,
        gradient_accumulation_dtype=dtype,
        gradient_accumulation_reduction=reduction,
        precision="16.16",
    )
    # After one update, the momentum is the gradient; here it is stored in float32.
    optimizer = optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32)
    program = mr.training_program(loss_fn, optimizer, plan)
    with mr.Infeed(mr.Stream(samples, batch_size=4)) as infeed:
        state = mr.train(program, program.init(start), infeed=infeed, updates=1)
    total = jax.device_get(state.optimizer_state[0].trace)
    return {k: v / 250 if reduction == "sum" else v for k, v in total.items()}


def compare(label, dtype, reduction="mean"):
    """Return the relative error of the gradient of each variable."""
    found = gradient(dtype, reduction)
    error = {k: abs(found[k] - exact[k]).max() / abs(exact[k]).max() for k in exact}
    print(f"{label:10} {reduction:13} ", *(f"{k} {v:.0e}" for k, v in error.items()))
    return error


exact = gradient(jnp.float32, "mean")
print("Relative error compared with the mean accumulated in float32:")
wide = compare("float32", jnp.float32, "running_mean")
own = [compare("None", None, how) for how in ("mean", "sum", "running_mean")]  # bfloat16
# A function of a variable's path and value can choose the type of each accumulator.
mixed = compare("wide bias", lambda path, v: jnp.float32 if path == "bias" else v.dtype)
assert max(wide["kernel"], wide["bias"], mixed["bias"]) < 1e-5
assert min(own[0]["kernel"], mixed["kernel"]) > 1e-3
