"""A small training run for tests that start several processes of it.

usage: launched_run.py [options of Config]

Every update reports sums over the ids of its samples, so that a sample that is skipped or
read twice shows in the metrics. With --images, the samples are image files, and the sums
are over their pixels. The final state is written to final.npz.
"""

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from millrace.commands.calling import run_as_command
from millrace.data.decoding import Crop
from millrace.data.image_source import ImageStream
from millrace.data.imagenet import load_images
from millrace.data.source import ArraySource
from millrace.data.stream import Stream
from millrace.distributed import coordination
from millrace.feeds.infeed import Infeed
from millrace.loop.evaluate import evaluate
from millrace.loop.event_schedule import schedule_events
from millrace.plan import Plan
from millrace.program.evaluate import EvaluationProgram
from millrace.program.replicas import to_host
from millrace.program.training import training_program
from millrace.run.options import TRANSIENT, RunOptions

SAMPLES, VALIDATION = 70, 13
MAY_CHANGE = {"may_change": True}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of the run."""

    num_epochs: int = 5
    delay: float = field(default=0.0, metadata=MAY_CHANGE)
    """Seconds to read a batch."""
    fail_in: int = field(default=-1, metadata=MAY_CHANGE)
    """The process in which reading fails."""
    hang_in: int = field(default=-1, metadata=MAY_CHANGE | TRANSIENT)
    """The process that gets stuck."""
    hang_while: str = field(default="reading", metadata=MAY_CHANGE | TRANSIENT)
    """What it does then: reading, or waiting for the others."""
    broken_devices: Path | None = field(default=None, metadata=MAY_CHANGE | TRANSIENT)
    """A file with the slots whose processes cannot use their devices."""
    full_after: int = field(default=-1, metadata=MAY_CHANGE | TRANSIENT)
    """Number of checkpoints after which the disk of process 0 is full."""
    kill_at: int = field(default=-1, metadata=MAY_CHANGE | TRANSIENT)
    """The update after which process 1 is killed while it writes a checkpoint."""
    images: Path | None = None
    """A folder with image files to train on instead."""
    num_workers: int = field(default=0, metadata=MAY_CHANGE)
    """Worker processes that decode them."""
    plan: Plan = Plan(micro_batch_size=2)
    run: RunOptions = RunOptions()


class SlowStream(Stream):
    """Delays every batch, and fails in one process, as configured."""

    config = Config()

    def batch(self, position):
        time.sleep(self.config.delay)
        if self.config.fail_in == coordination.process_id() and position > 20:
            raise OSError(f"The disk of process {coordination.process_id()} is broken.")
        hangs = self.config.hang_in == coordination.process_id() and position > 20
        if hangs and self.config.hang_while == "reading":
            read_from_a_file_server_that_is_gone()
        return super().batch(position)


def read_from_a_file_server_that_is_gone():
    print("stuck from now on", flush=True)
    threading.Event().wait()


class SlowImages(ImageStream):
    """Delays every batch as configured."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(SlowStream.config.delay)
            yield batch


def as_samples(batch):
    """Return a batch with features, targets and ids, made of images if it has some."""
    if "image" not in batch:
        return batch
    pixels = batch["image"].reshape(len(batch["label"]), -1).astype(jnp.float32)
    place = jnp.arange(pixels.shape[1]) % 89  # so that pixels in other places are noticed
    return {
        "x": pixels.reshape(len(pixels), 8, -1).mean(-1) / 255,
        "y": batch["label"][:, None].astype(jnp.float32),
        "id": (pixels * place).mean(1) / 100,
    }


def loss_fn(params, model_state, batch, key):
    batch = as_samples(batch)
    noise = jax.random.normal(key, batch["x"].shape)
    prediction = jnp.tanh((batch["x"] + 0.1 * noise) @ params["a"]) @ params["b"]
    ids = batch["id"].astype(jnp.float32)
    model_state = {"mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)}
    info = {"ids": ids.sum(), "squares": (ids * ids).sum()}
    return ((prediction - batch["y"]) ** 2).mean(), (model_state, info)


def metric_fn(params, model_state, batch):
    error = jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]
    return {"error": (error**2)[:, 0], "id": batch["id"].astype(jnp.float32)}


