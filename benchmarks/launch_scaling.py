"""Weak scaling over one to four processes, and their start-up time.

``millrace cnn train`` runs with synthetic images on the device: as 1, 2 and 4 processes
under ``millrace launch``, each with one replica and pinned to one core, and as one process
with two virtual devices on both cores. Every update exchanges its gradients. Two
independent processes run at the same time, too: what they lose is due to the cores (a
virtual core is often half a physical one), not to the exchange. The link between processes
is measured on its own with all-reduces of two sizes, which gives the prediction of
docs/scaling.md.

Target: two processes are at least 0.8 times as fast as one process with two devices.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_SMALL, _LARGE = 1 << 10, 4 << 20
_MODEL = "cifar_resnet8"
_WINDOW = 5
"""Updates between two log events."""
_PINNED = 'exec taskset -c $((${MILLRACE_PROCESS_ID:-FIRST} % CORES)) "$@"'
_INDEPENDENT = "2 independent"


def measure_link() -> None:
    """In a launched process, time all-reduces of a small and a large array."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec

    from millrace.distributed import coordination
    from millrace.distributed.environment import find_process_info
    from millrace.program.replicas import (
        REPLICA_AXIS,
        put_on_devices,
        replica_mesh,
        replicated,
    )

    coordination.join(find_process_info())
    mesh = replica_mesh(jax.device_count())
    seconds = {}
    for size in (_SMALL, _LARGE):
        all_reduce = jax.shard_map(
            lambda x: lax.psum(x, REPLICA_AXIS) / jax.device_count(),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        program = jax.jit(all_reduce)
        array = put_on_devices(jnp.ones(size // 4), replicated(mesh))
        array = jax.block_until_ready(program(array))
        times = []
        for _ in range(40):
            started = time.perf_counter()
            array = jax.block_until_ready(program(array))
            times.append(time.perf_counter() - started)
        seconds[size] = min(times)
    if coordination.is_first():
        print("LINK", json.dumps(seconds))


def run_measure_link(processes: int) -> dict[int, float]:
    """Return the seconds of all-reduces of the two sizes over this many processes."""
    command = [sys.executable, __file__, "--measure-link"]
    output = subprocess.run(
        [*_launch(processes), *_pinned(command)],
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (line,) = re.findall(r"LINK (.*)", output)
    return {int(size): seconds for size, seconds in json.loads(line).items()}


def train_independently(sizes: dict[str, int]) -> dict[str, float]:
    """Run the command twice at the same time on different cores; return the means."""
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda core: train(1, 1, sizes, core), range(2)))
    return {name: statistics.fmean(run[name] for run in both) for name in both[0]}


def train(
    processes: int, devices: int, sizes: dict[str, int], first_core: int = 0
) -> dict[str, float]:
    """Run the command; return seconds per update and seconds until training starts."""
    replicas = max(processes, devices)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        command = [sys.executable, "-m", "millrace", "cnn", "train", "--model", _MODEL]
        command += [
            "--dataset",
            "cifar10",
            "--synthetic-data",
            "device",
            "--num-epochs",
            "1",
        ]
        command += [
            "--micro-batch-size",
            str(sizes["micro_batch"]),
            "--checkpoints",
            "False",
        ]
        command += ["--weight-updates-per-epoch", str(sizes["updates"]), "--logs-per-epoch"]
        command += [str(sizes["updates"] // _WINDOW), "--num-replicas", str(replicas)]
        command += ["--run-dir", str(directory)]
        if devices > 1:
            command += ["--virtual-devices", str(devices)]
        else:
            command = [*_launch(processes), *_pinned(command, first_core)]
        start_up = _wait_for_training(command)
        lines = (directory / "metrics.jsonl").read_text().splitlines()
    return {"update": _lower_quartile([json.loads(x) for x in lines]), "start": start_up}


def _lower_quartile(events: list[dict[str, float]]) -> float:
    """Return the lower quartile of the seconds per update between log events.

    The machine is shared, and other load only adds time.
    """
    pairs = list(itertools.pairwise(events))[1:]  # the first one fills queues
    times = [(b["time"] - a["time"]) / (b["update"] - a["update"]) for a, b in pairs]
    return statistics.quantiles(times, n=4)[0]


def _wait_for_training(command: list[str]) -> float:
    """Run a command to its end; return the seconds until it starts to train."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=_environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    start_up, lines = 0.0, []
    for line in process.stderr:
        lines.append(line)
        if "training …" in line and not start_up:
            start_up = time.perf_counter() - started
    if process.wait() != 0:
        raise RuntimeError("".join(lines))
    return start_up


def _launch(processes: int) -> list[str]:
    return [sys.executable, "-m", "millrace", "launch", "-n", str(processes), "--"]


def _pinned(command: list[str], first_core: int = 0) -> list[str]:
    cores = str(len(os.sched_getaffinity(0)))
    script = _PINNED.replace("CORES", cores).replace("FIRST", str(first_core))
    return ["sh", "-c", script, "sh", *command]


def _environment() -> dict[str, str]:
    removed = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return kept | {"JAX_PLATFORMS": "cpu"}


def count_gradient_bytes() -> int:
    """Return the bytes that an update exchanges."""
    import numpy as np

    from millrace.apps.cnn.models.catalog import build_layers
    from millrace.nn.layers import init_shapes, num_parameters

    model = build_layers(_MODEL, num_classes=10)
    return 4 * num_parameters(init_shapes(model, np.zeros((1, 32, 32, 3), np.float32))[0])


def fit_link(seconds: dict[int, float]) -> Any:
    """Compute latency and bandwidth from two all-reduces between two processes."""
    from millrace.schedule.simulate import Link

    # A ring of two takes two steps, each with half of the bytes.
    speed = (_LARGE - _SMALL) / (seconds[_LARGE] - seconds[_SMALL])
    latency = max(0.0, (seconds[_SMALL] - _SMALL / speed) / 2)
    return Link(bytes_per_second=speed, latency_seconds=latency)


def report(
    runs: dict[str, list[dict[str, float]]], link: Any, args: argparse.Namespace
) -> None:
    """Report measured and predicted times."""
    from harness import Result, format_spread, paired_ratio, publish
    from scaling import shared_cores_seconds

    updates = {name: [run["update"] for run in each] for name, each in runs.items()}
    starts = {name: [run["start"] for run in each] for name, each in runs.items()}
    cores, size = len(os.sched_getaffinity(0)), count_gradient_bytes()
    busy = statistics.median(updates[_INDEPENDENT])
    table = []
    for name, values in updates.items():
        count = int(name.split()[0]) if name.endswith("processes") else 0
        predicted = shared_cores_seconds(busy, count, cores, size, link) if count else 0.0
        images = (count or (1 if name == "1 process" else 2)) * args.micro_batch
        table.append(
            {
                "variant": name,
                "ms per update": format_spread(values, 1e3, 1),
                "predicted": f"{1e3 * predicted:.1f}" if count else "",
                "images per s": f"{images / statistics.median(values):,.0f}",
                "start-up s": format_spread(starts[name], 1, 1),
            }
        )
    one_process, two = updates["1 process, 2 devices"], updates["2 processes"]
    efficiency = paired_ratio(updates["1 process"], two)
    exchange = paired_ratio(updates[_INDEPENDENT], two)
    result = Result(
        name="launch_scaling",
        table=table,
        ratio_name="speed of two processes / of one process with two virtual devices",
        ratio=paired_ratio(one_process, two),
        target=0.8,
        explanation=(
            f"{_MODEL}, micro-batch {args.micro_batch}, {size / 1e3:,.0f} kB of gradients "
            f"per update; every launched process is pinned to one of {cores} cores. Each "
            f"of two processes has {efficiency:.0%} of the speed of a single process, and "
            f"{exchange:.0%} of the speed of two independent ones. The link between two "
            f"processes has {link.bytes_per_second / 1e9:.2f} GB/s and a latency of "
            f"{1e6 * link.latency_seconds:.0f} us. Start-up is from the command to the "
            f"first update, with compilation. The time of a run is the lower quartile over "
            f"intervals of {_WINDOW} updates, because other load on the machine varies."
        ),
        numbers={"seconds_per_update": updates, "start_up_seconds": starts},
    )
    publish(result, args)


def main() -> None:
    """Measure and report."""
    if "--measure-link" in sys.argv:
        return measure_link()
    from harness import add_sizes, build_parser

    parser = build_parser(__doc__, rounds=3)
    add_sizes(parser, {"micro_batch": 32, "updates": 100})
    args = parser.parse_args()
    sizes = {"micro_batch": args.micro_batch, "updates": args.updates}
    variants = {
        "1 process": (1, 1),
        "2 processes": (2, 1),
        "1 process, 2 devices": (1, 2),
        "4 processes": (4, 1),
    }
    runs: dict[str, list[dict[str, float]]] = {
        name: [] for name in [*variants, _INDEPENDENT]
    }
    for _ in range(args.rounds):
        for name, (processes, devices) in variants.items():
            runs[name].append(train(processes, devices, sizes))
        runs[_INDEPENDENT].append(train_independently(sizes))
    report(runs, fit_link(run_measure_link(2)), args)


if __name__ == "__main__":
    main()
