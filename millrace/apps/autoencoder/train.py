"""Train a recommender. Read from top to bottom: this is the application."""

from typing import Any

import jax

from millrace.apps.autoencoder import data
from millrace.apps.autoencoder.comparison import (
    TrainedRanking,
    check_positives,
    compare_with_simple_models,
    prepare_linear_items,
    report_ranking,
    score_simple_models,
)
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.training import Steps
from millrace.apps.autoencoder.data import RatingData, open_infeed
from millrace.apps.autoencoder.evaluate import Validator, build_validator, test_checkpoint
from millrace.apps.autoencoder.halving import has_stopped_improving
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.predictor import get_best_metric, load_weights
from millrace.apps.autoencoder.program import (
    build_model,
    build_program,
    build_schedule,
    init_weights,
    plan_steps,
)
from millrace.apps.autoencoder.ranking import read_network_weight
from millrace.apps.autoencoder.residuals import save_residuals
from millrace.apps.autoencoder.run_ratings import load_kept_biases, save_run_files
from millrace.apps.autoencoder.search import is_search, search
from millrace.checkpoint.best import BestMetric
from millrace.checkpoint.store import Checkpoints, checkpoints_in
from millrace.config import ConfigurationError
from millrace.data.ratings.source import active_users
from millrace.distributed import coordination
from millrace.loop.evaluate import AsyncValidation
from millrace.nn.layers import num_parameters
from millrace.program.step import TrainState
from millrace.run.run import Run

_MOST_VALIDATIONS = 1_000_000
"""More checkpoints than a search writes: it deletes them itself, between its rungs."""


def train(config: AutoencoderConfig, run: Run) -> None:
    """Train and validate as `config` says; results go to the run directory."""
    if config.testing_on_checkpoint is not None:
        return test_checkpoint(config, run)
    if _has_ended(run):
        return
    training_device, validation_device = _select_devices(config)
    run.console.status("reading ratings")
    ratings = data.load(
        config.data,
        config.run.seed,
        objective=config.training.objective,
        biases=load_kept_biases(run.directory.path, config),
    )
    if config.training.no_validation:
        ratings = ratings._replace(validation=None, unseen=None)
    check_positives(config, ratings)
    steps = plan_steps(config, len(active_users(ratings.training)))
    model = build_model(config, ratings.training.num_items)
    program = build_program(config, model, steps, training_device, ratings.unit)
    run.console.status("fitting simple models")
    linear = prepare_linear_items(config, run, ratings, validation_device)
    validator = build_validator(
        config, model, ratings.training, ratings.validation, validation_device, linear
    )
    score_simple_models(config, run, ratings, linear, validation_device)
    weights = init_weights(config, model, ratings.training)
    state = program.init(*weights, seed=config.run.seed)
    save_run_files(run.directory.path, config, ratings)
    _describe(config, run, program.devices, ratings, state.params, steps)
    searches = is_search(config, run)
    keep = _MOST_VALIDATIONS if searches else config.run.keep_checkpoints
    best = get_best_metric(config)
    with run.checkpoints(best=best.name, mode=best.mode, keep=keep) as checkpoints:
        if config.build_init:
            return _save_initial_weights(checkpoints, state, run)
        if searches:
            chosen = search(
                config, run, model, ratings, steps, training_device, checkpoints
            )
            if chosen is not None:
                _report_best(chosen, run, model, ratings, validation_device, linear)
            return
        schedule = build_schedule(steps, config.steps_per_log)
        early_stopping = _build_early_stopping(config, validator, run)
        if early_stopping is not None and (end := early_stopping.find_end()) is not None:
            schedule = schedule._replace(total_updates=end)
        run.train(
            program,
            state,
            open_infeed(ratings.training, config, steps, training_device),
            schedule,
            validate=early_stopping or _make_async(config, validator, run),
            checkpoints=checkpoints,
            stop_on_divergence=True,
        )
    if early_stopping is not None and early_stopping.stopped:
        run.summary |= {"status": "completed", "stopped_early": True}
        run.closing_notes["stopped early"] = (
            f"no improvement in {config.early_stopping} validations"
        )
    if run.summary["status"] == "completed":
        _report_best(config, run, model, ratings, validation_device, linear)


