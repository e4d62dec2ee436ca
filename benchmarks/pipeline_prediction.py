"""Measured times of pipelines against the prediction of the simulator.

On a machine with fewer cores than devices, stages that compute would compete for cores.
Here each layer sleeps instead, so that devices really work at the same time: as long for
the gradient of its input, and for that of its weight, as in the forward pass.

Target: every pipeline takes between 1 and 1.1 times its prediction. With 4 even stages and
8 micro-batches, zero-bubble takes at most 0.88 of the time of grouped.
"""

import argparse
import os
import time
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from harness import (
    Result,
    build_parser,
    format_spread,
    interleave,
    publish,
    time_call,
)

import millrace as mr
from millrace.program.pipeline_program import PipelineProgram
from millrace.schedule.simulate import Costs, simulate

_FEATURES = 8


def build_sleep(name: str, seconds: float) -> mr.layers.Layer:
    """Return a layer that sleeps and passes its input on."""

    def sleep(x: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return np.asarray(x)

    def wait(x: jax.Array) -> jax.Array:
        return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def pass_on(weight: jax.Array, x: jax.Array) -> jax.Array:
        return wait(x)

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_input = wait(gradient)
        # It follows from the other, so that XLA does not sleep in both at the same time.
        return wait(of_input.sum()), of_input

    pass_on.defvjp(lambda weight, x: (pass_on(weight, x), None), backward)

    def init(x: Any) -> Any:
        return {"weight": np.float32(0)}, {}

    def apply(params: Any, model_state: Any, x: Any, call: Any) -> Any:
        return pass_on(params["weight"], x), model_state

    return mr.layers.Layer(name, init, apply)


class Case(NamedTuple):
    """A pipeline: the times of its stages and their devices."""

    schedule: str
    times: tuple[float, ...]
    mapping: list[Any] | None = None
    concurrent: bool = False
    """Whether the middle two of the four layers are branches."""
    micro_batches: int = 24

    @property
    def name(self) -> str:
        """Name in the table."""
        where = f" on {self.mapping}" if self.mapping else ""
        return f"{self.schedule}{where}, {self.micro_batches} micro-batches"


_EVEN, _UNEVEN = (0.02,) * 4, (0.016, 0.024, 0.012, 0.02)
_GROUPED, _ZERO_BUBBLE = (
    Case(schedule, _EVEN, micro_batches=8) for schedule in ("grouped", "zero-bubble")
)
_ZERO_BUBBLE_TARGET = 0.88
CASES = [
    _GROUPED,
    _ZERO_BUBBLE,
    Case("grouped", _EVEN),
    Case("interleaved", _EVEN),
    Case("sequential", _EVEN),
    Case("zero-bubble", _EVEN),
    Case("zero-bubble", _UNEVEN, [0, 1, 2, 0]),
    Case("grouped", _UNEVEN, [0, 1, 1, 0]),
    Case("interleaved", _UNEVEN, [0, 1, 2, 0]),
    Case("interleaved", _EVEN, [0, [1, 2], 0], concurrent=True),
    Case("interleaved", _EVEN, [0, [1, 1], 0], concurrent=True),
]


def build_network(case: Case) -> tuple[list[mr.layers.Layer], list[str]]:
    """Return the layers and the splits of a case.

    No backward pass needs the output of a sleeping layer, so none is recomputed.
    """
    first, *middle, last = [build_sleep(f"wait{i}", t) for i, t in enumerate(case.times)]
    start, end = mr.layers.dense("start", _FEATURES), mr.layers.dense("end", 1)
    if not case.concurrent:
        return [start, first, *middle, end, last], ["wait1", "wait2", "end"]
    both = mr.layers.concurrent("both", *[[layer] for layer in middle])
    join = mr.layers.stateless("join", sum)
    return [start, first, both, join, end, last], ["both", "join"]


class Running:
    """The program of a case with its prediction."""

    def __init__(self, case: Case) -> None:
        layers, splits = build_network(case)
        loss = mr.LayeredLoss(
            layers, lambda batch, key: batch, lambda y, batch: (y.mean(), {})
        )
        plan = mr.Plan(
            gradient_accumulation_count=case.micro_batches,
            pipeline_splits=splits,
            device_mapping=case.mapping,
            pipeline_schedule=case.schedule,
        )
        program = mr.training_program(loss, optax.sgd(0.1), plan)
        assert isinstance(program, PipelineProgram)
        x = np.zeros((case.micro_batches, 1, _FEATURES), np.float32)
        self._program = program
        self._state = program.init(*mr.layers.init_layers(layers, jax.random.key(0), x[0]))
        self._chunk = jax.device_put(x, program.chunk_sharding)
        costs = Costs(forward=case.times, backward=tuple(2 * t for t in case.times))
        self.predicted = simulate(program.table, costs).seconds

    def seconds(self) -> float:
        """Make one update and return the time."""

        def run() -> Any:
            self._state, info = self._program.run(self._state, self._chunk)
            return info

        return time_call(run)


def report(measured: dict[str, list[float]], running: dict[str, Running]) -> Result:
    """Compare each case with its prediction."""
    ratios = {n: [t / running[n].predicted for t in v] for n, v in measured.items()}
    medians = {n: float(np.median(v)) for n, v in ratios.items()}
    ticks = {n: len(r._program.table.ticks) for n, r in running.items()}
    extra = [
        1e6 * (float(np.median(measured[n])) - running[n].predicted) / ticks[n]
        for n in running
    ]
    faster = float(
        np.median(
            np.divide(measured[_ZERO_BUBBLE.name], measured[_GROUPED.name])  # in pairs
        )
    )
    return Result(
        name="pipeline_prediction",
        table=[
            {
                "pipeline": name,
                "predicted ms": f"{1e3 * running[name].predicted:.1f}",
                "measured ms": format_spread(values, 1e3, 1),
                "measured / predicted": f"{medians[name]:.3f}",
            }
            for name, values in measured.items()
        ],
        ratio_name="worst measured / predicted",
        ratio=max(medians.values()),
        target=1.1,
        at_least=False,
        explanation=(
            f"A tick takes {min(extra):.0f} to {max(extra):.0f} us more than its stages, "
            "which includes the inaccuracy of sleep. The lowest ratio is "
            f"{min(medians.values()):.3f}. With 8 micro-batches, zero-bubble takes "
            f"{faster:.3f} of the time of grouped (target: at most {_ZERO_BUBBLE_TARGET})."
        ),
        numbers={"seconds": measured, "ratios": medians, "zero_bubble": faster},
    )


def main() -> None:
    """Measure and report."""
    parser = build_parser(__doc__, rounds=5)
    args: argparse.Namespace = parser.parse_args()
    running = {case.name: Running(case) for case in CASES}
    measured = interleave({n: r.seconds for n, r in running.items()}, args.rounds)
    publish(report(measured, running), args)


if __name__ == "__main__":
    main()
