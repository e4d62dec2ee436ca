"""Search for good settings: train many models together, and drop the worse half again and
again.

All trials train in one program. A *rung* ends at 1/8, 1/4, 1/2 and all of the run (with 16
trials): the better half of the trials continues in a smaller program, up to where each
would have ended alone. The first trial has the settings of a run without a search and is
never dropped, so a search is at least as good on the validation ratings.

The model with the lowest validation error so far is a checkpoint of the run, as in a run
without a search. The states of all trials are in ``search/``, one folder per rung, until
the search is complete. A rung is written when it ends and when the run is interrupted: an
interrupted search continues where it was, and a killed one at the start of its rung.
"""

import contextlib
import functools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.search import draw_trials
from millrace.apps.autoencoder.config.training import Hyperparameters, Steps
from millrace.apps.autoencoder.data import (
    RatingData,
    open_evaluation_source,
    open_infeed,
)
from millrace.apps.autoencoder.evaluate import Validator
from millrace.apps.autoencoder.halving import (
    build_results,
    build_table,
    choose_survivors,
    has_stopped_improving,
    lowest,
    plan_rungs,
    read_histories,
)
from millrace.apps.autoencoder.joint_training import (
    build_trials_metrics,
    build_trials_program,
    get_settings,
    init_trials,
    select_trials,
    split_trials_scores,
    take_trial,
)
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.program import build_schedule, init_weights
from millrace.checkpoint.store import Checkpoints, checkpoints_in, read_manifest
from millrace.config import ConfigurationError, load_yaml, replace_options
from millrace.distributed import coordination
from millrace.durable import discard, make_folder, write_atomically
from millrace.loop.nan_guard import NonFiniteError
from millrace.program.step import TrainState
from millrace.report.sections import save_section
from millrace.run.run import Run

_TRIALS = "search.json"
"""The settings of all trials, in the run directory."""
_FOLDER = "search"
"""The states of all trials, until the search is complete."""
_PROGRESS = (
    *("epoch", "data_position", "samples_per_element", "time", "metrics", "scores"),
    *("since_log", "num_events"),
)
"""Entries of the manifest of a training checkpoint."""


def is_search(config: AutoencoderConfig, run: Run) -> bool:
    """Whether a run is a search, by its options or because it was started as one.

    Raises:
        ConfigurationError: A resumed run was not started with this number of trials.
    """
    if not run.options.resume:
        return config.search is not None
    path = run.directory.home / _TRIALS
    started = len(json.loads(path.read_text())) if path.exists() else None
    is_new = started is None and not checkpoints_in(run.directory.checkpoints)
    if config.search is not None and config.search != started and not is_new:
        before = f"with --search {started}" if started else "without --search"
        raise ConfigurationError(
            f"The run in {run.directory.home} was started {before}, not with --search "
            f"{config.search}. Leave it out, or start a new run."
        )
    return config.search is not None or started is not None


def search(
    config: AutoencoderConfig,
    run: Run,
    model: Model,
    ratings: RatingData,
    steps: Steps,
    device: Any,
    best: Checkpoints,
) -> AutoencoderConfig | None:
    """Run a search; return the configuration that it has chosen, None if interrupted.

    Args:
        config: The settings of the first trial.
        run: The run.
        model: The model.
        ratings: The ratings, with those to validate on.
        steps: The length of the run.
        device: The device that trains and validates.
        best: Receives the best model so far.
    """
    if coordination.num_processes() > 1:
        raise ConfigurationError("--search runs in one process on one device.")
    if ratings.validation is None:
        raise ConfigurationError(
            "--search compares models by ratings to predict. Give --validation-data-file, "
            "or --validation-fraction."
        )
    trials = _load_trials(config, run, model)
    ends = plan_rungs(len(trials), steps)
    folder = run.directory.path / _FOLDER
    if run.options.resume and not folder.exists() and best.saved():
        run.summary["status"] = "completed"  # it was killed while it was reported
        return _finish(config, run, trials, ends)
    make_folder(folder)
    number, alive = _find_rung(folder, len(trials), len(ends))
    _discard_later(best, _rung_folder(folder, number))
    while True:
        rung = _Rung(
            config, run, model, ratings, steps, device, best, trials, alive, ends[number]
        )
        path = _rung_folder(folder, number)
        state = rung.train(path, resume=number > 0 or bool(run.options.resume))
        if run.summary["status"] != "completed":
            return None
        best.wait()
        _discard_worse(best)
        histories = read_histories(run.directory.read_metrics())
        alive = choose_survivors(alive, histories, config.early_stopping)
        number += 1
        if rung.is_over or number == len(ends) or not alive:
            return _finish(config, run, trials, ends)
        run.console.line(
            f"Rung {number} of {len(ends)} is complete: {len(alive)} of {len(trials)} "
            "trials continue."
        )
        places = [rung.alive.index(trial) for trial in alive]
        _start_rung(folder, number, alive, select_trials(state, places))


