"""The run in steps, as the reference counts: a step is some hundred batches.

Steps run on across epochs; an epoch is only so many rows.
"""

from typing import NamedTuple

from millrace.apps.autoencoder.config import TrainingOptions
from millrace.config import ConfigurationError
from millrace.loop.event_schedule import EventSchedule, check_update_count


class Steps(NamedTuple):
    """How long a run is."""

    batches_per_step: int
    total: int
    per_validation: int
    """0: only at the end."""
    batches_per_epoch: int
    """After how many batches the rows are shuffled anew."""
    updates_per_batch: int
    """Two where the reconstruction has an update of its own."""

    @property
    def num_batches(self) -> int:
        """Batches of the whole run."""
        return self.total * self.batches_per_step

    @property
    def updates_per_step(self) -> int:
        """Weight updates in a step."""
        return self.batches_per_step * self.updates_per_batch


def steps_of(config: TrainingOptions, num_rows: int) -> Steps:
    """Work out the run for so many users, or items, with ratings."""
    batch = config.resolved_batch_size
    if num_rows < batch:
        raise ConfigurationError(
            f"There are {num_rows} {config.rows} with ratings, fewer than one batch of "
            f"{batch}. Lower --batch-size."
        )
    per_step = min(config.batches_per_step, num_rows // batch)
    per_epoch = num_rows / (per_step * batch)
    rate = config.valid_per_epoch
    steps = Steps(
        batches_per_step=per_step,
        total=max(1, int(config.resolved_epochs * per_epoch)),
        per_validation=max(1, int(per_epoch / rate)) if rate else 0,
        batches_per_epoch=num_rows // batch,
        updates_per_batch=2 if config.refeeding == "detached" else 1,
    )
    check_update_count(steps.total * steps.updates_per_step)
    return steps


def schedule_of(steps: Steps, steps_per_log: int) -> EventSchedule:
    """Return when the host steps in; every step is an execution."""
    updates = steps.updates_per_step
    validation = steps.per_validation * updates
    return EventSchedule(
        updates_per_epoch=steps.batches_per_epoch * steps.updates_per_batch,
        total_updates=steps.total * updates,
        updates_per_execution=updates,
        periods={
            "log": min(steps_per_log, steps.total) * updates,
            "validate": validation,
            "checkpoint": validation,
        },
        warnings=[],
    )
