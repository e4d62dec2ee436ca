"""Host overhead per weight update: many updates per execution against one per call.

A small MLP whose update takes the device microseconds is trained by a plain JAX loop
(a jitted step, a NumPy batch in, the state donated) and by ``mr.train``, which stages
batches in chunks and makes many updates per execution. The overhead is the time per
update less the device's own: the slope of a long ``lax.scan`` of the same update over
batches that are already there.

Target: millrace's overhead is at least 10 times lower.
"""

import functools
import itertools
import statistics
from typing import Any

import jax
import numpy as np
import optax
import reporting
from reporting import init_mlp, mlp_loss, seconds

import millrace as mr

_SIZES = (8, 16, 4)
_MICRO_BATCH = 8
_OPTIMISER = optax.adam(1e-3)


@functools.partial(jax.jit, donate_argnums=0)
def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    """One update, as a plain JAX program would write it."""

    def loss_fn(params: Any) -> jax.Array:
        return mlp_loss(params, None, batch, None)[0]

    params, optimizer_state = state
    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, optimizer_state = _OPTIMISER.update(gradients, optimizer_state, params)
    return (optax.apply_updates(params, updates), optimizer_state), loss


@functools.partial(jax.jit, donate_argnums=0)
def scanned(state: Any, chunk: Any) -> tuple[Any, jax.Array]:
    """Many such updates over batches that are on the device."""
    return jax.lax.scan(step, state, chunk)


def plain_state() -> Any:
    """Start the plain loop."""
    params = jax.device_put(init_mlp(_SIZES))
    return params, _OPTIMISER.init(params)


def plain_loop(state: Any, batches: list[Any]) -> Any:
    """Call the step once per batch, as training loops are usually written."""
    loss = None
    for batch in batches:
        state, loss = step(state, batch)
    return state, loss


def measure(updates: int, per_execution: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds per update of both loops, and per scan on the device."""
    stream = reporting.mlp_stream(_MICRO_BATCH, _SIZES[0], _SIZES[-1])
    batches = [stream.batch(position) for position in range(updates)]
    plan = mr.Plan(micro_batch_size=_MICRO_BATCH, updates_per_execution=per_execution)
    program = mr.training_program(mlp_loss, _OPTIMISER, plan)
    whole = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    half = jax.tree.map(lambda x: x[: updates // 2], whole)
    long, short = jax.device_put((whole, half), program.chunk_sharding)

    def state() -> mr.TrainState:
        return program.init(init_mlp(_SIZES))

    def trained() -> float:
        # A new infeed each time: no round starts with chunks it has not paid for.
        with mr.Infeed(itertools.cycle(batches)) as infeed:
            train = functools.partial(mr.train, infeed=infeed, updates=updates)
            return seconds(train, program, state())

    program.compile(state(), long)
    program.compile(state(), short)
    variants = {
        "plain": lambda: seconds(plain_loop, plain_state(), batches),
        "millrace": trained,
        "plain long": lambda: seconds(scanned, plain_state(), long),
        "plain short": lambda: seconds(scanned, plain_state(), short),
        "millrace long": lambda: seconds(program.run, state(), long),
        "millrace short": lambda: seconds(program.run, state(), short),
    }
    return reporting.interleave(variants, rounds)


def summarize(measured: dict[str, list[float]], loop: str, updates: int) -> dict[str, Any]:
    """Return a loop's times per update, the device's own, and the difference."""
    long, short = (statistics.median(measured[f"{loop} {x}"]) for x in ("long", "short"))
    device = (long - short) / (updates - updates // 2)
    times = [value / updates for value in measured[loop]]
    median = statistics.median(times)
    # An overhead below the noise is called the noise, lest the ratio be made of it.
    noise = statistics.median(abs(value - median) for value in times)
    overhead = max(noise, median - device)
    return {"seconds": times, "device": device, "overhead": overhead}


def main() -> None:
    """Measure and report."""
    options = reporting.parser(__doc__)
    options.add_argument("--updates", type=int, default=20_000, help="per round")
    options.add_argument("--updates-per-execution", type=int, default=1_000)
    args = options.parse_args()
    measured = measure(args.updates, args.updates_per_execution, args.rounds)
    loops = {x: summarize(measured, x, args.updates) for x in ("plain", "millrace")}
    plain, ours = (1e6 * loops[name]["overhead"] for name in loops)
    rows = [
        {
            "loop": name,
            "µs per update": reporting.spread(loop["seconds"], 1e6),
            "device's own µs": f"{1e6 * loop['device']:.2f}",
            "overhead µs": f"{1e6 * loop['overhead']:.2f}",
        }
        for name, loop in loops.items()
    ]
    result = reporting.Result(
        name="loop_overhead",
        table=rows,
        ratio_name="overhead of the plain loop / overhead of millrace",
        ratio=plain / ours,
        target=10,
        explanation=(
            f"The plain loop spends {plain:.0f} µs per update on handling arguments, "
            "copying the batch and launching; millrace launches once per "
            f"{args.updates_per_execution} updates. The {ours:.1f} µs that are left are "
            "the first chunk of a run, and the infeed's thread gathering batches where "
            "that takes longer than the updates do or takes a core from them."
        ),
        numbers={"loops": loops, "seconds": measured},
    )
    reporting.publish(result, args)


if __name__ == "__main__":
    main()
