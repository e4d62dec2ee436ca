"""Sweep over learning rates and other settings: train all models at once, compare them."""

import contextlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from millrace.apps.autoencoder import data
from millrace.apps.autoencoder.config import AutoencoderConfig
from millrace.apps.autoencoder.config.commands import PlannedTrial, SweepConfig
from millrace.apps.autoencoder.config.data import RowKind
from millrace.apps.autoencoder.config.training import Steps
from millrace.apps.autoencoder.data import (
    RatingData,
    open_evaluation_source,
    open_infeed,
)
from millrace.apps.autoencoder.evaluate import Validator
from millrace.apps.autoencoder.joint_training import (
    StepMeans,
    build_trials_metrics,
    build_trials_program,
    compute_trials_scores,
    get_settings,
    init_trials,
)
from millrace.apps.autoencoder.model import Model
from millrace.apps.autoencoder.multi_device import (
    MultiDeviceProgram,
    get_parts,
    get_shapes,
)
from millrace.apps.autoencoder.program import (
    build_model,
    build_schedule,
    init_weights,
    plan_steps,
)
from millrace.checkpoint.store import Checkpoints
from millrace.config import ConfigurationError, as_plain, flat_options, option_value
from millrace.data.ratings.source import active_users
from millrace.distributed import coordination
from millrace.durable import finite_json, write_atomically
from millrace.loop.nan_guard import NonFiniteError
from millrace.nn.layers import num_parameters
from millrace.program.training import TrainingProgram
from millrace.report.plots import Plot
from millrace.report.sections import Points, save_section
from millrace.run.run import Run


def sweep(config: SweepConfig, run: Run) -> None:
    """Train a model for each combination; results go to the run directory."""
    if _is_complete(run):
        return
    devices = _select_devices(config)
    ratings = data.load(config.data, config.run.seed, objective=config.training.objective)
    steps = plan_steps(config, len(active_users(ratings.training)))
    model = build_model(config, ratings.training.num_items)
    trials = config.build_trials(get_settings(config, model))
    shares = _split_evenly(trials, len(devices))
    program, state = _build_program(config, model, steps, shares, devices, ratings.unit)
    _describe(config, run, devices, ratings, model, steps)
    own_device = next(device for device in devices if _is_own(device))
    opened = Checkpoints(run.directory.checkpoints, keep=config.run.keep_checkpoints)
    with contextlib.closing(opened) as checkpoints:
        state = run.train(
            program,
            state,
            open_infeed(ratings.training, config, steps, own_device),
            build_schedule(steps, config.steps_per_log),
            validate=_build_validation(config, model, ratings, shares, devices),
            checkpoints=checkpoints,
        )
    run.forget_verdicts()  # those of some rates are a result of the sweep
    if run.summary["status"] == "completed":
        _finish(config, run, trials, state)


def _select_devices(config: SweepConfig) -> list[Any]:
    # The first device of every process, then the second, so that each process gets some.
    processes = range(coordination.num_processes())
    by_process = [[d for d in jax.devices() if d.process_index == p] for p in processes]
    devices = [device for row in zip(*by_process, strict=True) for device in row]
    wanted = config.num_devices
    if wanted is None:
        # Virtual CPU devices share the cores: one program does the same work faster.
        several = devices[0].platform != "cpu" or coordination.num_processes() > 1
        wanted = min(len(devices), config.num_trials) if several else 1
    if wanted > len(devices):
        platform = devices[0].platform
        hint = f" On CPU, --virtual-devices {wanted} creates more."
        raise ConfigurationError(
            f"--num-devices is {wanted}, but there are only {len(devices)} {platform} "
            f"devices.{hint if platform == 'cpu' else ''}"
        )
    if wanted < coordination.num_processes():
        raise ConfigurationError(
            f"{config.num_trials} models on {wanted} devices leave some of the "
            f"{coordination.num_processes()} processes without one. Start fewer processes."
        )
    return devices[:wanted]


