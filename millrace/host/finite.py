"""Losses and gradients that are not numbers: named with the update they happened at."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.plan import Plan

_log = logging.getLogger("millrace")


class NotFinite(FloatingPointError):
    """A loss or gradient was not a finite number, and the plan says to stop then."""


class FiniteWatch:
    """Looks at every update's loss; warns once, or stops if the plan says so.

    Args:
        plan: Its fp_exceptions decide.
        update: Updates made before the first call.
        updates_per_epoch: To say where in the run it happened.
    """

    def __init__(
        self, plan: Plan, update: int, updates_per_epoch: int | None = None
    ) -> None:
        self._plan = plan
        self._update = update
        self._updates_per_epoch = updates_per_epoch
        self._warned = False

    def check(self, info: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Fetch the info of a call, look at it and return it."""
        values = {name: np.asarray(value) for name, value in info.items()}
        finite = np.isfinite(values["loss"])
        if self._plan.fp_exceptions:
            finite &= values["gradients_finite"] > 0
        if not finite.all():
            self._report(values["loss"], int(np.argmin(finite)))
        self._update += len(finite)
        return values

    def _report(self, losses: np.ndarray, first: int) -> None:
        update = self._update + first + 1
        what = f"The loss is {losses[first]:g}"
        if np.isfinite(losses[first]):
            what = "A gradient is not finite"
        where = f"{what} at update {update}"
        if self._updates_per_epoch:
            where += f" (epoch {update / self._updates_per_epoch:.2f})"
        if self._plan.fp_exceptions:
            raise NotFinite(f"{where}; fp_exceptions stops there.")
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s. Training goes on; fp_exceptions would stop at this update.", where
            )
