"""A complete application: options, progress, validation, checkpoints, --resume, a report.

Try --help, --num-replicas 2 --virtual-devices 2, or Ctrl-C and then --resume RUN.
After --run-dir runs/curve, another script has the best weights in two lines:

    fitted = mr.load("runs/curve")
    print(fitted.params["out"].shape, fitted.metrics["validation_error"])
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


def errors(params, model_state, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    return {"error": jnp.abs(hidden @ params["out"] - batch["y"])[:, 0]}


def loss_fn(params, model_state, batch, key):
    error = errors(params, model_state, batch)["error"]
    return jnp.mean(error**2), (model_state, {"largest": error.max()})


def points(count, seed):
    x = np.random.default_rng(seed).uniform(-3, 3, (count, 1)).astype(np.float32)
    return mr.ArraySource({"x": x, "y": np.sin(2 * x)})


def train(config: CurveConfig, run) -> None:
    samples, held_out, plan = points(2048, 0), points(128, 1), config.plan
    schedule = mr.schedule_events(
        updates_per_epoch=plan.batching.updates_per_epoch(len(samples)),
        num_epochs=config.num_epochs,
        events_per_epoch={"log": 1, "validate": 1, "checkpoint": 1},
    )
    program = mr.training_program(loss_fn, optax.adam(config.learning_rate), plan)
    evaluation = mr.EvaluationProgram(errors, plan)
    run.describe(program.devices, plan, schedule, model="64 tanh units")
    draw = jax.random.normal(jax.random.key(config.run.seed), (2, 64))
    params = {"in": draw[:1] * 2, "bias": draw[1], "out": jnp.zeros((64, 1))}
    infeed = mr.Infeed(mr.Stream(samples, plan.batching.samples_per_step))

    def validate(state):
        return mr.evaluate(evaluation, state, held_out, batch_size=64)

    with run.checkpoints(keep=3, best="validation_error") as saved:
        state = program.init(params, seed=config.run.seed)
        run.train(program, state, infeed, schedule, validate=validate, checkpoints=saved)
    print(f"curve: validation error {run.summary['metrics']['validation_error']:.4f}")


if __name__ == "__main__":
    mr.run_as_command(train, CurveConfig, name="curve")
