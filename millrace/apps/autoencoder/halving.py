"""Successive halving: which trials of a search continue, from their validation errors.

All decisions follow from the log events of the run, so that a resumed search makes the same
ones.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from millrace.apps.autoencoder.config.training import Hyperparameters, Steps
from millrace.apps.autoencoder.predictor import RMSE
from millrace.report.sections import Table

Histories = Mapping[int, Sequence[float]]
"""The validation errors of each trial, by number, until it was dropped or stopped."""


def plan_rungs(num_trials: int, steps: Steps) -> list[int]:
    """Return the updates after which rungs end, each together with a validation."""
    num_rungs = max(1, math.ceil(math.log2(num_trials)))
    per_validation = steps.per_validation
    ends = []
    for number in range(num_rungs - 1):
        share = 2.0 ** (number + 1 - num_rungs)
        end = round(steps.total * share / per_validation) * per_validation
        if (ends[-1] if ends else 0) < end < steps.total:
            ends.append(end)
    return [end * steps.updates_per_step for end in [*ends, steps.total]]


def read_histories(events: Sequence[Mapping[str, Any]]) -> dict[int, list[float]]:
    """Return the validation errors of each trial so far, from the log events."""
    histories: dict[int, list[float]] = {}
    for event in events:
        for name, value in event.items():
            if name.startswith(prefix := f"{RMSE}_trial_"):
                number = int(name.removeprefix(prefix)) - 1
                histories.setdefault(number, []).append(float(value))
    return histories


def choose_survivors(
    alive: Sequence[int], histories: Histories, patience: int | None
) -> list[int]:
    """Return the trials that continue: the better half, without those that have stopped.

    Trials are ranked by their lowest error so far. The first one always continues.
    """
    ranked = sorted(alive, key=lambda trial: (lowest(histories[trial]), trial))
    kept = ranked[: math.ceil(len(ranked) / 2)]
    if 0 in alive and 0 not in kept:
        kept[-1] = 0
    return sorted(t for t in kept if not has_stopped_improving(histories[t], patience))


def has_stopped_improving(errors: Sequence[float], patience: int | None) -> bool:
    """Whether none of the last `patience` errors is smaller than all before them."""
    if patience is None or len(errors) <= patience:
        return False
    return lowest(errors[-patience:]) >= lowest(errors[:-patience])


def lowest(errors: Sequence[float]) -> float:
    """Return the smallest finite error; infinity if there is none."""
    finite = [error for error in errors if math.isfinite(error)]
    return min(finite, default=math.inf)


class TrialResult(NamedTuple):
    """How far a trial came, and how well it predicts."""

    trial: int
    learning_rate: float
    weight_decay: float
    dropout_rate: float
    input_dropout_rate: float
    rung: int
    """The last rung in which it was trained, counted from 1."""
    epoch: float
    """The epoch of its lowest error."""
    validation_rmse: float
    """Its lowest error."""
    is_chosen: bool


def build_results(
    events: Sequence[Mapping[str, Any]],
    trials: Sequence[Hyperparameters],
    ends: Sequence[int],
    chosen: int,
) -> list[TrialResult]:
    """Return the results of all trials, from the log events."""
    results = []
    for number, settings in enumerate(trials):
        name = f"{RMSE}_trial_{number + 1}"
        own = [event for event in events if name in event]
        best = min(own, key=lambda event: lowest([float(event[name])]))
        rung = sum(end < own[-1]["update"] for end in ends) + 1
        results.append(
            TrialResult(
                number + 1,
                *settings,
                rung=rung,
                epoch=best["epoch"],
                validation_rmse=float(best[name]),
                is_chosen=number == chosen,
            )
        )
    return results


def build_table(results: Sequence[TrialResult]) -> Table:
    """Return the table of all trials, the best first."""
    ranked = sorted(results, key=lambda result: lowest([result.validation_rmse]))
    rows = [
        [
            f"{result.trial}{' (chosen)' if result.is_chosen else ''}",
            *(f"{value:.4g}" for value in result[1:5]),
            str(result.rung),
            f"{result.epoch:g}",
            f"{result.validation_rmse:.4f}",
        ]
        for result in ranked
    ]
    return Table(
        title="Trials of the search",
        note="Trial 1 has the settings of a run without a search. After each rung, the "
        "better half of the trials continues.",
        columns=[
            *("trial", "learning rate", "weight decay", "dropout", "input dropout"),
            *("rung", "best epoch", "validation RMSE"),
        ],
        rows=rows,
    )