def samples(count):
    rng = np.random.default_rng(count)
    return ArraySource(
        {
            "x": rng.standard_normal((count, 8)).astype(np.float32),
            "y": rng.standard_normal((count, 1)).astype(np.float32),
            "id": np.arange(count, dtype=np.int32),
        }
    )


def open_stream(config, batch_size, batches_per_epoch):
    options = {"batches_per_epoch": batches_per_epoch, "seed": config.run.seed}
    if config.images is None:
        return SlowStream(samples(SAMPLES), batch_size, **options)
    loaded = load_images(
        str(config.images),
        Crop(size=16),
        num_workers=config.num_workers,
        needs_validation=False,
    )
    return SlowImages(loaded.training, batch_size, **options)


def work(config, run):
    check_devices(config.broken_devices)
    batching = config.plan.batching
    schedule = schedule_events(
        updates_per_epoch=batching.updates_per_epoch(SAMPLES),
        num_epochs=config.num_epochs,
        events_per_epoch={"log": 8, "checkpoint": 2, "validate": 1},
    )
    program = training_program(loss_fn, optax.adam(1e-2), config.plan)
    rng = np.random.default_rng(0)
    params = {
        "a": rng.standard_normal((8, 16)).astype(np.float32),
        "b": rng.standard_normal((16, 1)).astype(np.float32),
    }
    state = program.init(params, {"mean": np.zeros(8, np.float32)}, seed=config.run.seed)
    SlowStream.config = config
    batches_per_epoch = 8 * batching.gradient_accumulation_count
    stream = open_stream(config, batching.samples_per_step, batches_per_epoch)
    judge = EvaluationProgram(metric_fn, Plan(num_replicas=batching.num_replicas))

    def validate(state):
        hangs = config.hang_in == coordination.process_id()
        if hangs and config.hang_while == "waiting":
            print("stuck from now on", flush=True)
            coordination.barrier("of nobody else")
        return evaluate(judge, judge.place_state(state), samples(VALIDATION), 8)

    with run.checkpoints(keep=2) as checkpoints:
        if coordination.is_first() and config.full_after >= 0:
            fill_disk(config.full_after)
        if coordination.process_id() == 1 and config.kill_at >= 0:
            kill_while_saving(config.kill_at)
        state = run.train(
            program,
            state,
            Infeed(stream),
            schedule,
            checkpoints=checkpoints,
            validate=validate,
        )
    leaves = [to_host(leaf) for leaf in jax.tree.leaves(program.unpack_state(state))]
    np.savez(run.directory.path / "final.npz", *leaves)


def check_devices(broken):
    if broken is not None and broken.exists():
        if os.environ["MILLRACE_SLOT"] in broken.read_text().split():
            raise OSError("The device is gone.")


def fill_disk(num_checkpoints):
    """Make writing arrays fail in this process after some checkpoints.

    The error comes from no line of this file, which would be shown as code of the user.
    """
    from millrace.checkpoint import files

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    outcomes = [mock.DEFAULT] * num_checkpoints + [full]
    files.write_arrays = mock.Mock(wraps=files.write_arrays, side_effect=outcomes)


def kill_while_saving(update):
    """Kill this process when a part of its arrays is written, after `update`."""
    from millrace.checkpoint import orbax_files

    real = orbax_files.write_share

    def write_half(folder: Path, arrays):
        number = folder.parent.name.partition(".")[0].removeprefix("update-")
        if int(number) <= update:
            return real(folder, arrays)
        real(folder, dict(list(arrays.items())[: len(arrays) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    orbax_files.write_share = write_half


if __name__ == "__main__":
    try:
        run_as_command(work, Config, name="small")
    finally:
        rank, count = coordination.process_id(), coordination.num_processes()
        print(f"process {rank} of {count}, pid {os.getpid()}")
