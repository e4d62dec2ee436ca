"""Validation of weights, of checkpoints, and of averages of checkpoints."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from millrace.apps.cnn.config import CnnConfig
from millrace.checkpoint.averaging import (
    exponential_average,
    save_average,
    select_last_epochs,
    uniform_average,
)
from millrace.checkpoint.best import BestMetric
from millrace.checkpoint.find import is_checkpoint
from millrace.checkpoint.store import checkpoints_in, restore_part
from millrace.config import ConfigurationError
from millrace.data.source import Source
from millrace.distributed import coordination
from millrace.loop.evaluate import evaluate
from millrace.loop.event_schedule import EventSchedule
from millrace.numbers import format_duration, format_number
from millrace.plan import Plan
from millrace.program.ema import averaged_params
from millrace.program.evaluate import EvaluationProgram, MetricFn
from millrace.program.step import Weights
from millrace.run.run import Run
from millrace.run.saved import find_run

ACCURACY = "validation_accuracy"
BEST_BY = BestMetric(ACCURACY, "max")
"""The metric that selects the best checkpoint."""

Validate = Callable[[Weights], dict[str, float]]
"""Returns the metrics of weights."""


class Validator:
    """Validates weights on its own replicas, counting every sample once.

    Args:
        metric_fn: Returns the loss and accuracy of every sample in a batch.
        config: Gives the number of replicas, the micro-batch size and the precision.
        source: The validation samples.
    """

    def __init__(self, metric_fn: MetricFn, config: CnnConfig, source: Source) -> None:
        num_replicas = _num_replicas(config, len(jax.devices()))
        plan = Plan(
            num_replicas=num_replicas,
            precision=config.plan.precision,
            half_type=config.plan.half_type,
        )
        self._program = EvaluationProgram(metric_fn, plan)
        self.devices = self._program.devices
        self._batch_size = validation_batch_size(config) * num_replicas
        self._source = source

    def __call__(self, state: Any) -> dict[str, float]:
        """Return the mean metrics of the weights in a state, or of their average."""
        weights = Weights(averaged_params(state), state.model_state)
        placed = self._program.place_state(weights)
        return evaluate(self._program, placed, self._source, self._batch_size)


def validation_batch_size(config: CnnConfig) -> int:
    """Return the samples that each replica validates at a time."""
    return config.workflow.validation_micro_batch_size or config.plan.micro_batch_size


def _num_replicas(config: CnnConfig, num_devices: int) -> int:
    """Return the number of replicas that validate."""
    asked = config.workflow.validation_num_replicas
    if asked is None:
        num_training = config.plan.num_replicas * config.plan.devices_per_replica
        return min(num_training, num_devices)
    if asked > num_devices:
        raise ConfigurationError(
            f"validation_num_replicas is {asked}, but there are only {num_devices} devices."
        )
    return asked


# Checkpoints


def find_checkpoints(config: CnnConfig) -> list[Path]:
    """Return the checkpoints to validate in a run without training."""
    given = config.workflow.checkpoint_input_dir or config.workflow.checkpoint_dir
    assert given is not None, "checked by WorkflowOptions"
    paths = find_run(given, command="cnn train").checkpoints
    return paths if config.workflow.when_to_validate == "every" else paths[-1:]


def validate_checkpoints(
    paths: Iterable[Path],
    validate: Validate,
    like: Weights,
    run: Run,
    elapsed: Callable[[], float],
) -> list[dict[str, float]]:
    """Validate checkpoints in turn; report and return their events.

    A resumed run does not validate a checkpoint again.

    Args:
        paths: The checkpoints.
        validate: Returns the metrics of weights.
        like: The shapes and types of the weights.
        run: The run that reports the metrics.
        elapsed: Returns the seconds since the run began to train.
    """
    before = {
        event["update"]: event
        for event in run.directory.read_metrics()
        if ACCURACY in event
    }
    events = []
    for path in paths:
        run.console.status("validating")
        weights, manifest = restore_part(path, like)
        event = before.get(manifest["update"])
        if event is None:
            metrics = {f"validation_{n}": v for n, v in validate(weights).items()}
            place = {"update": manifest["update"], "epoch": manifest.get("epoch", 0.0)}
            event = {**place, "time": round(elapsed(), 3), **metrics}
            report_event(event, run)
        # The time at which the weights were saved, not validated.
        events.append({**event, "time": manifest["time"]})
    run.summary["validations"] = events
    run.summary["metrics"] |= {
        name: value for name, value in events[-1].items() if name.startswith("validation_")
    }
    return events


def delete_checkpoints(folder: Path) -> None:
    """Delete the checkpoints in a folder, and the folder if it is empty then."""
    coordination.barrier("checkpoints have been read")
    if not coordination.is_first():
        return
    for path in folder.glob("*"):
        if is_checkpoint(path):
            shutil.rmtree(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


# Averages of checkpoints


def averaging_warnings(config: CnnConfig, schedule: EventSchedule) -> list[str]:
    """Warn if there is only one checkpoint to average."""
    executions = range(0, schedule.total_updates, schedule.updates_per_execution)
    several = any(schedule.due("checkpoint", update) for update in executions[1:])
    if several or not config.recipe.averages_weights:
        return []
    return [
        "Only one checkpoint is written, at the end, so averages equal its weights. Write "
        "more with --ckpts-per-epoch."
    ]


def average_checkpoints(
    config: CnnConfig, run: Run, folder: Path, like: Weights, validate: Validate | None
) -> None:
    """Save averages of the checkpoints in `folder`; validate and report them."""
    # A resumed run may have validated some of them before.
    before = {name: event for event in run.directory.read_metrics() for name in event}
    run.summary["weight_averages"] = averages = {}
    for name, weights, made_of in _averages(config, checkpoints_in(folder), like):
        run.console.status("validating")
        facts = save_average(folder / name, weights, made_of)
        averages[name] = {"made_of": facts["made_of"]}
        if validate is None:
            continue
        event = before.get(f"{name}_accuracy")
        if event is None:
            metrics = {f"{name}_{n}": value for n, value in validate(weights).items()}
            place = {"update": facts["update"], "epoch": facts["epoch"]}
            event = {**place, "time": round(run.elapsed(), 3), **metrics}
            report_event(event, run)
        for metric in ("loss", "accuracy"):
            averages[name][f"validation_{metric}"] = event[f"{name}_{metric}"]
        accuracy = averages[name]["validation_accuracy"]
        run.closing_notes[name] = f"validation accuracy {accuracy:.4f}"


def _averages(
    config: CnnConfig, paths: Sequence[Path], like: Weights
) -> Iterator[tuple[str, Weights, Sequence[Path]]]:
    """Yield the name and weights of each average, and the checkpoints it is made of."""
    for decay in config.recipe.weight_avg_exp:
        name = f"weight_avg_exp_{decay:g}"
        yield name, exponential_average(paths, like, decay), paths
    for epochs in config.recipe.weight_avg_n:
        last = select_last_epochs(paths, epochs)
        yield f"weight_avg_N_{epochs:g}", uniform_average(last, like), last


# Reports


def report_event(event: dict[str, Any], run: Run) -> None:
    """Write an event to the metrics and print it; update 0 stands for no training."""
    for writer in run.writers:
        writer.write(event)
    hidden = () if event["update"] else ("update", "epoch")
    run.console.line(
        "  ".join(
            f"{name} {format_number(v)}" for name, v in event.items() if name not in hidden
        )
    )


def report_target(target: float | None, events: Sequence[dict[str, Any]], run: Run) -> None:
    """Report when the validation accuracy first reached the target."""
    if target is None:
        return
    validated = [event for event in events if ACCURACY in event]
    reached = next((e for e in validated if float(e[ACCURACY]) >= target), None)
    run.summary["target_accuracy"] = {
        "target": target,
        "epoch": reached and reached["epoch"],
        "seconds": reached and reached["time"],
    }
    run.closing_notes[f"accuracy {target:g}"] = (
        f"reached after {reached['epoch']:g} epochs and {format_duration(reached['time'])}"
        if reached
        else ("not reached" if validated else "not validated")
    )
