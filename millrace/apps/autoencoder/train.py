"""Train the recommender. Read from top to bottom: this is the application."""

import contextlib
from typing import Any

import jax

from millrace.apps.autoencoder import data
from millrace.apps.autoencoder.config import AutoencoderConfig, TrainingOptions
from millrace.apps.autoencoder.data import RatingData
from millrace.apps.autoencoder.early_stopping import EarlyStopping
from millrace.apps.autoencoder.feeding import open_infeed, validation_users
from millrace.apps.autoencoder.loss import initial_model_state, loss_of
from millrace.apps.autoencoder.model import Model, init_params
from millrace.apps.autoencoder.program import (
    COMPILER_OPTIONS,
    learning_rate_of,
    model_of,
    optimizer_of,
)
from millrace.apps.autoencoder.reference_steps import Steps, schedule_of, steps_of
from millrace.apps.autoencoder.residuals import keep_residuals, residuals
from millrace.apps.autoencoder.scoring import Validator, errors_of
from millrace.apps.autoencoder.trained import (
    best_checkpoint,
    better,
    keep_biases,
    keep_names,
    keep_ratings,
    weights_in,
)
from millrace.checkpoint.store import Checkpoints, checkpoints_in
from millrace.config import ConfigurationError
from millrace.data.ratings.matrix import Ratings
from millrace.data.ratings.source import active_users
from millrace.distributed import coordination
from millrace.loop.async_validation import AsyncValidation
from millrace.nn.layers import num_parameters
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram, training_program
from millrace.run.run import Run


def train(config: AutoencoderConfig, run: Run) -> None:
    """Train and validate as `config` says; results go to the run directory."""
    if config.testing_on_checkpoint is not None:
        from millrace.apps.autoencoder.evaluate import test_checkpoint

        return test_checkpoint(config, run)
    if _already_stopped(run):
        return
    training_device, validation_device = _devices_of(config)
    ratings = data.load(config, config.seed)
    steps = steps_of(config, len(active_users(ratings.training)))
    model = model_of(config, ratings.training.num_items)
    program = program_of(config, model, steps, training_device)
    validator = validator_of(
        config, model, ratings.training, ratings.validation, validation_device
    )
    state = program.init(*first_weights(config, model), seed=config.seed)
    keep_ratings(run.directory.path, config)
    keep_names(run.directory.path, ratings.training, config.rows)
    keep_biases(run.directory.path, ratings.column_biases)
    describe(config, run, program.devices, ratings, state.params, steps)
    folder = run.directory.checkpoints
    opened = Checkpoints(folder, keep=config.keep_checkpoints, better=better)
    with contextlib.closing(opened) as checkpoints:
        if config.build_init:
            return _write_first(checkpoints, state, run)
        infeed = open_infeed(ratings.training, config, steps, training_device)
        stopping = _stopping_early(config, validator, run)
        run.train(
            program,
            state,
            infeed,
            schedule_of(steps, config.steps_per_log),
            validate=stopping or _beside_training(config, validator, run),
            checkpoints=checkpoints,
            stops_diverged=True,
        )
    if stopping is not None and stopping.stopped:
        _say_stopped(config, run)
    if run.summary["status"] == "completed":
        _report_best(config, run, model, ratings, validation_device)


def program_of(
    config: AutoencoderConfig, model: Model, steps: Steps, device: Any
) -> TrainingProgram:
    """Return the training loop: the model's loss, the optimizer and the plan."""
    learning_rate = learning_rate_of(config, config.first_learning_rate, steps)
    return training_program(
        loss_of(model, config.refeeding, config.num_replicas, platform=device.platform),
        optimizer_of(config, learning_rate),
        config.plan,
        extra_info={"learning_rate": learning_rate},
        devices=[device] if config.num_replicas == 1 else None,
        compiler_options=COMPILER_OPTIONS,
    )


def first_weights(config: TrainingOptions, model: Model) -> tuple[Any, Any]:
    """Return the weights and the model state before the first update."""
    params = init_params(model, jax.random.key(config.seed))
    compute = config.plan.types.compute
    model_state = initial_model_state(
        model, config.refeeding, config.resolved_batch_size, compute
    )
    return params, model_state


def validator_of(
    config: TrainingOptions,
    model: Model,
    training: Ratings,
    targets: Ratings | None,
    device: Any,
) -> Validator | None:
    """Return what validates weights, if there is something to validate with."""
    if targets is None or config.no_validation:
        return None
    batch_size = config.resolved_validation_batch_size
    rows = validation_users(training, targets, batch_size)
    return Validator(errors_of(model), config.plan, rows, batch_size, device)


