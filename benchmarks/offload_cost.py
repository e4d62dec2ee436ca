"""Memory saved and time added by offloading the optimizer state of Adam.

The model is `layers` square matrices, so that the state dominates its memory. Each mode
runs in its own process, because a device reports the peak of the whole process, including
``init``. The additional time gives the link rate: an update moves the state in and out.

Target: the peak memory of the device falls by at least 80 % of the size of the state.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import optax
from harness import (
    Result,
    build_parser,
    format_spread,
    init_mlp,
    mlp_loss,
    on_gpu,
    publish,
)

import millrace as mr

_CPU = {"layers": 6, "width": 1024, "micro_batch": 32, "calls": 5}
_GPU = {"layers": 16, "width": 4096, "micro_batch": 256, "calls": 5}
_MODES = ("resident", "offloaded")
_PEAK_ACCUMULATION, _TIMED_ACCUMULATIONS = 2, (1, 4, 16)
_UPDATES_PER_CALL = 4


def measure(mode: str, accumulation: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Train; return seconds per update, and bytes of the state and of the peak."""
    plan = mr.Plan(
        micro_batch_size=sizes["micro_batch"],
        gradient_accumulation_count=accumulation,
        optimizer_state_offloading=mode == "offloaded",
    )
    program = mr.training_program(mlp_loss, optax.adam(1e-4), plan)
    state = program.init(init_mlp([sizes["width"]] * (sizes["layers"] + 1)))
    shape = (_UPDATES_PER_CALL * accumulation, sizes["micro_batch"], sizes["width"])
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    chunk = jax.device_put({"x": values, "y": values}, program.chunk_sharding)
    seconds = []
    for _ in range(sizes["calls"] + 1):  # the first call compiles
        started = time.perf_counter()
        state, _ = jax.block_until_ready(program.run(state, chunk))
        seconds.append((time.perf_counter() - started) / _UPDATES_PER_CALL)
    stats = program.devices[0].memory_stats() or {}
    return {
        "seconds": seconds[1:],
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state.optimizer_state)),
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def measure_mode(mode: str, given: dict[str, int | None]) -> None:
    """Measure one mode in this process and print the figures as JSON."""
    defaults = _GPU if on_gpu() else _CPU
    sizes = {name: given[name] or value for name, value in defaults.items()}
    first = measure(mode, _PEAK_ACCUMULATION, sizes)  # before the others raise the peak
    timed = {n: measure(mode, n, sizes)["seconds"] for n in _TIMED_ACCUMULATIONS}
    print(json.dumps({**first, "sizes": sizes, "seconds": timed}))


def run_mode(mode: str, given: dict[str, int | None]) -> dict[str, Any]:
    """Run ``measure_mode`` in a process that allocates device memory on demand."""
    command = [sys.executable, __file__, "--child", json.dumps([mode, given])]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def describe(processes: dict[str, list[dict]]) -> tuple[list[dict], float | None, str]:
    """Return the table, the fall of the peak relative to the state, and an explanation."""
    state = processes["resident"][0]["state_bytes"]
    peaks = {mode: processes[mode][0]["peak_bytes"] for mode in _MODES}
    rows, median = [], {}
    for mode in _MODES:
        peak = "n/a" if peaks[mode] is None else f"{peaks[mode] / 2**20:,.0f}"
        row = {"state of Adam": mode, "peak MiB": peak}
        for count in map(str, _TIMED_ACCUMULATIONS):
            times = [t for process in processes[mode] for t in process["seconds"][count]]
            median[mode, count] = statistics.median(times)
            row[f"ms, accumulation {count}"] = format_spread(times, 1e3, 1)
        rows.append(row)
    extra = {
        count: median["offloaded", count] - median["resident", count] for _, count in median
    }
    rates = {n: 2e-9 * state / s for n, s in extra.items() if s > 0}
    links = ", ".join(f"{rate:.1f} GB/s at accumulation {n}" for n, rate in rates.items())
    text = (
        f"The state has {state / 2**20:,.0f} MiB. Moving it in and out adds "
        f"{1e3 * extra['1']:.1f} ms per update, a link rate of {links}."
    )
    if None in peaks.values():
        return (
            rows,
            None,
            f"A CPU has no separate memory, so only the time is shown. {text}",
        )
    return rows, (peaks["resident"] - peaks["offloaded"]) / state, text


def main() -> None:
    """Measure both modes in turn and report."""
    parser = build_parser(__doc__, rounds=2)
    parser.add_argument("--child", type=json.loads, help="(used by this script)")
    for name in _GPU:
        help_ = f"(default: {_CPU[name]}, on a GPU {_GPU[name]})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=help_)
    args = parser.parse_args()
    if args.child:
        return measure_mode(*args.child)
    given = {name: getattr(args, name) for name in _GPU}
    processes: dict[str, list[dict]] = {mode: [] for mode in _MODES}
    for _ in range(args.rounds):
        for mode in _MODES:
            processes[mode].append(run_mode(mode, given))
    rows, fall, text = describe(processes)
    result = Result(
        name="offload_cost",
        table=rows,
        ratio_name="fall of the device peak / size of the state",
        ratio=fall,
        target=0.8,
        explanation=text,
        numbers={"processes": processes},
    )
    publish(result, args)


if __name__ == "__main__":
    main()
