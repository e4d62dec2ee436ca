"""Pipelines as they run against what the simulator says they take.

On a machine with fewer cores than devices, stages that compute would take each other's
time. So these stages wait instead: each layer sleeps for its time on the way forward, and
twice as long on the way back, and devices can truly work side by side.

Target: every pipeline takes at most 1.1 times its prediction, and never less than it.
"""

import argparse
import os
import time
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from reporting import Result, interleave, parser, publish, seconds, spread

import millrace as mr
from millrace.program.pipeline_program import PipelineProgram
from millrace.schedule.simulate import Costs, simulate

_FEATURES = 8


def waiting(name: str, seconds_: float) -> mr.layers.Layer:
    """A layer that takes its time and nothing else."""

    def sleep(x: np.ndarray, how_long: float) -> np.ndarray:
        time.sleep(how_long)
        return np.asarray(x)

    def wait(x: jax.Array, how_long: float) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: sleep(x, how_long), shape, x)

    @jax.custom_vjp
    def pass_on(x: jax.Array) -> jax.Array:
        return wait(x, seconds_)

    pass_on.defvjp(
        lambda x: (wait(x, seconds_), None), lambda _, g: (wait(g, 2 * seconds_),)
    )
    return mr.layers.stateless(name, pass_on)


class Case(NamedTuple):
    """A pipeline: the times of its stages, and where they are."""

    schedule: str
    times: tuple[float, ...]
    mapping: list[Any] | None = None
    concurrent: bool = False
    """Whether the middle two of four stand side by side."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        where = f" on {self.mapping}" if self.mapping else ""
        return f"{self.schedule}{where}"


_EVEN, _UNEVEN = (0.02,) * 4, (0.016, 0.024, 0.012, 0.02)
CASES = [
    Case("grouped", _EVEN),
    Case("interleaved", _EVEN),
    Case("sequential", _EVEN),
    Case("grouped", _UNEVEN, [0, 1, 1, 0]),
    Case("interleaved", _UNEVEN, [0, 1, 2, 0]),
    Case("interleaved", _EVEN, [0, [1, 2], 0], concurrent=True),
    Case("interleaved", _EVEN, [0, [1, 1], 0], concurrent=True),
]


def network_of(case: Case) -> tuple[list[mr.layers.Layer], list[str]]:
    """Return the layers and the splits of a case.

    No backward pass needs what a layer that waits returned, so none waits again for it.
    """
    first, *middle, last = [waiting(f"wait{i}", t) for i, t in enumerate(case.times)]
    start, end = mr.layers.dense("start", _FEATURES), mr.layers.dense("end", 1)
    if not case.concurrent:
        return [start, first, *middle, end, last], ["wait1", "wait2", "end"]
    both = mr.layers.concurrent("both", *[[layer] for layer in middle])
    join = mr.layers.stateless("join", sum)
    return [start, first, both, join, end, last], ["both", "join"]


class Running:
    """A case's program, its prediction and what it takes."""

    def __init__(self, case: Case, micro_batches: int) -> None:
        layers, splits = network_of(case)
        loss = mr.LayeredLoss(
            layers, lambda batch, key: batch, lambda y, batch: (y.mean(), {})
        )
        plan = mr.Plan(
            gradient_accumulation_count=micro_batches,
            pipeline_splits=splits,
            device_mapping=case.mapping,
            pipeline_schedule=case.schedule,
        )
        program = mr.training_program(loss, optax.sgd(0.1), plan)
        assert isinstance(program, PipelineProgram)
        x = np.zeros((micro_batches, 1, _FEATURES), np.float32)
        self._program = program
        self._state = program.init(*mr.layers.init_layers(layers, jax.random.key(0), x[0]))
        self._chunk = jax.device_put(x, program.chunk_sharding)
        costs = Costs(forward=case.times, backward=tuple(2 * t for t in case.times))
        self.predicted = simulate(program.table, costs).seconds

    def seconds(self) -> float:
        """Make one update."""

        def run() -> Any:
            self._state, info = self._program.run(self._state, self._chunk)
            return info

        return seconds(run)


def report(measured: dict[str, list[float]], running: dict[str, Running]) -> Result:
    """Compare each case with its prediction."""
    ratios = {n: [t / running[n].predicted for t in v] for n, v in measured.items()}
    medians = {n: float(np.median(v)) for n, v in ratios.items()}
    ticks = {n: len(r._program.table.ticks) for n, r in running.items()}
    extra = [
        1e6 * (float(np.median(measured[n])) - running[n].predicted) / ticks[n]
        for n in running
    ]
    return Result(
        name="pipeline_prediction",
        table=[
            {
                "pipeline": name,
                "predicted ms": f"{1e3 * running[name].predicted:.1f}",
                "measured ms": spread(values, 1e3, 1),
                "measured / predicted": f"{medians[name]:.3f}",
            }
            for name, values in measured.items()
        ],
        ratio_name="worst measured / predicted",
        ratio=max(medians.values()),
        target=1.1,
        at_least=False,
        explanation=(
            f"Beyond the stages' own time a tick takes {min(extra):.0f} to "
            f"{max(extra):.0f} us, sleeping too long included. The least ratio is "
            f"{min(medians.values()):.3f}."
        ),
        numbers={"seconds": measured, "ratios": medians},
    )


def main() -> None:
    """Measure and report."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--micro-batches", type=int, default=24)
    args: argparse.Namespace = options.parse_args()
    running = {case.name: Running(case, args.micro_batches) for case in CASES}
    measured = interleave({n: r.seconds for n, r in running.items()}, args.rounds)
    publish(report(measured, running), args)


if __name__ == "__main__":
    main()