class _Rung:
    """Trains some of the trials up to the end of a rung."""

    def __init__(
        self,
        config: AutoencoderConfig,
        run: Run,
        model: Model,
        ratings: RatingData,
        steps: Steps,
        device: Any,
        best: Checkpoints,
        trials: Sequence[Hyperparameters],
        alive: Sequence[int],
        end: int,
    ) -> None:
        assert ratings.validation is not None, "checked by search"
        self._config = config
        self._run = run
        self._best = best
        self.alive = list(alive)
        self._labels = [f"trial_{number + 1}" for number in alive]
        self._steps = steps
        self._end = end
        self.is_over = False
        settings = [trials[number] for number in alive]
        self._program = build_trials_program(
            config, model, steps, settings, device, ratings.unit
        )
        self._weights = functools.partial(init_weights, config, model)
        self._infeed = open_infeed(ratings.training, config, steps, device)
        batch_size = config.resolved_validation_batch_size
        metric_fn = build_trials_metrics(
            model,
            self._labels,
            ratings.training.biases,
            clip=config.data.clip_predictions,
        )
        source = open_evaluation_source(ratings.training, ratings.validation, batch_size)
        self._validator = Validator(metric_fn, config.plan, source, batch_size, device)

    def train(self, folder: Path, *, resume: bool) -> TrainState:
        """Train to the end of the rung; return the state of its trials."""
        run, count = self._run, len(self.alive)
        schedule = build_schedule(self._steps, self._config.steps_per_log)
        schedule = schedule._replace(
            total_updates=self._end, periods=schedule.periods | {"checkpoint": 0}
        )
        state = self._program.init(
            *init_trials(self._weights(), count), seed=self._config.run.seed
        )
        before, start = dict(run.summary), _read_update(folder)
        opened = Checkpoints(folder, keep=1)
        with contextlib.closing(opened) as checkpoints:
            state = run.train(
                self._program,
                state,
                self._infeed,
                schedule,
                validate=self._validate,
                checkpoints=checkpoints,
                resume=resume,
            )
        if self.is_over:
            run.summary["status"] = "completed"
        run.forget_verdicts()  # a trial that diverges is dropped
        self._count_work(before, start)
        return state

    def _count_work(self, before: Mapping[str, Any], start: int) -> None:
        """Add this rung to the summary; samples and their rate are those of all models."""
        summary, count = self._run.summary, len(self.alive)
        rungs = summary.setdefault("rungs", [])
        rungs.append(
            {
                "models": count,
                "updates": summary["updates"],
                "rows_per_second": summary["samples_per_second"] * count,
                "compile_seconds": summary["compile_seconds"],
            }
        )
        rows = self._config.resolved_batch_size
        samples = (summary["updates"] - start) * rows * count
        summary["samples"] = before["samples"] + samples
        summary["samples_per_second"] = rungs[0]["rows_per_second"]
        summary["compile_seconds"] += before["compile_seconds"]

    def _validate(self, state: Any) -> dict[str, float]:
        """Return the metrics of the best trial, and the error of each that continues."""
        patience = self._config.early_stopping
        histories = read_histories(self._run.directory.read_metrics())
        scores = split_trials_scores(
            self._validator.compute_means(state.params), self._labels
        )
        # A trial ends where it would have ended alone, though it is still computed.
        running = {
            trial: scores[label]
            for trial, label in zip(self.alive, self._labels, strict=True)
            if not has_stopped_improving(histories.get(trial, []), patience)
        }
        if not running:  # it was killed after its last validation
            self._end_early()
            return {}
        errors = {trial: own["rmse"] for trial, own in running.items()}
        best = min(errors, key=lambda trial: (lowest([errors[trial]]), trial))
        before = min(map(lowest, histories.values()), default=math.inf)
        if not math.isfinite(min(errors[best], before)):
            raise NonFiniteError(
                f"The validation RMSE of every trial is {errors[best]:g} after update "
                f"{int(state.update)}: all have diverged. Start again with a smaller "
                "learning rate."
            )
        if errors[best] < before:
            self._save_best(state, best, running[best])
        ended = [
            not math.isfinite(error)
            or has_stopped_improving([*histories.get(trial, []), error], patience)
            for trial, error in errors.items()
        ]
        if all(ended):
            self._end_early()
        each = {f"rmse_trial_{trial + 1}": error for trial, error in errors.items()}
        return running[best] | each

    def _end_early(self) -> None:
        """End the search: no trial improves any more."""
        self.is_over = True
        self._run.stop()

    def _save_best(self, state: Any, trial: int, scores: Mapping[str, float]) -> None:
        """Save the best model so far, as a run without a search saves its model."""
        update = int(state.update)
        metrics = {f"validation_{name}": value for name, value in scores.items()}
        self._best.save(
            take_trial(state, self.alive.index(trial)),
            update,
            epoch=round(
                update / (self._steps.batches_per_epoch * self._steps.updates_per_batch), 6
            ),
            data_position=update,
            time=self._run.elapsed(),
            metrics=metrics,
            scores=metrics,
            since_log={"sums": {}, "newest": {}, "updates": 0},
            trial=trial + 1,
        )