def _select_devices(config: AutoencoderConfig) -> tuple[Any, Any]:
    """Return the devices that train and validate."""
    devices = jax.local_devices() if config.num_replicas > 1 else jax.devices()
    for index in config.device_indices:
        if index >= len(devices):
            raise ConfigurationError(
                f"--select-devices asks for device {index}, but there are only "
                f"{len(devices)}, counted from 0."
            )
    training, validation = config.device_indices
    if config.select_devices.upper() == "AUTO" and config.validates_async:
        validation = min(1, len(devices) - 1)
    return devices[training], devices[validation]


def _describe(
    config: AutoencoderConfig,
    run: Run,
    devices: list[Any],
    ratings: RatingData,
    params: Any,
    steps: Steps,
) -> None:
    """Print what the run will do."""
    run.describe(
        devices,
        config.plan,
        None,
        model=f"size {config.resolved_size}, {num_parameters(params):,} parameters, "
        f"{'untied' if config.model.untied_decoder else 'constrained'} decoder",
        ratings=data.describe(ratings, config.data),
        batch=f"{config.resolved_batch_size} {config.data.rows}, re-feeding "
        f"{config.training.refeeding}",
        updates=f"{steps.total_updates:,} in {steps.total:,} steps, "
        f"{config.resolved_epochs:g} epochs",
        optimizer=describe_optimizer(config, config.initial_learning_rate),
    )
    data.print_notices(ratings, config, run)
    if ratings.validation is None and not config.training.no_validation:
        run.console.line("No --validation-data-file: the model is not validated.")
    if config.data.validation_fraction and ratings.validation is not None:
        run.console.line(
            f"No --validation-data-file: {ratings.validation.num_ratings:,} of the ratings "
            "are held out for validation."
        )


def describe_optimizer(config: AutoencoderConfig, learning_rate: float) -> str:
    """Return the optimizer, its learning rate with the schedule, and the weight decay."""
    training = config.training
    names = {"Momentum": "sgd with momentum 0.9", "SGD": "sgd", "Adam": "adam"}
    name = names[training.optimizer]
    if training.has_cosine_schedule:
        return (
            f"{name}, learning rate {learning_rate:.4g} (cosine), weight decay "
            f"{training.weight_decay:g}"
        )
    changes = zip(training.decay_factors[1:], training.decay_switches, strict=True)
    steps = ", ".join(f"x {factor:g} after {switch:.0%}" for factor, switch in changes)
    return (
        f"{name}, learning rate {learning_rate:.4g} ({steps or 'constant'}), weight decay "
        f"{training.weight_decay:g}"
    )


def _save_initial_weights(checkpoints: Checkpoints, state: TrainState, run: Run) -> None:
    """Write a checkpoint that the runner can resume from, before the first update."""
    checkpoints.save(
        state,
        0,
        epoch=0.0,
        data_position=0,
        time=0.0,
        metrics={},
        scores={},
        since_log={"sums": {}, "newest": {}, "updates": 0},
    )
    run.summary["status"] = "completed"
    run.closing_notes["initial weights"] = str(run.directory.checkpoints)


def _make_async(
    config: AutoencoderConfig, validator: Validator | None, run: Run
) -> Validator | AsyncValidation | None:
    """Let training continue during validation, if the options ask for it."""
    if validator is None or not config.validates_async:
        return validator
    if coordination.num_processes() > 1:
        run.console.line("With several processes, training waits for validation.")
        return validator
    return validator.run_async()


