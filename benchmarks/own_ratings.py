"""Test RMSE of ``millrace autoencoder train`` on files of ratings, with nothing tuned.

Each file is split twice: the last tenth of each user's ratings, and a random tenth, are the
test. One command trains on the rest; it holds out its own validation ratings, and computes
the simple models in the same run. Times are those of the whole command.

    python own_ratings.py ratings.csv fewer_users.csv

Target: below the best of biases and the linear item model everywhere.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Result, build_parser, publish

_SPLITS = {"time": "last tenth of each user", "random": "random tenth"}


def measure(file: Path, split: str, folder: Path) -> dict[str, Any]:
    """Split a file, train on nine tenths, and return the test errors of all models."""
    options = ["--split", split, "--fractions", "0.8", "0.1", "0.1"]
    if split == "time":
        options.append("--per-user")
    call("convert", str(file), *options, "--output-dir", str(folder / "split"))
    ratings = folder / "ratings.txt"
    parts = [(folder / f"split/{name}.txt").read_bytes() for name in ("train", "valid")]
    ratings.write_bytes(b"".join(parts))
    run = folder / "run"
    started = time.perf_counter()
    call(
        *("train", "--training-data-file", str(ratings), "--run-dir", str(run)),
        *("--test-data-file", str(folder / "split/test.txt"), "--quiet"),
    )
    seconds = time.perf_counter() - started
    summary = json.loads((run / "summary.json").read_text())
    errors = {
        "network": summary["metrics"]["test_rmse"],
        **summary["baselines"]["test_rmse"],
    }
    return {
        "ratings": ratings.read_bytes().count(b"\n"),
        "errors": errors,
        "seconds": seconds,
    }


def call(*arguments: str) -> None:
    """Run a command of ``millrace autoencoder``."""
    subprocess.run(
        [sys.executable, "-m", "millrace", "autoencoder", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def compare(files: list[Path], folder: Path) -> Result:
    """Measure all files and splits, and compare the networks with the simple models."""
    rows, ratios, numbers = [], [], {}
    for file in files:
        for split, label in _SPLITS.items():
            found = measure(file, split, folder / f"{file.stem}-{split}")
            errors = dict(found["errors"])
            network = errors.pop("network")
            ratios.append(network / min(errors.values()))
            row = {"file": file.stem, "test": label, "ratings": f"{found['ratings']:,}"}
            row |= {name: f"{error:.4f}" for name, error in errors.items()}
            rows.append(row | {"network": f"{network:.4f}", "s": f"{found['seconds']:.0f}"})
            numbers[f"{file.stem}-{split}"] = found
            print(row, f"network {network:.4f}", flush=True)
    return Result(
        name="own_ratings",
        table=rows,
        ratio_name="RMSE of the network / the best simple model, at worst",
        ratio=max(ratios),
        target=1.0,
        at_least=False,
        explanation="Test RMSE; `ratings` is the number to train on.",
        numbers=numbers,
    )


def main() -> None:
    """Train, test and report."""
    parser: argparse.ArgumentParser = build_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="files of ratings with times")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="own-ratings-") as folder:
        publish(compare(args.files, Path(folder)), args)


if __name__ == "__main__":
    main()
