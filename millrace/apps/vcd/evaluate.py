"""``millrace vcd evaluate``: the log-likelihood of pictures under a trained model."""

import json
import time
from pathlib import Path

import numpy as np

from millrace.apps.vcd.config.commands import EvaluateConfig
from millrace.apps.vcd.config.common import TestOptions
from millrace.apps.vcd.data import BinaryPictures
from millrace.apps.vcd.devices import chosen_devices
from millrace.apps.vcd.likelihood import LogLikelihoods, Progress, log_likelihoods
from millrace.apps.vcd.trained import load_trained
from millrace.durable import finite_json, write_atomically
from millrace.plan import Plan
from millrace.run.console import Console
from millrace.run.run import Run

_LINES = 10  # without a terminal, how often the progress is told


def evaluate(config: EvaluateConfig, run: Run) -> None:
    """Evaluate a checkpoint; results go to the run directory."""
    with chosen_devices(config) as devices:
        trained = load_trained(config)
        pictures = _some(trained.pictures, config.num_pictures)
        run.describe(
            devices[:1],
            Plan(),
            None,
            model=f"{trained.path}, {trained.update} updates",
            dataset=trained.description,
            pictures=f"{len(pictures):,}",
            samples=f"{config.num_importance_samples:,} of each of three proposals",
        )
        found = measure(trained.params, pictures, config, config.seed, run, config.split)
        run.summary["updates"] = trained.update
        run.summary["metrics"] = found.metrics(config.split)
        run.summary["status"] = "completed"


def measure(
    params: object,
    pictures: BinaryPictures,
    options: TestOptions,
    seed: int,
    run: Run,
    split: str,
) -> LogLikelihoods:
    """Estimate with progress on the screen; keep the figures and each picture's values."""
    shown = _shown(run.console, f"estimating the {split} log-likelihood")
    try:
        found = log_likelihoods(params, pictures, options, seed=seed, progress=shown)
    finally:
        run.console.stop()
    statistics = found.statistics() | {"samples": options.num_importance_samples}
    run.summary[f"{split}_likelihood"] = statistics
    path: Path = run.directory.path
    text = json.dumps(finite_json(statistics), indent=2) + "\n"
    write_atomically(path / f"{split}_results.json", text)
    np.savez_compressed(
        path / f"{split}_log_likelihoods.npz",
        allow_pickle=False,
        **{name: values.astype(np.float32) for name, values in found.values.items()},
    )
    return found


def _shown(console: Console, what: str) -> Progress:
    """Return what shows the progress: the bar, or a line now and then."""
    console.status(what)
    started = time.monotonic()
    told = 0

    def show(done: int, total: int) -> None:
        nonlocal told
        if console.live:
            if done == 1:
                console.start(total, 0)
                console.status(what)
            console.advance(done, {}, 0.0)
        elif done * _LINES // total > told:
            told = done * _LINES // total
            left = (time.monotonic() - started) * (total - done) / done
            console.line(f"{100 * done // total} %, {left:,.0f} s left")

    return show


def _some(pictures: BinaryPictures, count: int | None) -> BinaryPictures:
    """Take some, evenly spaced: the test pictures are in the order of their classes."""
    if count is None or count >= len(pictures):
        return pictures
    return pictures.some(np.linspace(0, len(pictures) - 1, count).round().astype(int))
