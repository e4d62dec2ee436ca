"""A small training run in its own process, for tests that kill it.

usage: killable_run.py RUN_DIR [--resume] [--delay=SECONDS] [--note-finished=FILE]
                       [--upload-timeout=SECONDS]

Reading a batch takes SECONDS. FILE gets the update of each finished checkpoint. Every
update logs sums over the ids of its samples, so that a skipped or repeated sample shows
in the metrics.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.checkpoint import store
from millrace.data.source import ArraySource
from millrace.data.stream import Stream
from millrace.feeds.infeed import Infeed
from millrace.loop.event_schedule import schedule_events
from millrace.plan import Plan
from millrace.program.training import training_program
from millrace.run.options import RunOptions
from millrace.run.run import run_command

SAMPLES, EPOCHS = 230, 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of the run."""

    plan: Plan = Plan(micro_batch_size=4, gradient_accumulation_count=2)
    run: RunOptions = RunOptions()


def option(name: str, default: str) -> str:
    given = [word for word in sys.argv if word.startswith(f"--{name}=")]
    return given[0].partition("=")[2] if given else default


class SlowStream(Stream):
    """Takes long enough for the run to be killed in the middle."""

    def batch(self, position):
        time.sleep(float(option("delay", "0.004")))
        return super().batch(position)


def loss_fn(params, model_state, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    prediction = jnp.tanh((batch["x"] + 0.1 * noise) @ params["a"]) @ params["b"]
    ids = batch["id"].astype(jnp.float32)
    model_state = {"mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)}
    info = {"ids": ids.sum(), "squares": (ids * ids).sum()}
    return ((prediction - batch["y"]) ** 2).mean(), (model_state, info)


def work(config, run):
    rng = np.random.default_rng(0)
    source = ArraySource(
        {
            "x": rng.standard_normal((SAMPLES, 8)).astype(np.float32),
            "y": rng.standard_normal((SAMPLES, 1)).astype(np.float32),
            "id": np.arange(SAMPLES, dtype=np.int32),
        }
    )
    batching = config.plan.batching
    schedule = schedule_events(
        updates_per_epoch=batching.updates_per_epoch(SAMPLES),  # 28
        num_epochs=EPOCHS,
        events_per_epoch={"log": 28, "checkpoint": 7},
    )
    program = training_program(loss_fn, optax.adam(1e-2), config.plan)
    params = {
        "a": jnp.asarray(rng.standard_normal((8, 16)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal((16, 1)), jnp.float32),
    }
    state = program.init(params, {"mean": jnp.zeros(8)}, seed=config.run.seed)
    stream = SlowStream(source, 4, batches_per_epoch=56, seed=config.run.seed)
    with run.checkpoints(keep=2) as checkpoints:
        state = run.train(
            program,
            state,
            Infeed(stream),
            schedule,
            checkpoints=checkpoints,
        )
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    np.savez(run.directory.path / "final.npz", *leaves)


def note_finished(path: str) -> None:
    real = store.write_checkpoint

    def write(folder, state, update, *arguments, **named):
        real(folder, state, update, *arguments, **named)
        with open(path, "a") as file:
            file.write(f"{update}\n")

    store.write_checkpoint = write


if __name__ == "__main__":
    if file := option("note-finished", ""):
        note_finished(file)
    options = RunOptions(
        run_dir=Path(sys.argv[1]),
        resume="--resume" in sys.argv,
        upload_timeout=float(option("upload-timeout", "60")),
        quiet=True,
        seed=5,
    )
    config = Config(run=options)
    sys.exit(run_command(work, config, command="killable", command_line="test"))