class EarlyStopping:
    """Validates, and stops the run after several validations without improvement.

    It decides by the metrics that the run has written, so that a resumed run stops at the
    same point as an uninterrupted one.

    Args:
        validator: Returns the metrics of a state.
        patience: Validations without improvement before the run stops.
        run: The run to stop.
        metric: What has to improve.
    """

    def __init__(
        self, validator: Validator, patience: int, run: Run, metric: BestMetric
    ) -> None:
        self._validator = validator
        self._metric = metric
        self._patience = patience
        self._run = run
        self.stopped = False

    def __call__(self, state: Any) -> dict[str, float]:
        """Return the metrics of a state; stop the run if it no longer improves."""
        # Read before validating: validation synchronizes all processes, and right after it
        # the first process appends its result.
        values = [value for _, value in self._read()]
        metrics = self._validator(state)
        values.append(self._sign * metrics[self._metric.name.removeprefix("validation_")])
        if has_stopped_improving(values, self._patience):
            self.stopped = True
            self._run.stop()
        return metrics

    def find_end(self) -> int | None:
        """Return the update at which a run to resume had stopped, if it was killed then."""
        if not self._run.options.resume:
            return None
        logged = self._read()
        values = [value for _, value in logged]
        ends = (
            update
            for number, (update, _) in enumerate(logged, 1)
            if has_stopped_improving(values[:number], self._patience)
        )
        # The first process soon cuts off events that no checkpoint has.
        end = coordination.broadcast("stopped-early", next(ends, None))
        self.stopped = end is not None
        return end

    @property
    def _sign(self) -> int:
        return 1 if self._metric.mode == "min" else -1

    def _read(self) -> list[tuple[int, float]]:
        """Return the update and the value, the smaller the better, of all validations."""
        name, events = self._metric.name, self._run.directory.read_metrics()
        return [(e["update"], self._sign * float(e[name])) for e in events if name in e]


def _build_early_stopping(
    config: AutoencoderConfig, validator: Validator | None, run: Run
) -> EarlyStopping | None:
    if config.early_stopping is None:
        return None
    if validator is None:
        raise ConfigurationError(
            "--early-stopping needs validation. Give --validation-data-file."
        )
    return EarlyStopping(validator, config.early_stopping, run, get_best_metric(config))


def _has_ended(run: Run) -> bool:
    """Whether the run to resume has stopped early, or its search is complete."""
    before = run.previous_summary() if run.options.resume else {}
    searched = "chosen_trial" in before and before.get("status") == "completed"
    if not searched and not before.get("stopped_early"):
        return False
    how = "its search has ended" if searched else "it stopped early"
    run.console.line(f"The run is complete: {how}.")
    run.summary |= before
    # JSON has non-finite numbers as text, which float() reads.
    metrics = {name: float(value) for name, value in before["metrics"].items()}
    run.summary["metrics"] = metrics
    return True


def _report_best(
    config: AutoencoderConfig,
    run: Run,
    model: Model,
    ratings: RatingData,
    device: Any,
    linear: Any,
) -> None:
    """Report the best checkpoint; test it if the ratings have a test split."""
    run.console.status("testing")
    best = run.find_best()
    path = checkpoints_in(run.directory.checkpoints)[-1]
    saved = {} if best is None else best.get("best_checkpoint", best)
    if saved.get("checkpoint") is not None:
        path = run.directory.home / saved["checkpoint"]
    params, manifest = load_weights(path, model, config)
    scores, metric = manifest["scores"], get_best_metric(config)
    if best is not None:
        own = {metric.name: best["value"]}
        run.summary["best"] = best | (own | scores if saved is best else own)
    if model.positive_from is not None:
        trained = TrainedRanking(model, params, linear, read_network_weight(manifest))
        report_ranking(config, run, trained, ratings, device)
    else:
        _report_errors(config, run, model, params, ratings, device)
    if metric.name in scores and "baselines" in run.summary:
        compare_with_simple_models(run, metric, scores)


def _report_errors(
    config: AutoencoderConfig,
    run: Run,
    model: Model,
    params: Any,
    ratings: RatingData,
    device: Any,
) -> None:
    """Report how well the ratings are predicted."""
    targets = ratings.test or ratings.validation
    if targets is not None:
        save_residuals(
            run.directory.path,
            model,
            params,
            ratings.training,
            targets,
            config.resolved_validation_batch_size,
            config.plan.types.compute,
            clip=config.data.clip_predictions,
        )
    tester = build_validator(config, model, ratings.training, ratings.test, device)
    if tester is not None:
        run.summary["metrics"]["test_rmse"] = tester.score(params)["rmse"]
        if ratings.noise is not None:
            run.closing_notes["noise"] = f"{ratings.noise:g}: no model can predict better"
