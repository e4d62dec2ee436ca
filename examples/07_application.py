"""A complete application: options, progress, checkpoints, --resume and a report.

Try --help, --num-replicas 2 --virtual-devices 2, or Ctrl-C and then --resume RUN.
After --run-dir runs/curve, another script has the weights in two lines:

    fitted = mr.load("runs/curve")
    print(fitted.params["out"].shape, fitted.metrics["train_loss"])
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

import millrace as mr


@dataclass(frozen=True, kw_only=True)
class CurveConfig:
    """Fit a curve with a small network."""

    num_epochs: int = 20
    """Passes over the samples."""
    learning_rate: float = 0.01
    """Learning rate of Adam."""
    plan: mr.Plan = mr.Plan(micro_batch_size=32)
    run: mr.RunOptions = mr.RunOptions()


def loss_fn(params, model_state, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    error = hidden @ params["out"] - batch["y"]
    return jnp.mean(error**2), (model_state, {"largest": jnp.abs(error).max()})


def train(config: CurveConfig, run) -> None:
    x = np.linspace(-3, 3, 2048, dtype=np.float32)[:, None]
    samples = mr.ArraySource({"x": x, "y": np.sin(2 * x)})
    schedule = mr.schedule_events(
        updates_per_epoch=config.plan.batching.updates_per_epoch(len(x)),
        num_epochs=config.num_epochs,
        events_per_epoch={"log": 1, "checkpoint": 0.2},
    )
    program = mr.training_program(loss_fn, optax.adam(config.learning_rate), config.plan)
    run.describe(program.devices, config.plan, schedule, model="64 tanh units")
    draw = jax.random.normal(jax.random.key(config.run.seed), (2, 64))
    params = {"in": draw[:1] * 2, "bias": draw[1], "out": jnp.zeros((64, 1))}
    infeed = mr.Infeed(mr.Stream(samples, config.plan.batching.samples_per_step))
    with run.checkpoints(keep=3) as checkpoints:
        state = program.init(params, seed=config.run.seed)
        run.train(program, state, infeed, schedule, checkpoints=checkpoints)
    print(f"curve: train loss {run.summary['metrics']['train_loss']:.4f}")


if __name__ == "__main__":
    mr.run_as_command(train, CurveConfig, name="curve")