def _is_own(device: Any) -> bool:
    """Whether a device belongs to this process."""
    return device.process_index == coordination.process_id()


def _split_evenly(trials: Sequence[PlannedTrial], count: int) -> list[list[PlannedTrial]]:
    edges = [len(trials) * number // count for number in range(count + 1)]
    return [list(trials[start:stop]) for start, stop in itertools.pairwise(edges)]


def _build_program(
    config: SweepConfig,
    model: Model,
    steps: Steps,
    shares: Sequence[Sequence[PlannedTrial]],
    devices: Sequence[Any],
    unit: float,
) -> tuple[TrainingProgram, Any]:
    """Return the program for all trials, and their common initial state."""
    weights = init_weights(config, model)
    programs: list[TrainingProgram | None] = []
    states = []
    for share, device in zip(shares, devices, strict=True):
        is_own = _is_own(device)
        # Programs of other processes are built only to find the shapes of their states.
        where = device if is_own else jax.local_devices()[0]
        settings = [trial.settings for trial in share]
        program = build_trials_program(config, model, steps, settings, where, unit)
        state = program.init(*init_trials(weights, len(share)), seed=config.run.seed)
        programs.append(program if is_own else None)
        states.append(state if is_own else get_shapes(state))
    if len(programs) == 1 and programs[0] is not None:
        return programs[0], states[0]
    joined = MultiDeviceProgram(programs)
    return joined, joined.join(states)


def _build_validation(
    config: SweepConfig,
    model: Model,
    ratings: RatingData,
    shares: Sequence[Sequence[PlannedTrial]],
    devices: Sequence[Any],
) -> Any:
    """Return a function that validates every trial on the device that trains it."""
    if ratings.validation is None or config.training.no_validation:
        return None
    batch_size = config.resolved_validation_batch_size
    source = open_evaluation_source(ratings.training, ratings.validation, batch_size)
    validators = []
    for number, (share, device) in enumerate(zip(shares, devices, strict=True)):
        if _is_own(device):
            labels = [trial.label for trial in share]
            clip = config.data.clip_predictions
            metric_fn = build_trials_metrics(
                model, labels, ratings.training.biases, clip=clip
            )
            validator = Validator(
                metric_fn, config.plan, source, batch_size, device, local=True
            )
            validators.append((number, labels, validator))

    def validate(state: Any) -> dict[str, float]:
        scores: dict[str, float] = {}
        for number, labels, validator in validators:
            means = validator.compute_means(get_parts(state)[number].params)
            scores |= compute_trials_scores(means, labels)
        return _merge(coordination.gather("sweep", scores))

    return validate


def _merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _describe(
    config: SweepConfig,
    run: Run,
    devices: list[Any],
    ratings: RatingData,
    model: Model,
    steps: Steps,
) -> None:
    labels = [config.label(exponent) for exponent in config.exponents]
    rates = [f"{r:g}" for r in config.learning_rates] or [f"2^-{x}" for x in labels]
    size = num_parameters(jax.eval_shape(lambda: init_weights(config, model)[0]))
    varied = {
        name.replace("_", " "): " ".join(f"{value:g}" for value in getattr(config, name))
        for name in ("weight_decays", "dropout_rates", "input_dropout_rates")
        if getattr(config, name)
    }
    run.describe(
        devices,
        config.plan,
        None,
        models=f"{config.num_trials} of size {config.resolved_size}, {size:,} parameters "
        "each",
        ratings=data.describe(ratings, config.data),
        batch=f"{config.resolved_batch_size} {config.data.rows}, re-feeding "
        f"{config.training.refeeding}",
        updates=f"{steps.total_updates:,} in {steps.total:,} steps, "
        f"{config.resolved_epochs:g} epochs",
        **{"learning rates": " ".join(rates), **varied},
    )
    data.print_notices(ratings, config, run)


def _is_complete(run: Run) -> bool:
    """Whether the sweep to resume is complete."""
    before = run.previous_summary() if run.options.resume else {}
    if before.get("status") != "completed":
        return False
    run.console.line("The sweep is complete.")
    run.summary |= before
    run.summary["metrics"] = {n: float(v) for n, v in before["metrics"].items()}
    return True


def _finish(
    config: SweepConfig, run: Run, planned: Sequence[PlannedTrial], state: Any
) -> None:
    """Sort the results by trial, and report them."""
    rows_per_second = run.summary["samples_per_second"]
    if config.training.refeeding == "detached":
        rows_per_second /= 2  # a reconstruction is a sample, but not a row of ratings
    metrics = run.summary["metrics"]
    trials = _build_trials(planned, _gather_means(state), metrics, rows_per_second)
    run.summary["metrics"] = {}
    for name in ("samples", "samples_per_second"):  # count those of all trials
        run.summary[name] *= len(trials)
    _report(config, trials, run)


def _gather_means(state: Any) -> list[StepMeans]:
    """Return the means of every device, other processes included."""
    own = {
        str(number): [np.asarray(value).tolist() for value in part.model_state.means]
        for number, part in enumerate(get_parts(state))
        if isinstance(part.update, jax.Array)
    }
    means = _merge(coordination.gather("means", own))
    return [
        StepMeans(*map(jnp.asarray, means[str(number)])) for number in range(len(means))
    ]


class Trial(NamedTuple):
    """The result of one model."""

    base_learning_rate: float
    learning_rate: float
    rows_per_second: float
    loss: float
    rmse: float
    """RMSE on the training ratings, with dropout."""
    validation_rmse: float | None
    weight_decay: float = math.nan
    dropout_rate: float = math.nan
    input_dropout_rate: float = math.nan

    @property
    def error(self) -> float:
        """The error to compare trials by; infinite for a diverged model."""
        value = self.rmse if self.validation_rmse is None else self.validation_rmse
        return value if math.isfinite(value) else math.inf


def _build_trials(
    planned: Sequence[PlannedTrial],
    means: Sequence[StepMeans],
    metrics: dict[str, float],
    rows_per_second: float,
) -> list[Trial]:
    """Return the results by trial: the last step and the last validation."""
    losses = np.concatenate([part.loss / part.num_updates for part in means])
    errors = np.concatenate([part.rmse / part.num_updates for part in means])
    return [
        Trial(
            trial.exponent,
            rows_per_second=rows_per_second,
            loss=float(loss),
            rmse=float(error),
            validation_rmse=metrics.get(f"validation_rmse_{trial.label}"),
            **trial.settings._asdict(),
        )
        for trial, loss, error in zip(planned, losses, errors, strict=True)
    ]


def _report(config: SweepConfig, trials: Sequence[Trial], run: Run) -> None:
    """Print, plot and write the results.

    Raises:
        NonFiniteError: Every model diverged.
    """
    rows, folder = config.data.rows, run.directory.path
    by_exponent = not config.learning_rates
    for line in format_table(trials, rows, by_exponent=by_exponent):
        run.console.line(line)
    total = sum(trial.rows_per_second for trial in trials)
    run.closing_notes["throughput"] = (
        f"{total:,.0f} {rows}/s over {len(trials)} models, "
        f"{total / len(trials):,.0f} {rows}/s each"
    )
    run.summary["trials"] = [trial._asdict() for trial in trials]
    part = build_plot(trials, by_exponent=by_exponent)
    save_section(folder, "sweep", part)
    path = Plot(part.title, part.render()).save(folder / "sweep.svg")
    run.closing_notes["plot"] = str(path)
    best = min(trials, key=lambda trial: trial.error)
    if not math.isfinite(best.error):
        raise NonFiniteError(
            "Every model diverged, so there is no best learning rate. Start again with "
            "smaller learning_rates, or larger numbers in base_learning_rates."
        )
    metric = "train_rmse" if best.validation_rmse is None else "validation_rmse"
    result = {"metric": metric, "mode": "min", "value": best.error}
    run.summary["best"] = best._asdict() | result
    run.summary["metrics"]["best_rmse"] = best.error
    path = folder / "best.yml"
    write_atomically(path, yaml.safe_dump({"best": _build_best_options(config, best)}))
    rate = f"2^-{format_exponent(best.base_learning_rate)}"
    if not by_exponent:
        rate = f"learning rate {best.learning_rate:g}"
    others = [f"{_readable(n)} {getattr(best, n):g}" for n in find_varied(trials)]
    run.closing_notes["best"] = (
        f"{', '.join([rate, *others])}: millrace autoencoder train --config best "
        f"--config-path {path}"
    )


def find_varied(trials: Sequence[Trial]) -> list[str]:
    """Return the settings besides the learning rate that are not the same in all trials."""
    names = ("weight_decay", "dropout_rate", "input_dropout_rate")
    return [name for name in names if len({getattr(t, name) for t in trials}) > 1]


def _readable(name: str) -> str:
    return name.replace("dropout_rate", "dropout").replace("_", " ")


def format_exponent(exponent: float) -> str:
    """Format the exponent of a learning rate without its sign."""
    return f"{-exponent:.12g}"


def format_table(
    trials: Sequence[Trial], rows: RowKind = "users", *, by_exponent: bool = True
) -> list[str]:
    """Return the lines of a table of trials, with their exponents if they were given."""
    validated = trials[0].validation_rmse is not None
    varied = find_varied(trials)
    header = ["learning rate", *map(_readable, varied), f"{rows}/s", "loss", "RMSE"]
    lines = [["2^"] * by_exponent + header + ["validation RMSE"] * validated]
    for trial in trials:
        cells = [f"-{format_exponent(trial.base_learning_rate)}"] * by_exponent + [
            f"{trial.learning_rate:.3g}",
            *(f"{getattr(trial, name):.3g}" for name in varied),
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


def build_plot(trials: Sequence[Trial], *, by_exponent: bool = True) -> Points:
    """Return the plot of the error over the learning rate or its exponent.

    With one learning rate, the first setting that varies takes its place.
    """
    validated = trials[0].validation_rmse is not None
    varied = find_varied(trials)
    x, x_name = "base_learning_rate", "base learning rate, as a power of 2"
    if varied and len({trial.learning_rate for trial in trials}) == 1:
        x, x_name = varied[0], _readable(varied[0])
    elif not by_exponent:
        x, x_name = "learning_rate", "learning rate"
    return Points(
        title=f"Error over {_readable(x).removeprefix('base ')}",
        x_name=x_name,
        y_name="validation RMSE" if validated else "training RMSE",
        points=[[getattr(trial, x), finite_json(trial.error)] for trial in trials],
    )


def _build_best_options(config: SweepConfig, best: Trial) -> dict[str, Any]:
    """Return the options with which ``autoencoder train`` repeats the best trial."""
    defaults, plain = as_plain(AutoencoderConfig()), as_plain(config)
    given = {}
    for name, option in flat_options(AutoencoderConfig).items():
        if option.metadata.get("may_change") or name not in plain:
            continue
        # What is not given would come from the modern recipe, not from the defaults.
        matters = config.recipe == "modern" and plain[name] is not None
        if matters or plain[name] != defaults[name]:
            value = option_value(config, name)
            given[name] = str(value.resolve()) if isinstance(value, Path) else value
    for name, values in (
        ("weight_decay", config.weight_decays),
        ("dropout_rate", config.dropout_rates),
        ("input_dropout_rate", config.input_dropout_rates),
    ):
        if values:
            given[name] = getattr(best, name)
    if config.learning_rates:
        return given | {"learning_rate": best.learning_rate}
    return given | {"base_learning_rate": best.base_learning_rate}
