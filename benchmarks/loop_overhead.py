"""Host overhead per weight update: many updates per execution against one per call.

A small MLP, whose update takes the device microseconds, trains in a plain JAX loop (jitted
step, NumPy batches, donated state) and with ``mr.train``, which stages batches in chunks
and makes many updates per execution. The overhead is the time per update minus that of the
device, which is the slope of a long ``lax.scan`` of the same update over resident batches.

Target: the overhead of millrace is at least 10 times lower.
"""

import functools
import itertools
import statistics
from typing import Any

import jax
import numpy as np
import optax
from harness import (
    Result,
    build_mlp_stream,
    build_parser,
    format_spread,
    init_mlp,
    interleave,
    mlp_loss,
    publish,
    time_call,
)

import millrace as mr

_SIZES = (8, 16, 4)
_MICRO_BATCH = 8
_OPTIMIZER = optax.adam(1e-3)


@functools.partial(jax.jit, donate_argnums=0)
def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """Make one update, as in a plain JAX program."""

    def loss_fn(params: Any) -> jax.Array:
        return mlp_loss(params, None, batch, None)[0]

    params, optimizer_state = state
    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, optimizer_state = _OPTIMIZER.update(gradients, optimizer_state, params)
    return (optax.apply_updates(params, updates), optimizer_state), loss


@functools.partial(jax.jit, donate_argnums=0)
def scanned(state: Any, chunk: Any) -> tuple[Any, jax.Array]:
    """Make many updates over batches on the device."""
    return jax.lax.scan(step, state, chunk)


def plain_state() -> Any:
    """Return the initial state of the plain loop."""
    params = jax.device_put(init_mlp(_SIZES))
    return params, _OPTIMIZER.init(params)


def plain_loop(state: Any, batches: list[Any]) -> Any:
    """Call the step once per batch, as in most training loops."""
    loss = None
    for batch in batches:
        state, loss = step(state, batch)
    return state, loss


def measure(updates: int, per_execution: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of both loops and of their scans on the device."""
    stream = build_mlp_stream(_MICRO_BATCH, _SIZES[0], _SIZES[-1])
    batches = [stream.batch(position) for position in range(updates)]
    plan = mr.Plan(micro_batch_size=_MICRO_BATCH, updates_per_execution=per_execution)
    program = mr.training_program(mlp_loss, _OPTIMIZER, plan)
    whole = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    half = jax.tree.map(lambda x: x[: updates // 2], whole)
    long, short = jax.device_put((whole, half), program.chunk_sharding)

    def state() -> mr.TrainState:
        return program.init(init_mlp(_SIZES))

    def trained() -> float:
        # Open a new infeed, so that no round starts with chunks staged before.
        with mr.Infeed(itertools.cycle(batches)) as infeed:
            train = functools.partial(mr.train, infeed=infeed, updates=updates)
            return time_call(train, program, state())

    program.compile(state(), long)
    program.compile(state(), short)
    variants = {
        "plain": lambda: time_call(plain_loop, plain_state(), batches),
        "millrace": trained,
        "plain long": lambda: time_call(scanned, plain_state(), long),
        "plain short": lambda: time_call(scanned, plain_state(), short),
        "millrace long": lambda: time_call(program.run, state(), long),
        "millrace short": lambda: time_call(program.run, state(), short),
    }
    return interleave(variants, rounds)


def summarize(measured: dict[str, list[float]], loop: str, updates: int) -> dict[str, Any]:
    """Return the times per update of a loop, the time of the device, and the difference."""
    long, short = (statistics.median(measured[f"{loop} {x}"]) for x in ("long", "short"))
    device = (long - short) / (updates - updates // 2)
    times = [value / updates for value in measured[loop]]
    median = statistics.median(times)
    # Do not report less than the noise: the ratio would be meaningless.
    noise = statistics.median(abs(value - median) for value in times)
    overhead = max(noise, median - device)
    return {"seconds": times, "device": device, "overhead": overhead}


def main() -> None:
    """Measure and report."""
    parser = build_parser(__doc__)
    parser.add_argument("--updates", type=int, default=20_000, help="per round")
    parser.add_argument("--updates-per-execution", type=int, default=1_000)
    args = parser.parse_args()
    measured = measure(args.updates, args.updates_per_execution, args.rounds)
    loops = {x: summarize(measured, x, args.updates) for x in ("plain", "millrace")}
    plain, ours = (1e6 * loops[name]["overhead"] for name in loops)
    rows = [
        {
            "loop": name,
            "µs per update": format_spread(loop["seconds"], 1e6),
            "device µs": f"{1e6 * loop['device']:.2f}",
            "overhead µs": f"{1e6 * loop['overhead']:.2f}",
        }
        for name, loop in loops.items()
    ]
    result = Result(
        name="loop_overhead",
        table=rows,
        ratio_name="overhead of the plain loop / overhead of millrace",
        ratio=plain / ours,
        target=10,
        explanation=(
            f"The plain loop spends {plain:.0f} µs per update on handling arguments, "
            "copying the batch and launching; millrace launches once per "
            f"{args.updates_per_execution} updates. The remaining {ours:.1f} µs are the "
            "first chunk of a run, and the infeed thread if gathering batches takes longer "
            "than the updates or competes with them for cores."
        ),
        numbers={"loops": loops, "seconds": measured},
    )
    publish(result, args)


if __name__ == "__main__":
    main()
