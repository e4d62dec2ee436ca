"""Sweep over learning rates: one model for each, all trained at once."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from millrace.apps.autoencoder import data
from millrace.apps.autoencoder.data import RatingData
from millrace.apps.autoencoder.feeding import open_infeed, validation_users
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.recipe import model_of
from millrace.apps.autoencoder.scoring import Validator
from millrace.apps.autoencoder.spread import SpreadProgram, parts_of
from millrace.apps.autoencoder.steps import Steps, schedule_of, steps_of
from millrace.apps.autoencoder.sweep_options import SweepConfig
from millrace.apps.autoencoder.sweep_report import report, trials_of
from millrace.apps.autoencoder.train import first_weights
from millrace.apps.autoencoder.trials import (
    first_state,
    label,
    trials_errors,
    trials_program,
    trials_scores,
)
from millrace.config import ConfigurationError
from millrace.data.ratings_source import active_users
from millrace.host.checkpoint import Checkpoints
from millrace.host.run import Run
from millrace.host.runner import Runner
from millrace.nn.layers import num_parameters
from millrace.program.training import TrainingProgram


def sweep(config: SweepConfig, run: Run) -> None:
    """Train a model for each learning rate; results go to the run directory."""
    if _is_over(run):
        return
    devices = _devices_of(config)
    ratings = data.load(config, config.seed)
    steps = steps_of(config, len(active_users(ratings.training)))
    model = model_of(config, ratings.training.num_items)
    shares = _shares(config.exponents, len(devices))
    programs = [
        trials_program(config, model, steps, share, device)
        for share, device in zip(shares, devices, strict=True)
    ]
    program, state = _started(config, model, shares, programs)
    _describe(config, run, devices, ratings, model, steps)
    opened = Checkpoints(run.directory.checkpoints, keep=config.keep_checkpoints)
    with contextlib.closing(opened) as checkpoints:
        runner = Runner(
            program,
            open_infeed(ratings.training, config, steps, devices[0]),
            schedule_of(steps, config.steps_per_log),
            directory=run.directory,
            console=run.console,
            writers=run.writers,
            checkpoints=checkpoints,
            validate=_validator(config, model, ratings, shares, devices),
        )
        state = run.train(runner, state)
    if run.summary["status"] == "completed":
        _finish(config, run, state)


def _started(
    config: SweepConfig,
    model: Model,
    shares: Sequence[Sequence[float]],
    programs: Sequence[TrainingProgram],
) -> tuple[TrainingProgram, Any]:
    """Give every model the same first weights."""
    weights = first_weights(config, model)
    states = [
        program.init(*first_state(weights, len(share)), seed=config.seed)
        for program, share in zip(programs, shares, strict=True)
    ]
    if len(programs) == 1:
        return programs[0], states[0]
    spread = SpreadProgram(programs)
    return spread, spread.join(states)


def _devices_of(config: SweepConfig) -> list[Any]:
    devices, wanted = jax.devices(), config.num_devices
    if wanted is None:
        # A CPU's virtual devices share its cores: one program does the same work faster.
        several = devices[0].platform != "cpu"
        wanted = min(len(devices), len(config.exponents)) if several else 1
    if wanted > len(devices):
        platform = devices[0].platform
        advice = f" On CPU, --virtual-devices {wanted} makes more of them."
        raise ConfigurationError(
            f"--num-devices is {wanted}, but there are only {len(devices)} {platform} "
            f"devices.{advice if platform == 'cpu' else ''}"
        )
    return devices[:wanted]


def _shares(exponents: Sequence[float], count: int) -> list[list[float]]:
    """Divide the learning rates over the devices, as evenly as can be."""
    edges = [len(exponents) * number // count for number in range(count + 1)]
    return [list(exponents[start:stop]) for start, stop in itertools.pairwise(edges)]


def _validator(
    config: SweepConfig,
    model: Model,
    ratings: RatingData,
    shares: Sequence[Sequence[float]],
    devices: Sequence[Any],
) -> Any:
    """Return what validates every model on the device that trains it."""
    if ratings.validation is None or config.no_validation:
        return None
    batch_size = config.resolved_validation_batch_size
    users = validation_users(ratings.training, ratings.validation, batch_size)
    labels = [[label(exponent) for exponent in share] for share in shares]
    validators = [
        Validator(trials_errors(model, own), config.plan, users, batch_size, device)
        for own, device in zip(labels, devices, strict=True)
    ]

    def validate(state: Any) -> dict[str, float]:
        found = {}
        for validator, own, part in zip(validators, labels, parts_of(state), strict=True):
            found |= trials_scores(validator.means(part.params), own)
        return found

    return validate


def _describe(
    config: SweepConfig,
    run: Run,
    devices: list[Any],
    ratings: RatingData,
    model: Model,
    steps: Steps,
) -> None:
    exponents = config.exponents
    size = num_parameters(jax.eval_shape(lambda: first_weights(config, model)[0]))
    run.describe(
        devices,
        config.plan,
        None,
        models=f"{len(exponents)} of size {config.resolved_size}, {size:,} parameters each",
        ratings=data.describe(ratings, config),
        batch=f"{config.resolved_batch_size} users, re-feeding {config.refeeding}",
        updates=f"{steps.total * steps.updates_per_step:,} in {steps.total:,} steps, "
        f"{config.resolved_epochs:g} epochs",
        **{"learning rates": " ".join(f"2^{exponent:g}" for exponent in exponents)},
    )
    data.announce(ratings, config, run)


def _finish(config: SweepConfig, run: Run, state: Any) -> None:
    """Sort the results by trial; the summary's throughput is that of all together."""
    users_per_second = run.summary["samples_per_second"]
    if config.refeeding == "detached":
        users_per_second /= 2  # a reconstruction is a sample, but not a user
    means = [part.carried.means for part in parts_of(state)]
    metrics = run.summary["metrics"]
    trials = trials_of(config, jax.device_get(means), metrics, users_per_second)
    run.summary["metrics"] = {}
    for name in ("samples", "samples_per_second"):
        run.summary[name] *= len(trials)
    report(config, trials, run)


def _is_over(run: Run) -> bool:
    """Tell whether the sweep to resume is complete."""
    before = run.summary_before() if run.options.resume else {}
    if before.get("status") != "completed":
        return False
    run.console.line("The sweep is complete.")
    run.summary |= before
    run.summary["metrics"] = {n: float(v) for n, v in before["metrics"].items()}
    return True
