"""What a sweep found: a table, a plot, and the best configuration as YAML."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.data import Rows
from millrace.apps.autoencoder.config.sweep import SweepConfig
from millrace.apps.autoencoder.joint_training import Means, label
from millrace.config import as_plain
from millrace.durable import finite_json, write_atomically
from millrace.loop.nan_guard import NonFiniteError
from millrace.report.plots import Plot
from millrace.report.sections import Points, save_section
from millrace.run.run import Run


class Trial(NamedTuple):
    """What became of one learning rate."""

    base_learning_rate: float
    learning_rate: float
    rows_per_second: float
    """Of users, or of items where these are the rows."""
    loss: float
    rmse: float
    """Of the training ratings, as dropout left them."""
    validation_rmse: float | None

    @property
    def error(self) -> float:
        """What trials are compared by; a model that diverged is infinitely bad."""
        value = self.rmse if self.validation_rmse is None else self.validation_rmse
        return value if math.isfinite(value) else math.inf


def trials_of(
    config: SweepConfig, means: Sequence[Means], metrics: dict[str, float], speed: float
) -> list[Trial]:
    """Sort out by learning rate what a run has found.

    Args:
        config: Has the learning rates.
        means: Of the last step, one for each device.
        metrics: Of the last validation.
        speed: Rows per second of each model.
    """
    losses = np.concatenate([part.loss / part.num_updates for part in means])
    errors = np.concatenate([part.rmse / part.num_updates for part in means])
    rates = zip(config.exponents, config.first_learning_rates, losses, errors, strict=True)
    return [
        Trial(
            exponent,
            rate,
            speed,
            float(loss),
            float(error),
            metrics.get(f"validation_rmse_{label(exponent)}"),
        )
        for exponent, rate, loss, error in rates
    ]


def report(config: SweepConfig, trials: Sequence[Trial], run: Run) -> None:
    """Print, draw and write what was found.

    Raises:
        NonFiniteError: Every model diverged.
    """
    for line in table(trials, config.rows):
        run.console.line(line)
    total = sum(trial.rows_per_second for trial in trials)
    run.closing_facts["throughput"] = (
        f"{total:,.0f} {config.rows}/s over {len(trials)} models, "
        f"{total / len(trials):,.0f} {config.rows}/s each"
    )
    run.summary["trials"] = [trial._asdict() for trial in trials]
    folder = run.directory.path
    save_section(folder, "sweep", drawn := sweep_part(trials))
    path = Plot(drawn.title, drawn.render()).save(folder / "sweep.svg")
    run.closing_facts["plot"] = str(path)
    best = min(trials, key=lambda trial: trial.error)
    if not math.isfinite(best.error):
        raise NonFiniteError(
            "Every model diverged, so there is no best learning rate. Start again with "
            "smaller ones, which have larger numbers in base_learning_rates."
        )
    run.summary["best"] = best._asdict()
    run.summary["metrics"]["best_rmse"] = best.error
    path = folder / "best.yml"
    write_atomically(path, yaml.safe_dump({"best": best_config(config, best)}))
    run.closing_facts["best"] = (
        f"2^-{label(best.base_learning_rate)}: millrace autoencoder train --config best "
        f"--config-path {path}"
    )


def table(trials: Sequence[Trial], rows: Rows = "users") -> list[str]:
    """Write the trials in columns."""
    validated = trials[0].validation_rmse is not None
    header = ["2^", "learning rate", f"{rows}/s", "loss", "RMSE"]
    lines = [header + ["validation RMSE"] * validated]
    for trial in trials:
        cells = [
            f"-{label(trial.base_learning_rate)}",
            f"{trial.learning_rate:.3g}",
            f"{trial.rows_per_second:,.0f}",
            f"{trial.loss:.4f}",
            f"{trial.rmse:.4f}",
        ]
        cells += [f"{trial.validation_rmse:.4f}"] if validated else []
        if math.isinf(trial.error):
            cells[-1] = "diverged"
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]


def sweep_part(trials: Sequence[Trial]) -> Points:
    """Return the error over the learning rate, to be drawn."""
    validated = trials[0].validation_rmse is not None
    return Points(
        title="Error over learning rate",
        x_name="base learning rate, as a power of 2",
        y_name="validation RMSE" if validated else "training RMSE",
        points=[[trial.base_learning_rate, finite_json(trial.error)] for trial in trials],
    )


def best_config(config: SweepConfig, best: Trial) -> dict[str, Any]:
    """Return the options with which ``autoencoder train`` repeats the best trial."""
    usual = as_plain(AutoencoderConfig())
    given = {}
    for field in dataclasses.fields(AutoencoderConfig):
        if field.metadata.get("may_change") or not hasattr(config, field.name):
            continue
        value = getattr(config, field.name)
        if as_plain(config)[field.name] != usual[field.name]:
            absolute = isinstance(value, Path)
            given[field.name] = str(value.resolve()) if absolute else value
    return given | {"base_learning_rate": best.base_learning_rate}
