"""What processes cost: one to four of them, at fixed work in each, and their start.

``millrace cnn train`` with synthetic pictures on the device, one replica in a process, each
process bound to one core: 1, 2 and 4 processes under ``millrace launch``, and one process
with two virtual devices on both cores. Every update exchanges its gradients. Besides, two
processes that know nothing of one another run at the same time: what they lose is the
cores' (a virtual core is often half of a real one), not the exchange's. The link between
processes is measured by itself, with all-reduces of two sizes, and what docs/scaling.md
predicts from these is put beside what was found.

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
"""Updates between two reports."""
_PINNED = 'exec taskset -c $((${MILLRACE_PROCESS_ID:-FIRST} % CORES)) "$@"'
_APART = "2 apart, no exchange"


def measure_link() -> None:
    """In a launched process: time all-reduces of a small and a large array."""
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
    found = {}
    for size in (_SMALL, _LARGE):
        summed = jax.shard_map(
            lambda x: lax.psum(x, REPLICA_AXIS) / jax.device_count(),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        program = jax.jit(summed)
        array = put_on_devices(jnp.ones(size // 4), replicated(mesh))
        array = jax.block_until_ready(program(array))
        times = []
        for _ in range(40):
            began = time.perf_counter()
            array = jax.block_until_ready(program(array))
            times.append(time.perf_counter() - began)
        found[size] = min(times)
    if coordination.is_first():
        print("LINK", json.dumps(found))


def link_seconds(processes: int) -> dict[int, float]:
    """Return what all-reduces of the two sizes take in so many processes."""
    command = [sys.executable, __file__, "--measure-link"]
    said = subprocess.run(
        [*_launch(processes), *_pinned(command)],
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (line,) = re.findall(r"LINK (.*)", said)
    return {int(size): seconds for size, seconds in json.loads(line).items()}


def train_apart(sizes: dict[str, int]) -> dict[str, float]:
    """Run the command twice at once, each on a core of its own; return the means."""
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda core: train(1, 1, sizes, core), range(2)))
    return {name: statistics.fmean(run[name] for run in both) for name in both[0]}


def train(
    processes: int, devices: int, sizes: dict[str, int], first_core: int = 0
) -> dict[str, float]:
    """Run the command once; return seconds per update and until training started."""
    replicas = max(processes, devices)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        words = [sys.executable, "-m", "millrace", "cnn", "train", "--model", _MODEL]
        words += ["--dataset", "cifar10", "--synthetic-data", "device", "--num-epochs", "1"]
        words += ["--micro-batch-size", str(sizes["micro_batch"]), "--checkpoints", "False"]
        words += ["--weight-updates-per-epoch", str(sizes["updates"]), "--logs-per-epoch"]
        words += [str(sizes["updates"] // _WINDOW), "--num-replicas", str(replicas)]
        words += ["--run-dir", str(directory)]
        if devices > 1:
            words += ["--virtual-devices", str(devices)]
        else:
            words = [*_launch(processes), *_pinned(words, first_core)]
        began = time.perf_counter()
        started = _wait_for_training(words, began)
        lines = (directory / "metrics.jsonl").read_text().splitlines()
    return {"update": _undisturbed([json.loads(x) for x in lines]), "start": started}


def _undisturbed(events: list[dict[str, float]]) -> float:
    """Return the seconds per update that a quarter of the stretches between reports beat.

    Others use this machine as well: what they take is not the processes' to pay for.
    """
    pairs = list(itertools.pairwise(events))[1:]  # the first fills queues
    times = [(b["time"] - a["time"]) / (b["update"] - a["update"]) for a, b in pairs]
    return statistics.quantiles(times, n=4)[0]


def _wait_for_training(words: list[str], began: float) -> float:
    process = subprocess.Popen(
        words,
        env=_environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    started, said = 0.0, []
    for line in process.stderr:
        said.append(line)
        if "training …" in line and not started:
            started = time.perf_counter() - began
    if process.wait() != 0:
        raise RuntimeError("".join(said))
    return started


def _launch(processes: int) -> list[str]:
    return [sys.executable, "-m", "millrace", "launch", "-n", str(processes), "--"]


def _pinned(words: list[str], first_core: int = 0) -> list[str]:
    cores = str(len(os.sched_getaffinity(0)))
    script = _PINNED.replace("CORES", cores).replace("FIRST", str(first_core))
    return ["sh", "-c", script, "sh", *words]


def _environment() -> dict[str, str]:
    chosen = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in chosen}
    return kept | {"JAX_PLATFORMS": "cpu"}


def gradient_bytes() -> int:
    """Count the bytes that an update exchanges."""
    import numpy as np

    from millrace.apps.cnn.models.catalog import build_layers
    from millrace.nn.layers import init_shapes, num_parameters

    model = build_layers(_MODEL, num_classes=10)
    return 4 * num_parameters(init_shapes(model, np.zeros((1, 32, 32, 3), np.float32))[0])


def fitted_link(seconds: dict[int, float]) -> Any:
    """Work out latency and speed from two all-reduces between two processes."""
    from millrace.schedule.simulate import Link

    # Two steps, each with half of the bytes.
    speed = (_LARGE - _SMALL) / (seconds[_LARGE] - seconds[_SMALL])
    latency = max(0.0, (seconds[_SMALL] - _SMALL / speed) / 2)
    return Link(bytes_per_second=speed, latency_seconds=latency)


def report(
    found: dict[str, list[dict[str, float]]], link: Any, args: argparse.Namespace
) -> None:
    """Put what was found beside what was to be expected."""
    from reporting import Result, paired_ratio, publish, spread
    from scaling import shared_cores_seconds

    updates = {name: [run["update"] for run in runs] for name, runs in found.items()}
    starts = {name: [run["start"] for run in runs] for name, runs in found.items()}
    cores, size = len(os.sched_getaffinity(0)), gradient_bytes()
    busy = statistics.median(updates[_APART])
    table = []
    for name, values in updates.items():
        count = int(name.split()[0]) if name.endswith("processes") else 0
        predicted = shared_cores_seconds(busy, count, cores, size, link) if count else 0.0
        images = (count or (1 if name == "1 process" else 2)) * args.micro_batch
        table.append(
            {
                "variant": name,
                "ms per update": spread(values, 1e3, 1),
                "predicted": f"{1e3 * predicted:.1f}" if count else "",
                "images per s": f"{images / statistics.median(values):,.0f}",
                "start-up s": spread(starts[name], 1, 1),
            }
        )
    one_process, two = updates["1 process, 2 devices"], updates["2 processes"]
    efficiency = paired_ratio(updates["1 process"], two)
    exchange = paired_ratio(updates[_APART], two)
    result = Result(
        name="launch_scaling",
        table=table,
        ratio_name="speed of two processes / of one process with two virtual devices",
        ratio=paired_ratio(one_process, two),
        target=0.8,
        explanation=(
            f"{_MODEL}, micro-batch {args.micro_batch}, one update of {size / 1e3:,.0f} kB "
            "of gradients after the other; every launched process bound to one of "
            f"{cores} cores. From one to two processes at fixed work in each, "
            f"{efficiency:.0%} of the speed of each is kept; of what two processes that "
            f"exchange nothing keep, {exchange:.0%}. The link between two "
            f"processes: {link.bytes_per_second / 1e9:.2f} GB/s after "
            f"{1e6 * link.latency_seconds:.0f} us. Start-up is from the command to the "
            "first update, compilation included. Of each run's stretches of five updates "
            "a quarter were faster than the time that counts: other work comes and goes."
        ),
        numbers={"seconds_per_update": updates, "start_up_seconds": starts},
    )
    publish(result, args)


def main() -> None:
    """Measure and report."""
    if "--measure-link" in sys.argv:
        return measure_link()
    from reporting import add_sizes, parser

    options = parser(__doc__, rounds=3)
    add_sizes(options, {"micro_batch": 32, "updates": 100})
    args = options.parse_args()
    sizes = {"micro_batch": args.micro_batch, "updates": args.updates}
    variants = {
        "1 process": (1, 1),
        "2 processes": (2, 1),
        "1 process, 2 devices": (1, 2),
        "4 processes": (4, 1),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in [*variants, _APART]}
    for _ in range(args.rounds):
        for name, (processes, devices) in variants.items():
            found[name].append(train(processes, devices, sizes))
        found[_APART].append(train_apart(sizes))
    report(found, fitted_link(link_seconds(2)), args)


if __name__ == "__main__":
    main()
