"""A runner over a few updates of one weight, and its batches."""

import jax.numpy as jnp
import numpy as np
import optax

import millrace as mr
from millrace.checkpoint.store import Checkpoints
from millrace.loop.event_schedule import schedule_events
from millrace.loop.runner import Runner
from millrace.run.console import Console
from millrace.run.directory import RunDirectory
from millrace.run.writers import _JsonLines


def loss_fn(params, model_state, batch, key):
    return ((batch * params["w"] - 1.0) ** 2).mean(), (model_state, {"seen": batch.mean()})


def batches(values):
    for value in values:
        yield np.full(2, value, np.float32)


def make_runner(
    path,
    dataset,
    *,
    updates=12,
    loss=loss_fn,
    plan=None,
    logs=4,
    validate=None,
    callbacks=(),
    trace=None,
    **rates,
):
    if "validations" in rates:
        rates["validate"] = rates.pop("validations")
    plan = plan or mr.Plan(micro_batch_size=2)
    program = mr.training_program(
        loss, optax.sgd(0.01), plan, extra_info={"rate": lambda update: update * 10}
    )
    schedule = schedule_events(
        updates_per_epoch=updates, num_epochs=1, events_per_epoch={"log": logs, **rates}
    )
    path.mkdir(exist_ok=True)
    directory = RunDirectory(path)
    checkpoints = Checkpoints(path / "checkpoints")
    runner = Runner(
        program,
        mr.Infeed(dataset),
        schedule,
        directory=directory,
        console=Console(quiet=True),
        writers=[_JsonLines(directory)],
        checkpoints=checkpoints,
        validate=validate,
        callbacks=callbacks,
        trace=trace,
    )
    return runner, program.init({"w": jnp.ones(1)}), directory, checkpoints
