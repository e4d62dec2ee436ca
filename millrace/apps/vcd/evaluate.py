"""``millrace vcd evaluate``: the log-likelihood of images under a trained model."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from millrace.apps.vcd.config import EvaluateConfig
from millrace.apps.vcd.config.sections import DeviceOptions, LikelihoodOptions
from millrace.apps.vcd.data import BinaryImages
from millrace.apps.vcd.likelihood import (
    LogLikelihoods,
    Progress,
    estimate_log_likelihoods,
)
from millrace.apps.vcd.predictor import load_generator
from millrace.config import ConfigurationError
from millrace.durable import finite_json, write_atomically
from millrace.loop.activity import run_stoppable
from millrace.plan import Plan
from millrace.run.console import Console
from millrace.run.run import Run

_PROGRESS_LINES = 10  # where there is no terminal for a progress bar


def evaluate(config: EvaluateConfig, run: Run) -> None:
    """Evaluate a checkpoint; results go to the run directory."""
    with chosen_devices(config.devices) as devices:
        model = load_generator(
            config.checkpoint_dir,
            config.which,
            split=config.split,
            dataset_path=config.dataset_path,
            announce=run.console.line,
        )
        images = _subsample(model.images, config.num_pictures)
        num_samples = config.likelihood.num_importance_samples
        run.describe(
            devices[:1],
            Plan(),
            None,
            model=f"{model.checkpoint}, {model.update} updates",
            dataset=model.dataset,
            images=f"{len(images):,}",
            samples=f"{num_samples:,} for each of three proposals",
        )
        result = measure(
            model.params, images, config.likelihood, config.run.seed, run, config.split
        )
        run.summary["updates"] = model.update
        run.summary["metrics"] = result.metrics(config.split)
        run.summary["status"] = "completed"


def measure(
    params: Any,
    images: BinaryImages,
    options: LikelihoodOptions,
    seed: int,
    run: Run,
    split: str,
) -> LogLikelihoods:
    """Estimate log-likelihoods with a progress display, and write the results files."""
    progress = _show_progress(run.console, f"estimating the {split} log-likelihood")
    try:
        result = run_stoppable(
            lambda: estimate_log_likelihoods(
                params, images, options, seed=seed, progress=progress
            )
        )
    finally:
        run.console.stop()
    statistics = result.statistics() | {"samples": options.num_importance_samples}
    run.summary[f"{split}_likelihood"] = statistics
    path: Path = run.directory.path
    text = json.dumps(finite_json(statistics), indent=2) + "\n"
    write_atomically(path / f"{split}_results.json", text)
    np.savez_compressed(
        path / f"{split}_log_likelihoods.npz",
        allow_pickle=False,
        **{name: values.astype(np.float32) for name, values in result.values.items()},
    )
    return result


def _show_progress(console: Console, activity: str) -> Progress:
    """Return a callback that drives the progress bar, or prints a line now and then."""
    console.status(activity)
    started = time.monotonic()
    lines = 0

    def show(done: int, total: int) -> None:
        nonlocal lines
        if console.live:
            console.progress(done, total)
        elif done * _PROGRESS_LINES // total > lines:
            lines = done * _PROGRESS_LINES // total
            seconds_left = (time.monotonic() - started) * (total - done) / done
            console.line(f"{100 * done // total} %, {seconds_left:,.0f} s left")

    return show


def _subsample(images: BinaryImages, count: int | None) -> BinaryImages:
    """Return `count` images, evenly spaced: test images may be sorted by class."""
    if count is None or count >= len(images):
        return images
    return images.subset(np.linspace(0, len(images) - 1, count).round().astype(int))


@contextlib.contextmanager
def chosen_devices(options: DeviceOptions) -> Iterator[list[Any]]:
    """Yield the devices to use, and make the first of this process the default device."""
    devices = _find_devices(options)
    own = [d for d in devices if d.process_index == jax.process_index()]
    precision = None if options.matmul_precision == "default" else options.matmul_precision
    with jax.default_device(own[0]), jax.default_matmul_precision(precision):
        yield devices


def _find_devices(options: DeviceOptions) -> list[Any]:
    try:
        devices = jax.devices(None if options.device == "auto" else options.device)
    except RuntimeError as error:
        present = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise ConfigurationError(
            f"JAX finds no {options.device} on this machine, only {present}."
        ) from error
    if options.only_accelerator and devices[0].platform == "cpu":
        raise ConfigurationError(
            "only_accelerator is set, but JAX finds no accelerator on this machine."
        )
    return devices
