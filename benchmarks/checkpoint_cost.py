"""The cost of checkpoints: a run that saves after every execution against one without.

Both runs use the Runner with the same schedule, log events and infeed. The time is that of
``Runner.run`` after compilation, including the blocking copy of the state, which
samples_per_second of a run leaves out. It excludes the wait for the last checkpoint, which
nothing can hide and which does not grow with the run. An execution takes about two seconds;
in real runs, checkpoints are further apart.

Target: at most 3 % of the throughput.
"""

import functools
import math
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import optax
from harness import (
    Result,
    add_sizes,
    build_mlp_stream,
    build_parser,
    format_spread,
    init_mlp,
    interleave,
    mlp_loss,
    on_gpu,
    paired_ratio,
    publish,
    time_call,
)

import millrace as mr
from millrace.checkpoint.store import Checkpoints
from millrace.loop.event_schedule import EventSchedule
from millrace.loop.runner import Runner
from millrace.run.console import Console
from millrace.run.directory import RunDirectory
from millrace.run.options import RunOptions
from millrace.run.writers import open_writers

_FEATURES, _OUTPUTS = 64, 16
_CPU = {"width": 832, "micro_batch": 64, "accumulation": 2, "executions": 4}
_GPU = {"width": 2896, "micro_batch": 2048, "accumulation": 4, "executions": 5}


class TimedCheckpoints(Checkpoints):
    """Checkpoints that record how long they block training."""

    copying = waiting = last_wait = 0.0

    def save(self, *arguments: Any, **facts: Any) -> None:
        """Save; the time not spent waiting for the previous write is that of the copy."""
        started, waited = time.perf_counter(), self.waiting
        super().save(*arguments, **facts)
        self.copying += time.perf_counter() - started - (self.waiting - waited)

    def wait(self, *, raise_error: bool = True) -> None:
        """Wait for the write in progress."""
        started = time.perf_counter()
        super().wait(raise_error=raise_error)
        self.last_wait = time.perf_counter() - started
        self.waiting += self.last_wait


def seconds_per_update(
    program: mr.TrainingProgram, stream: mr.Stream, weights: Any
) -> float:
    """Return the time of an update, to choose the length of an execution."""
    with mr.Infeed(stream) as infeed:
        train = functools.partial(mr.train, infeed=infeed, updates=16)
        times = [time_call(train, program, program.init(weights)) for _ in range(4)]
    return min(times[1:]) / 16


def run(
    program: mr.TrainingProgram,
    stream: mr.Stream,
    schedule: EventSchedule,
    weights: Any,
    pauses: list[dict[str, float]] | None,
) -> float:
    """Train and return the seconds; with `pauses`, save checkpoints and record pauses."""
    state = jax.block_until_ready(program.init(weights))
    with tempfile.TemporaryDirectory() as path:
        directory = RunDirectory(Path(path))
        saving = TimedCheckpoints(directory.checkpoints) if pauses is not None else None
        runner = Runner(
            program,
            mr.Infeed(stream),
            schedule,
            directory=directory,
            console=Console(quiet=True),
            writers=open_writers(RunOptions(), directory, {}, "benchmark"),
            checkpoints=saving,
        )
        elapsed = time_call(lambda: runner.run(state).state)
        if saving is not None and pauses is not None:
            last = saving.last_wait  # at the end of the run
            elapsed -= last
            pause = {"copying": saving.copying, "waiting": saving.waiting - last}
            pauses.append(pause | {"last write": last})
            saving.close()
    return elapsed


def explain(cost: float, pauses: list[dict[str, float]], megabytes: float) -> str:
    """Describe where the additional time goes."""
    spent = {kind: median(pause[kind] for pause in pauses) for kind in pauses[0]}
    copying, waiting, after = spent.values()
    return (
        f"A run with checkpoints takes {cost:.2f} s longer: {copying:.2f} s for copies of "
        f"{megabytes:.0f} MB, {waiting:.2f} s of waiting for earlier writes, and "
        f"{cost - copying - waiting:.2f} s because calls do not overlap around a pause and "
        "the writing thread uses cores and memory. The last write takes another "
        f"{after:.2f} s after the end, which is not counted."
    )


def main() -> None:
    """Measure and report."""
    parser = build_parser(__doc__, rounds=5)
    parser.add_argument("--execution-seconds", type=float, default=2.0)
    add_sizes(parser, _GPU if on_gpu() else _CPU)
    args = parser.parse_args()
    plan = mr.Plan(
        micro_batch_size=args.micro_batch, gradient_accumulation_count=args.accumulation
    )
    program = mr.training_program(mlp_loss, optax.adam(1e-4), plan)
    weights = init_mlp([_FEATURES, *[args.width] * 4, _OUTPUTS])
    stream = build_mlp_stream(args.micro_batch, _FEATURES, _OUTPUTS)
    updates = args.execution_seconds / seconds_per_update(program, stream, weights)
    schedule = mr.schedule_events(
        updates_per_epoch=8 * math.ceil(updates / 8),
        num_epochs=args.executions,
        events_per_epoch={"log": 1, "checkpoint": 1},
    )
    train = functools.partial(run, program, stream, schedule, weights)
    pauses: list[dict[str, float]] = []
    variants = {"none": lambda: train(None), "every execution": lambda: train(pauses)}
    measured = interleave(variants, args.rounds)
    share = paired_ratio(measured["every execution"], measured["none"]) - 1
    megabytes = 3e-6 * sum(
        x.nbytes for x in jax.tree.leaves(weights)
    )  # weights and the two moments of Adam
    result = Result(
        name="checkpoint_cost",
        table=[
            {
                "checkpoints": name,
                "s per execution": format_spread(values, 1 / args.executions, 3),
            }
            for name, values in measured.items()
        ],
        ratio_name="time that checkpoints add / time without",
        ratio=share,
        target=0.03,
        at_least=False,
        explanation=explain(share * median(measured["none"]), pauses[1:], megabytes),
        numbers={"seconds": measured, "pauses": pauses[1:], "megabytes": megabytes},
    )
    publish(result, args)


if __name__ == "__main__":
    main()
