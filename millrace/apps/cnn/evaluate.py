"""Validation: of weights in training, or of a run's checkpoints when it is over."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from millrace.apps.cnn.config import CnnConfig
from millrace.checkpoint.find import is_checkpoint
from millrace.checkpoint.store import restore_part
from millrace.config import ConfigurationError
from millrace.data.source import Source
from millrace.distributed import coordination
from millrace.loop.evaluate import evaluate
from millrace.plan import Plan
from millrace.program.evaluate import EvaluationProgram, MetricFn
from millrace.program.step import Weights
from millrace.run.console import figure
from millrace.run.run import Run
from millrace.run.saved import find_run

ACCURACY = "validation_accuracy"


class Validator:
    """Validates weights on replicas of its own, every sample counted once.

    Args:
        metric_fn: Returns loss and accuracy of every sample of a batch.
        config: Gives the number of replicas, the micro-batch and the precision.
        source: The validation samples.
    """

    def __init__(self, metric_fn: MetricFn, config: CnnConfig, source: Source) -> None:
        num_replicas = _num_replicas(config, len(jax.devices()))
        plan = Plan(
            num_replicas=num_replicas,
            precision=config.precision,
            half_type=config.half_type,
        )
        self._program = EvaluationProgram(metric_fn, plan)
        self.devices = self._program.devices
        micro_batch = config.validation_micro_batch_size or config.micro_batch_size
        self._batch_size = micro_batch * num_replicas
        self._source = source

    def __call__(self, state: Any) -> dict[str, float]:
        """Return the mean metrics of a state's weights."""
        weights = Weights(state.params, state.model_state)
        placed = self._program.place_state(weights)
        return evaluate(self._program, placed, self._source, self._batch_size)


def _num_replicas(config: CnnConfig, num_devices: int) -> int:
    """As asked for, or one on every device that trains, if it is there."""
    asked = config.validation_num_replicas
    if asked is None:
        return min(config.num_replicas * devices_per_replica(config), num_devices)
    if asked > num_devices:
        raise ConfigurationError(
            f"validation_num_replicas is {asked}, but there are only {num_devices} devices."
        )
    return asked


def devices_per_replica(config: CnnConfig) -> int:
    """Count the devices that the stages of a replica lie on."""
    used: set[int] = set()
    for place in config.device_mapping or range(config.num_stages):
        used |= set(place) if isinstance(place, list) else {place}
    return len(used)


def find_checkpoints(config: CnnConfig) -> list[Path]:
    """Return the checkpoints that a run without training is to validate."""
    given = config.checkpoint_input_dir or config.checkpoint_dir
    assert given is not None, "checked by WorkflowOptions"
    paths = find_run(given, command="cnn train").checkpoints
    return paths if config.validates == "every" else paths[-1:]


def validate_checkpoints(
    paths: Iterable[Path],
    validator: Callable[[Weights], dict[str, float]],
    like: Weights,
    run: Run,
    elapsed: Callable[[], float],
) -> list[dict[str, float]]:
    """Validate one checkpoint after the other; report and return what was found.

    What a run that is resumed has already validated is not validated again.

    Args:
        paths: Checkpoints.
        validator: Returns the metrics of weights.
        like: Weights of the shapes and types to expect.
        run: Whose metrics and summary receive the results.
        elapsed: The run's clock, in seconds.
    """
    before = {
        event["update"]: event
        for event in run.directory.read_metrics()
        if ACCURACY in event
    }
    found = []
    for path in paths:
        run.console.status("validating")
        weights, manifest = restore_part(path, like)
        event = before.get(manifest["update"])
        if event is None:
            metrics = {f"validation_{n}": v for n, v in validator(weights).items()}
            place = {"update": manifest["update"], "epoch": manifest.get("epoch", 0.0)}
            event = {**place, "time": round(elapsed(), 3), **metrics}
            report_event(event, run)
        # When these weights were made, not when they were validated.
        found.append({**event, "time": manifest["time"]})
    run.summary["validations"] = found
    run.summary["metrics"] |= {
        name: value for name, value in found[-1].items() if name.startswith("validation_")
    }
    return found


def report_event(event: dict[str, Any], run: Run) -> None:
    """Send an event to all that receive them, and show it; an update of 0 says nothing."""
    for writer in run.writers:
        writer.write(event)
    unsaid = () if event["update"] else ("update", "epoch")
    run.console.line(
        "  ".join(f"{name} {figure(v)}" for name, v in event.items() if name not in unsaid)
    )


def report_target(target: float | None, events: Sequence[dict[str, Any]], run: Run) -> None:
    """Say when the validation accuracy first reached the target, if it did."""
    if target is None:
        return
    validated = [event for event in events if ACCURACY in event]
    reached = next((e for e in validated if float(e[ACCURACY]) >= target), None)
    run.summary["target_accuracy"] = {
        "target": target,
        "epoch": reached and reached["epoch"],
        "seconds": reached and reached["time"],
    }
    run.closing_facts[f"accuracy {target:g}"] = (
        f"reached after {reached['epoch']:g} epochs and {time_span(reached['time'])}"
        if reached
        else ("not reached" if validated else "not validated")
    )


def time_span(seconds: float) -> str:
    """Write a time in seconds, or in minutes where that is easier to read."""
    return f"{seconds / 60:.1f} minutes" if seconds >= 100 else f"{seconds:.1f} s"


def delete_checkpoints(folder: Path) -> None:
    """Delete the checkpoints in a folder, and the folder if nothing else is in it."""
    coordination.barrier("checkpoints have been read")
    if not coordination.is_first():
        return
    for path in folder.glob("*"):
        if is_checkpoint(path):
            shutil.rmtree(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
