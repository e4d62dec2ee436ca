"""What checkpoints cost: a run that saves after every execution against one that does not.

Both runs go through the Runner with the same schedule, log events and infeed. Timed is
all of ``Runner.run`` after compilation, the blocking copy of the state included (the run's
own samples_per_second leaves such pauses out), less the wait for the last checkpoint:
nothing is left to hide it behind, and a longer run has no more of it. An execution lasts
about two seconds; in real runs checkpoints are further apart.

Target: costs at most 3 % of the throughput.
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
import reporting
from reporting import init_mlp, mlp_loss, mlp_stream, seconds, spread

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
    """Checkpoints that note for how long training stood still."""

    copying = waiting = last_wait = 0.0

    def save(self, *arguments: Any, **facts: Any) -> None:
        """Save; what is not waiting for the write before is the copy."""
        started, waited = time.perf_counter(), self.waiting
        super().save(*arguments, **facts)
        self.copying += time.perf_counter() - started - (self.waiting - waited)

    def wait(self, *, raise_error: bool = True) -> None:
        """Wait for the write under way."""
        started = time.perf_counter()
        super().wait(raise_error=raise_error)
        self.last_wait = time.perf_counter() - started
        self.waiting += self.last_wait


def seconds_per_update(
    program: mr.TrainingProgram, stream: mr.Stream, weights: Any
) -> float:
    """Find out what an execution of the wanted length is."""
    with mr.Infeed(stream) as infeed:
        train = functools.partial(mr.train, infeed=infeed, updates=16)
        times = [seconds(train, program, program.init(weights)) for _ in range(4)]
    return min(times[1:]) / 16


def run(
    program: mr.TrainingProgram,
    stream: mr.Stream,
    schedule: EventSchedule,
    weights: Any,
    pauses: list[dict[str, float]] | None,
) -> float:
    """Train, with checkpoints if `pauses` is there to note them; return the seconds."""
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
        elapsed = seconds(lambda: runner.run(state).state)
        if saving is not None and pauses is not None:
            last = saving.last_wait  # the run ends with it
            elapsed -= last
            pause = {"copying": saving.copying, "waiting": saving.waiting - last}
            pauses.append(pause | {"last write": last})
            saving.close()
    return elapsed


def explain(cost: float, pauses: list[dict[str, float]], megabytes: float) -> str:
    """Say where the extra seconds of a run went."""
    spent = {kind: median(pause[kind] for pause in pauses) for kind in pauses[0]}
    copying, waiting, after = spent.values()
    return (
        f"A run with checkpoints takes {cost:.2f} s longer: {copying:.2f} s for copies of "
        f"{megabytes:.0f} MB, {waiting:.2f} s for writes under way, and "
        f"{cost - copying - waiting:.2f} s since calls do not follow each other closely "
        "around a pause and the writing thread takes cores and memory. The last write goes "
        f"on for {after:.2f} s after the end, which is not counted."
    )


def main() -> None:
    """Measure and report."""
    options = reporting.parser(__doc__, rounds=5)
    options.add_argument("--execution-seconds", type=float, default=2.0)
    reporting.add_sizes(options, _GPU if reporting.on_gpu() else _CPU)
    args = options.parse_args()
    plan = mr.Plan(
        micro_batch_size=args.micro_batch, gradient_accumulation_count=args.accumulation
    )
    program = mr.training_program(mlp_loss, optax.adam(1e-4), plan)
    weights = init_mlp([_FEATURES, *[args.width] * 4, _OUTPUTS])
    stream = mlp_stream(args.micro_batch, _FEATURES, _OUTPUTS)
    updates = args.execution_seconds / seconds_per_update(program, stream, weights)
    schedule = mr.schedule_events(
        updates_per_epoch=8 * math.ceil(updates / 8),
        num_epochs=args.executions,
        events_per_epoch={"log": 1, "checkpoint": 1},
    )
    train = functools.partial(run, program, stream, schedule, weights)
    pauses: list[dict[str, float]] = []
    variants = {"none": lambda: train(None), "every execution": lambda: train(pauses)}
    measured = reporting.interleave(variants, args.rounds)
    part = reporting.paired_ratio(measured["every execution"], measured["none"]) - 1
    megabytes = 3e-6 * sum(x.nbytes for x in jax.tree.leaves(weights))  # Adam's moments
    result = reporting.Result(
        name="checkpoint_cost",
        table=[
            {"checkpoints": name, "s per execution": spread(values, 1 / args.executions, 3)}
            for name, values in measured.items()
        ],
        ratio_name="time that checkpoints add / time without",
        ratio=part,
        target=0.03,
        at_least=False,
        explanation=explain(part * median(measured["none"]), pauses[1:], megabytes),
        numbers={"seconds": measured, "pauses": pauses[1:], "megabytes": megabytes},
    )
    reporting.publish(result, args)


if __name__ == "__main__":
    main()