def describe(
    config: AutoencoderConfig,
    run: Run,
    devices: list[Any],
    ratings: RatingData,
    params: Any,
    steps: Steps,
) -> None:
    """Say what will happen, before it does."""
    updates = steps.total * steps.updates_per_step
    run.describe(
        devices,
        config.plan,
        None,
        model=f"size {config.resolved_size}, {num_parameters(params):,} parameters, "
        f"decoder {'untied' if config.untied_decoder else 'constrained'}",
        ratings=data.describe(ratings, config),
        batch=f"{config.resolved_batch_size} {config.rows}, re-feeding {config.refeeding}",
        updates=f"{updates:,} in {steps.total:,} steps, {config.resolved_epochs:g} epochs",
        **{"learning rate": f"{config.first_learning_rate:.4g}"},
    )
    data.announce(ratings, config, run)
    if ratings.validation is None and not config.no_validation:
        run.console.line("No --validation-data-file: the model is not validated.")


def _devices_of(config: AutoencoderConfig) -> tuple[Any, Any]:
    devices = jax.local_devices() if config.num_replicas > 1 else jax.devices()
    for number in config.device_numbers:
        if number >= len(devices):
            raise ConfigurationError(
                f"--select-devices asks for device {number}, but there are only "
                f"{len(devices)}, counted from 0."
            )
    training, validation = config.device_numbers
    if config.select_devices.upper() == "AUTO" and config.validates_beside_training:
        validation = min(1, len(devices) - 1)
    return devices[training], devices[validation]


def _write_first(checkpoints: Checkpoints, state: TrainState, run: Run) -> None:
    """Write the first weights in the form that the runner resumes from."""
    nothing: dict[str, Any] = {"sums": {}, "newest": {}, "updates": 0}
    checkpoints.save(
        state,
        0,
        epoch=0.0,
        data_position=0,
        time=0.0,
        metrics={},
        scores={},
        since_log=nothing,
    )
    run.summary["status"] = "completed"
    run.closing_facts["first weights"] = str(run.directory.checkpoints)


def _beside_training(
    config: AutoencoderConfig, validator: Validator | None, run: Run
) -> Validator | AsyncValidation | None:
    """Have the model validated while it is trained further, if that is asked for."""
    if validator is None or not config.validates_beside_training:
        return validator
    if coordination.num_processes() > 1:
        run.console.line("Several processes validate together, between two steps.")
        return validator
    return validator.beside_training()


def _stopping_early(
    config: AutoencoderConfig, validator: Validator | None, run: Run
) -> EarlyStopping | None:
    if config.early_stopping is None:
        return None
    if validator is None:
        raise ConfigurationError("--early-stopping needs validation, and there is none.")
    return EarlyStopping(validator, config.early_stopping, run)


def _say_stopped(config: AutoencoderConfig, run: Run) -> None:
    run.summary |= {"status": "completed", "stopped_early": True}
    run.closing_facts["stopped early"] = (
        f"no better for {config.early_stopping} validations"
    )


def _already_stopped(run: Run) -> bool:
    """Tell whether the run to resume has stopped early: then it is over."""
    before = run.summary_before() if run.options.resume else {}
    if before.get("stopped_early"):
        run.console.line("The run is complete: it has stopped early.")
        run.summary |= before
        # What is not finite is text in JSON; float() reads it.
        metrics = {name: float(value) for name, value in before["metrics"].items()}
        run.summary["metrics"] = metrics
    return bool(before.get("stopped_early"))


def _report_best(
    config: AutoencoderConfig, run: Run, model: Model, ratings: RatingData, device: Any
) -> None:
    """Say which checkpoint is the best, and test it if ratings were generated."""
    folder = run.directory.checkpoints
    best = best_checkpoint(folder)
    params, manifest = weights_in(best or checkpoints_in(folder)[-1], model, config)
    if best is not None:
        run.summary["best"] = facts = {"epoch": manifest["epoch"], **manifest["scores"]}
        run.closing_facts["best"] = (
            f"validation RMSE {facts['validation_rmse']:.4f} after epoch "
            f"{facts['epoch']:g}: {best}"
        )
    if (targets := ratings.test or ratings.validation) and not config.no_validation:
        batch_size = config.resolved_validation_batch_size
        rows = validation_users(ratings.training, targets, batch_size)
        compute = config.plan.types.compute
        missed = residuals(model, params, rows, batch_size, compute, targets.biases)
        keep_residuals(run.directory.path, *missed)
    tester = validator_of(config, model, ratings.training, ratings.test, device)
    if tester is not None:
        run.summary["metrics"]["test_rmse"] = tester.of_weights(params)["rmse"]
        run.closing_facts["noise"] = f"{ratings.noise:g}: no model foretells better"
