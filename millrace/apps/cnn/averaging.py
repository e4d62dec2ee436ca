"""The averages of a run's weights that its configuration asks for."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from millrace.apps.cnn.config import CnnConfig
from millrace.apps.cnn.evaluate import report_event
from millrace.checkpoint.averaging import (
    exponential_average,
    save_average,
    select_last_epochs,
    uniform_average,
)
from millrace.checkpoint.store import checkpoints_in
from millrace.loop.event_schedule import EventSchedule
from millrace.program.step import Weights
from millrace.run.run import Run


def warnings_about(config: CnnConfig, schedule: EventSchedule) -> list[str]:
    """Say where there is only one checkpoint to average."""
    executions = range(0, schedule.total_updates, schedule.updates_per_execution)
    several = any(schedule.due("checkpoint", update) for update in executions[1:])
    if several or not config.averages_weights:
        return []
    return [
        "Only one checkpoint is written, at the end, so averages of weights are its "
        "weights. --ckpts-per-epoch says how often one is written."
    ]


def average_checkpoints(
    config: CnnConfig,
    run: Run,
    folder: Path,
    like: Weights,
    validator: Callable[[Weights], dict[str, float]] | None,
    elapsed: Callable[[], float],
) -> None:
    """Save each average as a checkpoint, validate it if there is validation, report it.

    Args:
        config: Says which averages.
        run: Whose metrics and summary receive the results.
        folder: Of the checkpoints.
        like: Weights of the shapes and types to expect.
        validator: Returns the metrics of weights.
        elapsed: The run's clock, in seconds.
    """
    # A run that is resumed may have validated them before.
    before = {name: event for event in run.directory.read_metrics() for name in event}
    run.summary["weight_averages"] = found = {}
    for name, weights, made_of in _averages(config, checkpoints_in(folder), like):
        run.console.status("validating")
        facts = save_average(folder / name, weights, made_of)
        found[name] = {"made_of": facts["made_of"]}
        if validator is None:
            continue
        event = before.get(f"{name}_accuracy")
        if event is None:
            metrics = {f"{name}_{n}": value for n, value in validator(weights).items()}
            place = {"update": facts["update"], "epoch": facts["epoch"]}
            event = {**place, "time": round(elapsed(), 3), **metrics}
            report_event(event, run)
        for kind in ("loss", "accuracy"):
            found[name][f"validation_{kind}"] = event[f"{name}_{kind}"]
        accuracy = found[name]["validation_accuracy"]
        run.closing_notes[name] = f"validation accuracy {accuracy:.4f}"


def _averages(
    config: CnnConfig, paths: Sequence[Path], like: Weights
) -> Iterator[tuple[str, Weights, Sequence[Path]]]:
    """Make one average after the other: its name, its weights, what it was made of."""
    for decay in config.weight_avg_exp:
        yield (
            f"weight_avg_exp_{decay:g}",
            exponential_average(paths, like, decay),
            paths,
        )
    for epochs in config.weight_avg_n:
        last = select_last_epochs(paths, epochs)
        yield f"weight_avg_N_{epochs:g}", uniform_average(last, like), last
