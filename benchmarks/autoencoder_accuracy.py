"""Test RMSE of the autoencoder against simpler models on the same ratings.

The files are those of ``millrace autoencoder convert``: PREFIXtrain.txt, PREFIXvalid.txt
and PREFIXtest.txt. The models train on the first. The second selects the checkpoint of the
autoencoder and the regularization of the other models. The third gives the RMSE, over all
ratings.

    python autoencoder_accuracy.py netflix_data/3m_ --configs netflix_3m paper_3m
    python autoencoder_accuracy.py movielens_data/1m_ --configs movielens_1m --factors 50
    python autoencoder_accuracy.py movielens_data/1m_random_ --objectives

Target: below the biases and the matrix factorization; with --published, at most that RMSE.
With --objectives, the modern recipe trains for ratings and for rankings, and the target is
an NDCG@10 of at least that of the linear item model.
"""

import argparse
import math
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import rating_baselines as baselines
from harness import Result, build_parser, publish

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.commands import ValidateConfig
from millrace.apps.autoencoder.evaluate import validate
from millrace.apps.autoencoder.metrics import RankingOptions
from millrace.apps.autoencoder.predictor import build_predict, load_recommender
from millrace.apps.autoencoder.ranking import Scorer, measure_ranking
from millrace.apps.autoencoder.run_ratings import load_ratings_for
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

_NUM_POINTS = 16
"""Points of a curve in the text; the drawing has all."""
_RUNS = Path(str(resources.files("millrace.apps.autoencoder") / "runs.yml"))


