"""The length of a run in steps, which the reference application counts in.

A step is up to 250 batches that the device trains on without returning to the host. Steps
may cross the border between two epochs.
"""

from typing import NamedTuple

from millrace.apps.autoencoder.config import TrainingConfig
from millrace.config import ConfigurationError
from millrace.loop.event_schedule import EventSchedule, check_update_count


class Steps(NamedTuple):
    """The length of a run."""

    batches_per_step: int
    total: int
    per_validation: int
    """Steps between validations; 0 for only one at the end."""
    batches_per_epoch: int
    """Batches after which the rows are shuffled again."""
    updates_per_batch: int
    """2 if the reconstruction has its own update, else 1."""

    @property
    def num_batches(self) -> int:
        """Batches in the whole run."""
        return self.total * self.batches_per_step

    @property
    def updates_per_step(self) -> int:
        """Weight updates per step."""
        return self.batches_per_step * self.updates_per_batch

    @property
    def total_updates(self) -> int:
        """Weight updates in the whole run."""
        return self.total * self.updates_per_step


def plan_steps(config: TrainingConfig, num_rows: int) -> Steps:
    """Compute the length of a run over this many rows with ratings."""
    batch_size = config.resolved_batch_size
    if num_rows < batch_size:
        raise ConfigurationError(
            f"There are {num_rows} {config.data.rows} with ratings, fewer than one batch "
            f"of {batch_size}. Lower --batch-size."
        )
    per_step = min(config.training.batches_per_step, num_rows // batch_size)
    steps_per_epoch = num_rows / (per_step * batch_size)
    rate = config.training.valid_per_epoch
    steps = Steps(
        batches_per_step=per_step,
        total=max(1, int(config.resolved_epochs * steps_per_epoch)),
        per_validation=max(1, int(steps_per_epoch / rate)) if rate else 0,
        batches_per_epoch=num_rows // batch_size,
        updates_per_batch=2 if config.training.refeeding == "detached" else 1,
    )
    check_update_count(steps.total_updates)
    return steps


def build_schedule(steps: Steps, steps_per_log: int) -> EventSchedule:
    """Return the schedule of events, in which every step is one execution."""
    validation = steps.per_validation * steps.updates_per_step
    return EventSchedule(
        updates_per_epoch=steps.batches_per_epoch * steps.updates_per_batch,
        total_updates=steps.total_updates,
        updates_per_execution=steps.updates_per_step,
        periods={
            "log": min(steps_per_log, steps.total) * steps.updates_per_step,
            "validate": validation,
            "checkpoint": validation,
        },
        warnings=[],
    )