def _load_trials(
    config: AutoencoderConfig, run: Run, model: Model
) -> list[Hyperparameters]:
    """Return the settings of all trials: drawn, or those that a resumed search has."""
    path = run.directory.path / _TRIALS
    if path.exists():
        return [Hyperparameters(**entry) for entry in json.loads(path.read_text())]
    assert config.search is not None, "checked by is_search"
    first = get_settings(config, model)._replace(learning_rate=config.initial_learning_rate)
    trials = draw_trials(first, config.search, config.run.seed, config.searched)
    text = json.dumps([trial._asdict() for trial in trials], indent=2)
    write_atomically(path, text + "\n")
    return trials


def _rung_folder(folder: Path, number: int) -> Path:
    return folder / f"rung-{number + 1}"


def _find_rung(folder: Path, num_trials: int, num_rungs: int) -> tuple[int, list[int]]:
    """Return the newest rung that has a checkpoint, and its trials."""
    rungs = range(num_rungs)
    number = max((n for n in rungs if checkpoints_in(_rung_folder(folder, n))), default=0)
    if number == 0:
        return 0, list(range(num_trials))
    path = _rung_folder(folder, number) / "trials.json"
    return number, json.loads(path.read_text())


def _start_rung(folder: Path, number: int, alive: list[int], state: TrainState) -> None:
    """Write the state of the trials that continue, and delete that of the rung before."""
    before, path = _rung_folder(folder, number - 1), _rung_folder(folder, number)
    manifest = read_manifest(checkpoints_in(before)[-1])
    make_folder(path)
    write_atomically(path / "trials.json", json.dumps(alive))
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        progress = {name: manifest[name] for name in _PROGRESS}
        checkpoints.save(state, manifest["update"], **progress)
    for checkpoint in checkpoints_in(before):
        discard(checkpoint)


def _read_update(folder: Path) -> int:
    """Return the update of the newest checkpoint in a folder, 0 if there is none."""
    saved = checkpoints_in(folder)
    return read_manifest(saved[-1])["update"] if saved else 0


def _discard_later(best: Checkpoints, rung: Path) -> None:
    """Delete models from after the point at which a search is resumed."""
    update = _read_update(rung)
    for path in best.saved():
        if read_manifest(path)["update"] > update:
            discard(path)


def _discard_worse(best: Checkpoints) -> None:
    """Delete all models but the best: the newest is always the best so far."""
    for path in best.saved()[:-1]:
        discard(path)


def _finish(
    config: AutoencoderConfig,
    run: Run,
    trials: Sequence[Hyperparameters],
    ends: Sequence[int],
) -> AutoencoderConfig:
    """Report the trials, and record the chosen settings as those of the run."""
    (checkpoint,) = checkpoints_in(run.directory.checkpoints)
    chosen = read_manifest(checkpoint)["trial"] - 1
    results = build_results(run.directory.read_metrics(), trials, ends, chosen)
    metrics = run.summary["metrics"]
    run.summary["metrics"] = {n: v for n, v in metrics.items() if "_trial_" not in n}
    run.summary["trials"] = [result._asdict() for result in results]
    run.summary["chosen_trial"] = chosen + 1
    save_section(run.directory.path, "search", build_table(results))
    settings = ", ".join(
        f"{name.replace('_', ' ')} {value:g}"
        for name, value in trials[chosen]._asdict().items()
    )
    run.closing_notes["search"] = f"trial {chosen + 1} of {len(trials)}: {settings}"
    record = run.directory.path / "config.yml"
    options = trials[chosen]._asdict() | {"search": None, "search_over": []}
    text = yaml.safe_dump(load_yaml(record) | options, sort_keys=False)
    write_atomically(record, text)
    shutil.rmtree(run.directory.path / _FOLDER, ignore_errors=True)
    return replace_options(config, **options)
