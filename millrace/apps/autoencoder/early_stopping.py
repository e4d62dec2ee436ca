"""Stop a run that no longer gets better."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from millrace.apps.autoencoder.trained import RMSE
from millrace.run.run import Run

Validate = Callable[[Any], dict[str, float]]


class EarlyStopping:
    """Validates, and stops the run after some validations without a better one.

    What counts is what the run has written of its validations, so a resumed run stops
    where an uninterrupted one would have.

    Args:
        validate: Returns the metrics of a state.
        patience: Validations that may be no better.
        run: The run to stop.
    """

    def __init__(self, validate: Validate, patience: int, run: Run) -> None:
        self._validate = validate
        self._patience = patience
        self._run = run
        self.stopped = False

    def __call__(self, state: Any) -> dict[str, float]:
        """Validate; perhaps ask for the end of the run."""
        # Read first: when all processes have validated, one of them writes it down.
        before = [
            float(event[RMSE])
            for event in self._run.directory.read_metrics()
            if RMSE in event
        ]
        found = self._validate(state)
        if has_stopped_improving([*before, found["rmse"]], self._patience):
            self.stopped = True
            self._run.stop()
        return found


def has_stopped_improving(errors: Sequence[float], patience: int) -> bool:
    """Tell whether none of the last `patience` errors is smaller than all before them."""
    ranked = [math.inf if math.isnan(error) else error for error in errors]
    return len(ranked) > patience and min(ranked[-patience:]) >= min(ranked[:-patience])