def measure_autoencoder(
    name: str, args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Train a named configuration and test its best checkpoint."""
    files = {
        "training_data_file": f"{args.prefix}train.txt",
        "validation_data_file": f"{args.prefix}valid.txt",
    }
    given = dict(pair.split("=", 1) for pair in args.set)
    values = load_named(_RUNS, name) | files | given | {"run_dir": folder / name}
    config = build(AutoencoderConfig, values)
    if run_command(train, config, command="autoencoder-train", command_line=name):
        raise SystemExit(f"{name} failed")
    test_config = ValidateConfig(
        checkpoint=folder / name,
        validation_data_file=Path(f"{args.prefix}test.txt"),
        run=RunOptions(run_dir=folder / f"{name}-test", quiet=True),
    )
    if run_command(
        validate, test_config, command="autoencoder-validate", command_line=name
    ):
        raise SystemExit(f"{name} could not be tested")
    trained, tested = (read_run(folder / run) for run in (name, f"{name}-test"))
    return {
        "validation": trained.summary["best"]["validation_rmse"],
        "test": tested.metrics["validation_rmse"],
        "epoch": trained.summary["best"]["epoch"],
        "rows_per_second": trained.summary["samples_per_second"],
        "curve": metric_series(trained.events)["validation_rmse"].points,
    }


def measure_objective(
    objective: str, args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Train the modern recipe for an objective; rank the items of the test ratings."""
    roles = {"training": "train", "validation": "valid", "test": "test"}
    files = {f"{role}_data_file": f"{args.prefix}{end}.txt" for role, end in roles.items()}
    given = dict(pair.split("=", 1) for pair in args.set)
    values = {"objective": objective, "recipe": "modern", **files, **given}
    config = build(AutoencoderConfig, values | {"run_dir": folder / objective})
    if run_command(train, config, command="autoencoder-train", command_line=objective):
        raise SystemExit(f"{objective} failed")
    test_config = ValidateConfig(
        checkpoint=folder / objective,
        validation_data_file=Path(files["test_data_file"]),
        top=[10, 100],
        run=RunOptions(run_dir=folder / f"{objective}-test", quiet=True),
    )
    if run_command(
        validate, test_config, command="autoencoder-validate", command_line=objective
    ):
        raise SystemExit(f"{objective} could not be tested")
    trained, tested = (read_run(folder / run) for run in (objective, f"{objective}-test"))
    return {
        "metrics": tested.metrics,
        "baselines": trained.summary["baselines"],
        "users_per_second": trained.summary["samples_per_second"],
    }


def measure_network(run: Path, test_file: Path) -> dict[str, float]:
    """Rank the items of the test ratings by the network of a run, without linear items."""
    recommender = load_recommender(run)
    config = recommender.config
    ratings = load_ratings_for(config, recommender.files, validation=test_file).ratings
    assert ratings.validation is not None
    return measure_ranking(
        Scorer(*build_predict(recommender._replace(linear=None), ratings.training)),
        ratings.training,
        ratings.validation,
        RankingOptions((10,), config.data.positive_from),
        config.resolved_validation_batch_size,
        jax.local_devices()[0],
    )


def compare_objectives(args: argparse.Namespace, folder: Path) -> Result:
    """Compare the rankings of both objectives with the simple ones."""
    found = {name: measure_objective(name, args, folder) for name in ("rating", "ranking")}
    columns = ("ndcg", "recall", "precision", "hit_rate", "mrr", "map", "coverage")
    figures = {
        name: {c: entry["metrics"][f"validation_{c}_at_10"] for c in columns}
        for name, entry in found.items()
    }
    alone = measure_network(folder / "ranking", Path(f"{args.prefix}test.txt"))
    figures["network alone"] = {c: alone[f"{c}_at_10"] for c in columns}
    simple = found["ranking"]["baselines"]
    for name in simple["test_ndcg_at_10"]:
        figures[name] = {c: simple[f"test_{c}_at_10"][name] for c in columns}
    other = "linear items" if "linear items" in figures else "popularity"
    return Result(
        name=f"autoencoder_ranking_{args.name or 'objectives'}",
        table=[
            {"model": name, **{f"{c}@10": f"{entry[c]:.4f}" for c in columns}}
            for name, entry in figures.items()
        ],
        ratio_name=f"NDCG@10 of ranking / {other}",
        ratio=figures["ranking"]["ndcg"] / figures[other]["ndcg"],
        target=1.0,
        at_least=True,
        explanation="Ratings of 4 and more are relevant; all unrated items are ranked. The "
        "score of ranking is that of linear items plus weighted logits of the network; "
        "network alone is the same checkpoint without linear items.",
        numbers={"figures": figures},
    )


def measure_baselines(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Fit and test the simpler models."""
    training, validation, _ = load_aligned(
        f"{args.prefix}train.txt", f"{args.prefix}valid.txt"
    )
    test, _ = align(load_ratings(f"{args.prefix}test.txt"), training)
    held_out, tested = map(baselines.list_events, (validation, test))
    fits = {"user and item biases": baselines.best_biases(training, held_out)}
    if args.factors:
        name = f"matrix factorization, {args.factors} factors"
        fits[name] = baselines.best_factors(training, held_out, args.factors)
    return {
        name: {
            "validation": fitted.validation_rmse,
            "test": baselines.rmse(fitted.predict, tested),
            "strength": fitted.strength,
        }
        for name, fitted in fits.items()
    }


def build_result(figures: dict[str, dict[str, Any]], args: argparse.Namespace) -> Result:
    """Compare the best autoencoder with the simpler models or the published RMSE."""
    best = min(args.configs, key=lambda name: figures[name]["test"])
    others = {name: entry for name, entry in figures.items() if name not in args.configs}
    bar = min(entry["test"] for entry in others.values())
    against = "the best simpler model"
    if args.published:
        bar, against = args.published, f"the published {args.published:g}"
    notes = {name: format_note(entry) for name, entry in figures.items()}
    curves = [Series(name, figures[name]["curve"]) for name in args.configs]
    return Result(
        name=f"autoencoder_accuracy_{args.name or best}",
        table=[
            {
                "model": name,
                "validation RMSE": f"{entry['validation']:.4f}",
                "test RMSE": f"{entry['test']:.4f}",
            }
            for name, entry in figures.items()
        ],
        ratio_name=f"test RMSE of {best} / {against}",
        ratio=figures[best]["test"] / bar,
        target=1.0,
        at_least=False,
        explanation="\n".join(f"- {name}: {note}" for name, note in notes.items()),
        numbers={"figures": figures},
        drawing=line_chart(
            "validation RMSE", curves, level=(against.removeprefix("the "), bar)
        ),
    )


def format_note(entry: dict[str, Any]) -> str:
    """Return the figures of a model as text, with its validation curve."""
    single = {key: value for key, value in entry.items() if key != "curve"}
    note = ", ".join(f"{key} {value:,.4g}" for key, value in single.items())
    if "curve" not in entry:
        return note
    points = entry["curve"]
    step = math.ceil(len(points) / _NUM_POINTS)
    shown = [*points[step - 1 : -1 : step], points[-1]]
    curve = ", ".join(f"{value:.4f} ({epoch:.3g})" for epoch, value in shown)
    return f"{note}; validation by epoch: {curve}"


def main() -> None:
    """Train, test and report."""
    tune_memory_allocation()
    parser = build_parser(__doc__)
    parser.add_argument("prefix", help="common prefix of the three files")
    parser.add_argument(
        "--configs", nargs="+", default=[], help="configurations of runs.yml"
    )
    parser.add_argument(
        "--objectives", action="store_true", help="compare the objectives of training"
    )
    parser.add_argument("--set", nargs="*", default=[], help="options as name=value")
    parser.add_argument(
        "--factors", type=int, default=0, help="rank of the factorization; 0: none"
    )
    parser.add_argument("--published", type=float, help="test RMSE to compare with")
    parser.add_argument(
        "--name", help="name of the report (default: the best configuration)"
    )
    parser.add_argument("--folder", type=Path, help="folder for the runs")
    args = parser.parse_args()
    if bool(args.configs) == args.objectives:
        parser.error("give --configs or --objectives")
    if args.objectives:
        folder = args.folder or Path(tempfile.mkdtemp(prefix="autoencoder-"))
        return publish(compare_objectives(args, folder), args)
    figures: dict[str, Any] = measure_baselines(args)
    for name, entry in figures.items():
        print(f"{name}: test RMSE {entry['test']:.4f}", flush=True)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="autoencoder-"))
    for name in args.configs:
        figures[name] = measure_autoencoder(name, args, folder)
    publish(build_result(figures, args), args)


if __name__ == "__main__":
    main()
