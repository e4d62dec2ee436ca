"""Sweep over learning rates: one model for each, all trained at once."""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from millrace.apps.autoencoder import data
from millrace.apps.autoencoder.config.sweep import SweepConfig
from millrace.apps.autoencoder.data import RatingData
from millrace.apps.autoencoder.feeding import open_infeed, validation_users
from millrace.apps.autoencoder.joint_training import (
    Means,
    first_state,
    label,
    trials_errors,
    trials_program,
    trials_scores,
)
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.multi_device import SpreadProgram, parts_of, shapes
from millrace.apps.autoencoder.program import model_of
from millrace.apps.autoencoder.reference_steps import Steps, schedule_of, steps_of
from millrace.apps.autoencoder.scoring import Validator
from millrace.apps.autoencoder.sweep_report import report, trials_of
from millrace.apps.autoencoder.train import first_weights
from millrace.checkpoint.store import Checkpoints
from millrace.config import ConfigurationError
from millrace.data.ratings.source import active_users
from millrace.distributed import coordination
from millrace.nn.layers import num_parameters
from millrace.program.training import TrainingProgram
from millrace.run.run import Run


def sweep(config: SweepConfig, run: Run) -> None:
    """Train a model for each learning rate; results go to the run directory."""
    if _is_over(run):
        return
    devices = _devices_of(config)
    ratings = data.load(config, config.seed)
    steps = steps_of(config, len(active_users(ratings.training)))
    model = model_of(config, ratings.training.num_items)
    shares = _shares(config.exponents, len(devices))
    here = [device.process_index == coordination.process_id() for device in devices]
    program, state = _started(config, model, steps, shares, devices)
    _describe(config, run, devices, ratings, model, steps)
    opened = Checkpoints(run.directory.checkpoints, keep=config.keep_checkpoints)
    with contextlib.closing(opened) as checkpoints:
        state = run.train(
            program,
            state,
            open_infeed(ratings.training, config, steps, devices[here.index(True)]),
            schedule_of(steps, config.steps_per_log),
            validate=_validator(config, model, ratings, shares, devices),
            checkpoints=checkpoints,
        )
    if run.summary["status"] == "completed":
        _finish(config, run, state)


def _started(
    config: SweepConfig,
    model: Model,
    steps: Steps,
    shares: Sequence[Sequence[float]],
    devices: Sequence[Any],
) -> tuple[TrainingProgram, Any]:
    """Give every model the same first weights."""
    weights = first_weights(config, model)
    programs: list[TrainingProgram | None] = []
    states = []
    for share, device in zip(shares, devices, strict=True):
        is_own = device.process_index == coordination.process_id()
        # Of another process's models the shapes are found out here.
        where = device if is_own else jax.local_devices()[0]
        program = trials_program(config, model, steps, share, where)
        state = program.init(*first_state(weights, len(share)), seed=config.seed)
        programs.append(program if is_own else None)
        states.append(state if is_own else shapes(state))
    if len(programs) == 1 and programs[0] is not None:
        return programs[0], states[0]
    spread = SpreadProgram(programs)
    return spread, spread.join(states)


def _devices_of(config: SweepConfig) -> list[Any]:
    # One of each process, then another of each: all of them get some.
    processes = range(coordination.num_processes())
    each = [[d for d in jax.devices() if d.process_index == p] for p in processes]
    devices = [device for row in zip(*each, strict=True) for device in row]
    wanted = config.num_devices
    if wanted is None:
        # A CPU's virtual devices share its cores: one program does the same work faster.
        several = devices[0].platform != "cpu" or coordination.num_processes() > 1
        wanted = min(len(devices), len(config.exponents)) if several else 1
    if wanted > len(devices):
        platform = devices[0].platform
        advice = f" On CPU, --virtual-devices {wanted} makes more of them."
        raise ConfigurationError(
            f"--num-devices is {wanted}, but there are only {len(devices)} {platform} "
            f"devices.{advice if platform == 'cpu' else ''}"
        )
    if wanted < coordination.num_processes():
        raise ConfigurationError(
            f"{len(config.exponents)} models on {wanted} devices leave some of the "
            f"{coordination.num_processes()} processes without one. Start fewer."
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
    rows = validation_users(ratings.training, ratings.validation, batch_size)
    validators = []
    for place, (share, device) in enumerate(zip(shares, devices, strict=True)):
        if device.process_index == coordination.process_id():
            own = [label(exponent) for exponent in share]
            errors, plan = trials_errors(model, own), config.plan
            validator = Validator(errors, plan, rows, batch_size, device, by_itself=True)
            validators.append((place, own, validator))

    def validate(state: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for place, own, validator in validators:
            means = validator.means(parts_of(state)[place].params)
            found |= trials_scores(means, own)
        return {
            n: v for each in coordination.gather("sweep", found) for n, v in each.items()
        }

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
        batch=f"{config.resolved_batch_size} {config.rows}, re-feeding {config.refeeding}",
        updates=f"{steps.total * steps.updates_per_step:,} in {steps.total:,} steps, "
        f"{config.resolved_epochs:g} epochs",
        **{"learning rates": " ".join(f"2^-{label(exponent)}" for exponent in exponents)},
    )
    data.announce(ratings, config, run)


def _finish(config: SweepConfig, run: Run, state: Any) -> None:
    """Sort the results by trial; the summary's throughput is that of all together."""
    rows_per_second = run.summary["samples_per_second"]
    if config.refeeding == "detached":
        rows_per_second /= 2  # a reconstruction is a sample, but not a row of ratings
    means = _means_of_all(state)
    metrics = run.summary["metrics"]
    trials = trials_of(config, means, metrics, rows_per_second)
    run.summary["metrics"] = {}
    for name in ("samples", "samples_per_second"):
        run.summary[name] *= len(trials)
    report(config, trials, run)


def _means_of_all(state: Any) -> list[Means]:
    """Return every device's means, also of other processes'."""
    own = {
        str(place): [np.asarray(value).tolist() for value in part.model_state.means]
        for place, part in enumerate(parts_of(state))
        if isinstance(part.update, jax.Array)
    }
    each = {n: v for found in coordination.gather("means", own) for n, v in found.items()}
    return [Means(*map(jnp.asarray, each[str(place)])) for place in range(len(each))]


def _is_over(run: Run) -> bool:
    """Tell whether the sweep to resume is complete."""
    before = run.previous_summary() if run.options.resume else {}
    if before.get("status") != "completed":
        return False
    run.console.line("The sweep is complete.")
    run.summary |= before
    run.summary["metrics"] = {n: float(v) for n, v in before["metrics"].items()}
    return True
