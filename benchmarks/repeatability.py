"""Whether runs repeat themselves, and what that costs, through the command line.

Cost: each application's speed with and without --deterministic. Repeatability: the same
seed twice, and runs that are killed with SIGKILL at a random moment and resumed, must end
with the same bits in every array of the last checkpoint and the same metrics.

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
import reporting

# This process only compares: the memory is for those it starts.
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
_CLOCK = ("time", "samples_per_second")


def start(words: str, run: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start a command in a process of its own, with memory on demand."""
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # Neither compiled programs nor timings of kernels come from another run.
        "XDG_CACHE_HOME": str(run.parent / f"cache-{random.randrange(10**9)}"),
    }
    command = [sys.executable, "-m", "millrace", *words.split(), "--run-dir", str(run)]
    return subprocess.Popen([*command, "--quiet", *more], env=environment)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command that must succeed."""
    if process.wait():
        raise RuntimeError(f"{process.args} ended with {process.returncode}")


def samples_per_second(words: str, folder: Path, *more: str) -> float:
    """Run a command and return its speed, without its first execution."""
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    finish(start(words, run, *more))
    return json.loads((run / "summary.json").read_text())["samples_per_second"]


def result(run: Path) -> tuple[Any, Any]:
    """Return what a run came to: all arrays of its last checkpoint, and its metrics."""
    import jax
    import orbax.checkpoint

    newest = sorted((run / "checkpoints").glob("update-*[0-9]"))[-1]
    state = orbax.checkpoint.PyTreeCheckpointer().restore(newest / "state")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    events = [
        {name: value for name, value in json.loads(line).items() if name not in _CLOCK}
        for line in lines
    ]
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], events


def last_update(run: Path) -> int:
    """Return the last update that a run has reported; 0 before the first."""
    if not (run / "metrics.jsonl").exists():
        return 0
    updates = re.findall(r'"update": (\d+)', (run / "metrics.jsonl").read_text())
    return int(updates[-1]) if updates else 0


def kill_and_resume(words: str, run: Path, total: int) -> int:
    """Kill a run at a random update, resume it; return the last update before that."""
    target = random.randrange(total)
    process = start(words, run, "--deterministic")
    while process.poll() is None and last_update(run) < target:
        time.sleep(0.01)
    process.kill()
    process.wait()
    reached = last_update(run)
    if not (run / "summary.json").exists():
        begun = ["--resume"] if (run / "config.yml").exists() else []
        finish(start(words, run, "--deterministic", *begun))
    return reached


def repeatability(name: str, words: str, args: Any, folder: Path) -> dict[str, str]:
    """Compare a run with itself, repeated as well as killed and resumed."""
    pool = concurrent.futures.ThreadPoolExecutor(args.parallel)
    runs = [folder / f"{name}-{number}" for number in range(2)]
    processes = [start(words, run, "--deterministic") for run in runs]
    for process in processes:
        finish(process)
    first, second = map(result, runs)
    total = last_update(runs[0])
    killed = [folder / f"{name}-killed-{number}" for number in range(args.kills)]
    moments = [pool.submit(kill_and_resume, words, run, total) for run in killed]
    after = [moment.result() for moment in moments]
    same = sum(result(run) == first for run in killed)
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
    options = reporting.parser(__doc__, rounds=1)
    options.add_argument("--kills", type=int, default=10)
    options.add_argument("--parallel", type=int, default=2, help="runs killed side by side")
    options.add_argument("--mnist", type=Path, help="folder of MNIST, for VCD's speed")
    options.add_argument("--only", choices=("cost", "kills"))
    args = options.parse_args()
    folder = Path(tempfile.mkdtemp())
    data = f"--dataset mnist --dataset-path {args.mnist}" if args.mnist else ""
    speeds: dict[str, tuple[float, float]] = {}
    for name, words in _SPEED.items() if args.only != "kills" else ():
        words = words.format(
            vcd_data=data or "--dataset digits", vcd_epochs=16 if data else 500
        )
        usual = samples_per_second(words, folder)
        speeds[name] = usual, samples_per_second(words, folder, "--deterministic")
        print(name, speeds[name], file=sys.stderr, flush=True)
    with concurrent.futures.ThreadPoolExecutor(len(_REPEATED)) as pool:
        epochs = {"epochs": 20, "vcd_epochs": 150} if reporting.on_gpu() else {}
        epochs = epochs or {"epochs": 6, "vcd_epochs": 20}
        kinds = _REPEATED.items() if args.only != "cost" else ()
        found = [
            pool.submit(repeatability, name, words.format(**epochs), args, folder)
            for name, words in kinds
        ]
        kills = [row.result() for row in found]
    table = [
        {
            "training": name,
            "samples/s": f"{usual:,.0f}",
            "with --deterministic": f"{repeated:,.0f}",
            "ratio": f"{repeated / usual:.3f}",
        }
        for name, (usual, repeated) in speeds.items()
    ]
    explained = "\n".join(
        [
            "Deterministic programs add up in a fixed order, and XLA takes the first "
            "kernel that fits instead of timing several: small products lose the most.",
            "",
            *(reporting.table_lines(kills) if kills else ()),
        ]
    )
    reporting.publish(
        reporting.Result(
            name="repeatability",
            table=table or kills,
            ratio_name="lowest speed with --deterministic / without",
            ratio=min((b / a for a, b in speeds.values()), default=None),
            target=0.95,  # what would make it the default
            explanation=explained,
            numbers={"speeds": speeds, "kills": kills},
        ),
        args,
    )


if __name__ == "__main__":
    main()
