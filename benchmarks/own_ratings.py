"""Test RMSE of ``millrace autoencoder train`` on files of ratings, with nothing tuned.

Each file is split twice: the last tenth of each user's ratings, and a random tenth, are the
test. One command trains on the rest; it holds out its own validation ratings, and computes
the simple models in the same run. Times are those of the whole command.

    python own_ratings.py ratings.csv fewer_users.csv
    python own_ratings.py --given netflix/3m_train.txt netflix/3m_test.txt --at-most 0.916

With --given, the ratings are split already: a file to train on, one to test on, and
optionally one to validate on.

Target: below the best simple model everywhere; with --at-most, an RMSE of at most the
number that is given for each row of the table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import Result, build_parser, publish

_SPLITS = {"time": "last tenth of each user", "random": "random tenth"}


def split_file(file: Path, split: str, folder: Path) -> tuple[Path, Path]:
    """Split a file; return nine tenths to train on, and the rest to test."""
    options = ["--split", split, "--fractions", "0.8", "0.1", "0.1"]
    if split == "time":
        options.append("--per-user")
    call("convert", str(file), *options, "--output-dir", str(folder))
    ratings = folder / "ratings.txt"
    parts = [(folder / f"{name}.txt").read_bytes() for name in ("train", "valid")]
    ratings.write_bytes(b"".join(parts))
    return ratings, folder / "test.txt"


def measure(files: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Train on the first file, and return the errors of all models on the second.

    A third file is for validation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The name of a published split would choose Graphcore's recipe.
    training = folder / f"own_{files[0].name}"
    training.symlink_to(files[0].resolve())
    roles = {"training": training, "test": files[1]}
    if len(files) > 2:
        roles["validation"] = files[2]
    options = [
        x for role, file in roles.items() for x in (f"--{role}-data-file", str(file))
    ]
    started = time.perf_counter()
    call("train", *options, "--run-dir", str(folder / "run"), "--quiet")
    seconds = time.perf_counter() - started
    summary = json.loads((folder / "run/summary.json").read_text())
    return {
        "ratings": summary["facts"]["ratings"].partition(" by ")[0],
        "errors": summary["baselines"]["test_rmse"],
        "network": summary["metrics"]["test_rmse"],
        "epoch": summary["best"]["epoch"],
        "seconds": seconds,
    }


def call(*arguments: str) -> None:
    """Run a command of ``millrace autoencoder``."""
    subprocess.run(
        [sys.executable, "-m", "millrace", "autoencoder", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def measure_all(
    args: argparse.Namespace, folder: Path
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, the split and the measurement of each pair of files."""
    for files in args.given:
        label = "given" if len(files) == 2 else "given, with validation"
        found = measure(files, folder / f"given-{files[0].stem}-{len(files)}")
        yield files[0].stem, label, found
    for file in args.files:
        for split, label in _SPLITS.items():
            here = folder / f"{file.stem}-{split}"
            yield file.stem, label, measure(split_file(file, split, here / "split"), here)


def compare(args: argparse.Namespace, folder: Path) -> Result:
    """Measure all files and splits, and compare the networks with their bounds."""
    rows, ratios, numbers = [], [], {}
    for name, label, found in measure_all(args, folder):
        errors, network = found["errors"], found["network"]
        bound = args.at_most[len(rows)] if args.at_most else min(errors.values())
        ratios.append(network / bound)
        row = {"file": name, "test": label, "ratings": found["ratings"]}
        row |= {model: f"{error:.4f}" for model, error in errors.items()}
        row["network"] = f"{network:.4f}"
        if args.at_most:
            row["at most"] = f"{bound:g}"
        rows.append(
            row | {"epoch": f"{found['epoch']:.3g}", "s": f"{found['seconds']:.0f}"}
        )
        numbers[f"{name}, {label}"] = found
        print(rows[-1], flush=True)
    models = list(dict.fromkeys(column for row in rows for column in row))
    models.sort(key=lambda column: column in ("network", "at most", "epoch", "s"))
    against = "the RMSE to reach" if args.at_most else "the best simple model"
    return Result(
        name=f"own_ratings{f'_{args.name}' if args.name else ''}",
        table=[{column: row.get(column, "") for column in models} for row in rows],
        ratio_name=f"RMSE of the network / {against}, at worst",
        ratio=max(ratios),
        target=1.0,
        at_least=False,
        explanation="Test RMSE. `ratings` is the number trained on, without those held out "
        "for validation; `epoch` is that of the checkpoint, chosen on them; `s` are the "
        "seconds of the whole command. Nothing is tuned: no other options are given.",
        numbers=numbers,
    )


def main() -> None:
    """Train, test and report."""
    parser: argparse.ArgumentParser = build_parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="files of ratings with times")
    parser.add_argument(
        "--given",
        action="append",
        nargs="+",
        default=[],
        type=Path,
        metavar="FILE",
        help="ratings to train on, to test, and optionally to validate",
    )
    parser.add_argument(
        "--at-most", nargs="+", type=float, default=[], help="RMSE to reach in each row"
    )
    parser.add_argument("--name", help="what the name of the report ends in")
    args = parser.parse_args()
    num_rows = len(args.given) + len(_SPLITS) * len(args.files)
    if not num_rows:
        parser.error("give files of ratings, or --given")
    if any(len(files) not in (2, 3) for files in args.given):
        parser.error("--given takes two or three files")
    if args.at_most and len(args.at_most) != num_rows:
        parser.error(f"--at-most needs {num_rows} numbers, one for each row of the table")
    with tempfile.TemporaryDirectory(prefix="own-ratings-") as folder:
        publish(compare(args, Path(folder)), args)


if __name__ == "__main__":
    main()
