"""Test RMSE of the autoencoder, against simpler models on the same ratings in one run.

The files are those of ``millrace autoencoder convert``: PREFIXtrain.txt, PREFIXvalid.txt
and PREFIXtest.txt. Each model learns from the first, is chosen by the second (which
checkpoint of the autoencoder's, which regularization of the others') and is judged by the
third: one RMSE over all ratings together.

    python autoencoder_accuracy.py netflix_data/3m_ --configs netflix_3m paper_3m
    python autoencoder_accuracy.py movielens_data/1m_ --configs movielens_1m --factors 50

Target: below the biases and below the matrix factorization, or with --published at most
that RMSE.
"""

import argparse
import math
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import rating_baselines as baselines
from reporting import Result, parser, publish

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.commands import ValidateConfig
from millrace.apps.autoencoder.evaluate import validate
from millrace.apps.autoencoder.train import train
from millrace.config import build, load_named
from millrace.data.ratings.matrix import align
from millrace.data.ratings.reading import load_aligned, load_ratings
from millrace.drawing.charts import Series, line_chart
from millrace.report.metrics import metric_series
from millrace.report.record import read_run
from millrace.run.options import RunOptions
from millrace.run.process import tune_memory_allocation
from millrace.run.run import run_command

_SHOWN = 16
"""Points of a curve that are written out; the drawing has all."""
_RUNS = Path(str(resources.files("millrace.apps.autoencoder") / "runs.yml"))


def autoencoder(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train a named configuration; test the checkpoint that was validated best."""
    files = {
        "training_data_file": f"{args.prefix}train.txt",
        "validation_data_file": f"{args.prefix}valid.txt",
    }
    given = dict(pair.split("=", 1) for pair in args.set)
    values = load_named(_RUNS, name) | files | given | {"run_dir": folder / name}
    config = build(AutoencoderConfig, values)
    if run_command(train, config, command="autoencoder-train", command_line=name):
        raise SystemExit(f"{name} failed")
    asked = ValidateConfig(
        checkpoint=folder / name,
        validation_data_file=Path(f"{args.prefix}test.txt"),
        run=RunOptions(run_dir=folder / f"{name}-test", quiet=True),
    )
    if run_command(validate, asked, command="autoencoder-validate", command_line=name):
        raise SystemExit(f"{name} could not be tested")
    trained, tested = (read_run(folder / run) for run in (name, f"{name}-test"))
    return {
        "validation": trained.summary["best"]["validation_rmse"],
        "test": tested.metrics["validation_rmse"],
        "epoch": trained.summary["best"]["epoch"],
        "rows_per_second": trained.summary["samples_per_second"],
        "curve": metric_series(trained.events)["validation_rmse"].points,
    }


def simpler_models(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Fit and test the baselines."""
    training, validation, _ = load_aligned(
        f"{args.prefix}train.txt", f"{args.prefix}valid.txt"
    )
    test, _ = align(load_ratings(f"{args.prefix}test.txt"), training)
    held_out, judged = map(baselines.events_of, (validation, test))
    found = {"user and item biases": baselines.best_biases(training, held_out)}
    if args.factors:
        name = f"matrix factorization, {args.factors} factors"
        found[name] = baselines.best_factors(training, held_out, args.factors)
    return {
        name: {
            "validation": fitted.validation_rmse,
            "test": baselines.rmse(fitted.predict, judged),
            "strength": fitted.strength,
        }
        for name, fitted in found.items()
    }


def report(found: dict[str, dict[str, float]], args: argparse.Namespace) -> Result:
    """Compare the best autoencoder with what it has to beat."""
    best = min(args.configs, key=lambda name: found[name]["test"])
    others = {name: entry for name, entry in found.items() if name not in args.configs}
    bar = min(entry["test"] for entry in others.values())
    against = "the best simpler model"
    if args.published:
        bar, against = args.published, f"the published {args.published:g}"
    notes = {name: note_of(entry) for name, entry in found.items()}
    curves = [Series(name, found[name]["curve"]) for name in args.configs]
    return Result(
        name=f"autoencoder_accuracy_{args.name or best}",
        table=[
            {
                "model": name,
                "validation RMSE": f"{entry['validation']:.4f}",
                "test RMSE": f"{entry['test']:.4f}",
            }
            for name, entry in found.items()
        ],
        ratio_name=f"test RMSE of {best} / {against}",
        ratio=found[best]["test"] / bar,
        target=1.0,
        at_least=False,
        explanation="\n".join(f"- {name}: {note}" for name, note in notes.items()),
        numbers={"found": found},
        drawing=line_chart(
            "validation RMSE", curves, level=(against.removeprefix("the "), bar)
        ),
    )


def note_of(entry: dict[str, Any]) -> str:
    """Write what is known of a model, its validation as it went on among it."""
    single = {key: value for key, value in entry.items() if key != "curve"}
    note = ", ".join(f"{key} {value:,.4g}" for key, value in single.items())
    if "curve" not in entry:
        return note
    points = entry["curve"]
    every = math.ceil(len(points) / _SHOWN)
    shown = [*points[every - 1 : -1 : every], points[-1]]
    course = ", ".join(f"{value:.4f} ({epoch:.3g})" for epoch, value in shown)
    return f"{note}; validation by epoch: {course}"


def main() -> None:
    """Train, test and report."""
    tune_memory_allocation()
    options = parser(__doc__)
    options.add_argument("prefix", help="what the names of the three files begin with")
    options.add_argument("--configs", nargs="+", required=True, help="of runs.yml")
    options.add_argument("--set", nargs="*", default=[], help="options, as name=value")
    options.add_argument("--factors", type=int, default=0, help="0: no factorization")
    options.add_argument("--published", type=float, help="a test RMSE to compare with")
    options.add_argument("--name", help="of the report (default: the best configuration)")
    options.add_argument("--folder", type=Path, help="where the runs are kept")
    args = options.parse_args()
    found: dict[str, Any] = simpler_models(args)
    for name, entry in found.items():
        print(f"{name}: test RMSE {entry['test']:.4f}", flush=True)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="autoencoder-"))
    for name in args.configs:
        found[name] = autoencoder(name, args, folder)
    publish(report(found, args), args)


if __name__ == "__main__":
    main()
