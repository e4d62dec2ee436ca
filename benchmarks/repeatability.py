"""Repeatability of runs on the command line, and its cost.

Cost is the speed of each application with --deterministic relative to that without.
Repeatability means that two runs with the same seed, and runs that were killed with SIGKILL
at a random moment and resumed, end with the same metrics and with the same bits in every
array of the last checkpoint.

    python benchmarks/repeatability.py --report --kills 10 --parallel 10
"""

import concurrent.futures
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Result, build_parser, on_gpu, publish

from millrace.bench.reporting import format_table

# Leave the device memory to the processes that this one starts.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

_SPEED = {
    "ResNet-50, batch 256, 16.32": "cnn train --model resnet --model-size 50 --dataset "
    "imagenet --synthetic-data --batch-size 256 --precision 16.32 --batch-norm "
    "--optimizer momentum --weight-updates-per-epoch 60 --num-epochs 3 --checkpoints False",
    "autoencoder, size 128, batch 64": "autoencoder train --data random --no-validation "
    "--epochs 6",
    "VCD, batch 100": "vcd train {vcd_data} --num-epochs {vcd_epochs} --no-testing "
    "--checkpoints False --pictures False",
}
_REPEATED = {
    "cnn": "cnn train --model cifar_resnet8 --dataset digits --micro-batch-size 32 "
    "--precision 16.32 --num-epochs {epochs}",
    "autoencoder": "autoencoder train --data generated --num-users 1024 --num-items 300 "
    "--epochs {epochs}",
    "vcd": "vcd train --dataset digits --num-epochs {vcd_epochs} --ckpts-per-epoch 0.1 "
    "--no-testing --pictures False",
}
_TIMINGS = ("time", "samples_per_second")


def start(command: str, run: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start a millrace command in a new process that allocates memory on demand."""
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # Do not share compiled programs or kernel timings between runs.
        "XDG_CACHE_HOME": str(run.parent / f"cache-{random.randrange(10**9)}"),
    }
    words = [sys.executable, "-m", "millrace", *command.split(), "--run-dir", str(run)]
    return subprocess.Popen([*words, "--quiet", *more], env=environment)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process; raise an error if it failed."""
    if process.wait():
        raise RuntimeError(f"{process.args} ended with {process.returncode}")


def measure_speed(command: str, folder: Path, *more: str) -> float:
    """Run a command and return its samples per second."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    finish(start(command, run, *more))
    return json.loads((run / "summary.json").read_text())["samples_per_second"]


def read_outcome(run: Path) -> tuple[Any, Any]:
    """Return the arrays of the last checkpoint of a run, and its metrics without times."""
    import jax
    import orbax.checkpoint

    newest = sorted((run / "checkpoints").glob("update-*[0-9]"))[-1]
    state = orbax.checkpoint.PyTreeCheckpointer().restore(newest / "state")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    events = [
        {name: value for name, value in json.loads(line).items() if name not in _TIMINGS}
        for line in lines
    ]
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], events


def last_update(run: Path) -> int:
    """Return the last logged update of a run; 0 before the first."""
    if not (run / "metrics.jsonl").exists():
        return 0
    updates = re.findall(r'"update": (\d+)', (run / "metrics.jsonl").read_text())
    return int(updates[-1]) if updates else 0


def kill_and_resume(command: str, run: Path, total: int) -> int:
    """Kill a run at a random update and resume it; return the last update before."""
    target = random.randrange(total)
    process = start(command, run, "--deterministic")
    while process.poll() is None and last_update(run) < target:
        time.sleep(0.01)
    process.kill()
    process.wait()
    reached = last_update(run)
    if not (run / "summary.json").exists():
        resume = ["--resume"] if (run / "config.yml").exists() else []
        finish(start(command, run, "--deterministic", *resume))
    return reached


def compare_runs(name: str, command: str, args: Any, folder: Path) -> dict[str, str]:
    """Compare a run with a repetition, and with killed and resumed ones."""
    pool = concurrent.futures.ThreadPoolExecutor(args.parallel)
    runs = [folder / f"{name}-{number}" for number in range(2)]
    processes = [start(command, run, "--deterministic") for run in runs]
    for process in processes:
        finish(process)
    first, second = map(read_outcome, runs)
    total = last_update(runs[0])
    killed = [folder / f"{name}-killed-{number}" for number in range(args.kills)]
    kills = [pool.submit(kill_and_resume, command, run, total) for run in killed]
    after = [kill.result() for kill in kills]
    same = sum(read_outcome(run) == first for run in killed)
    row = {
        "application": name,
        "the same seed twice": "identical" if first == second else "DIFFERENT",
        f"of {args.kills} killed and resumed, identical": str(same),
        "killed after update": f"{', '.join(map(str, sorted(after)))} of {total}",
    }
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Measure and report."""
    parser = build_parser(__doc__, rounds=1)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--parallel", type=int, default=2, help="killed runs at a time")
    parser.add_argument("--mnist", type=Path, help="folder of MNIST, for the speed of VCD")
    parser.add_argument("--only", choices=("cost", "kills"))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    data = f"--dataset mnist --dataset-path {args.mnist}" if args.mnist else ""
    speeds: dict[str, tuple[float, float]] = {}
    for name, template in _SPEED.items() if args.only != "kills" else ():
        command = template.format(
            vcd_data=data or "--dataset digits", vcd_epochs=16 if data else 500
        )
        usual = measure_speed(command, folder)
        speeds[name] = usual, measure_speed(command, folder, "--deterministic")
        print(name, speeds[name], file=sys.stderr, flush=True)
    with concurrent.futures.ThreadPoolExecutor(len(_REPEATED)) as pool:
        epochs = {"epochs": 20, "vcd_epochs": 150} if on_gpu() else {}
        epochs = epochs or {"epochs": 6, "vcd_epochs": 20}
        kinds = _REPEATED.items() if args.only != "cost" else ()
        rows = [
            pool.submit(compare_runs, name, command.format(**epochs), args, folder)
            for name, command in kinds
        ]
        kills = [row.result() for row in rows]
    table = [
        {
            "training": name,
            "samples/s": f"{usual:,.0f}",
            "with --deterministic": f"{repeated:,.0f}",
            "ratio": f"{repeated / usual:.3f}",
        }
        for name, (usual, repeated) in speeds.items()
    ]
    explanation = "\n".join(
        [
            "Deterministic programs sum in a fixed order, and XLA takes the first kernel "
            "that works instead of timing several. Small matrix products lose the most.",
            "",
            *(format_table(kills) if kills else ()),
        ]
    )
    publish(
        Result(
            name="repeatability",
            table=table or kills,
            ratio_name="lowest speed with --deterministic / without",
            ratio=min((b / a for a, b in speeds.values()), default=None),
            target=0.95,  # enough to make it the default
            explanation=explanation,
            numbers={"speeds": speeds, "kills": kills},
        ),
        args,
    )


if __name__ == "__main__":
    main()
