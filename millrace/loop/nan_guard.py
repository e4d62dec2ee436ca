"""Losses and gradients that are not numbers: named with the update they happened at."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from millrace.plan import Plan

_log = logging.getLogger("millrace")
_MOST_SKIPPED = 24
"""In a row, by dynamic loss scaling: then its factor, at most 2^24, is at its smallest."""


class NonFiniteError(FloatingPointError):
    """A loss or gradient was not a finite number, and the run is to stop then."""


def _remedy(plan: Plan) -> str:
    """Say what to do about a training that has diverged."""
    if plan.types.compute != "float16" or plan.loss_scaling == "dynamic":
        return "Start again with a smaller learning rate."
    return (
        "Start again with a smaller learning rate, or with loss_scaling dynamic, which "
        "leaves out an update that is too large for float16."
    )


class NonFiniteCheck:
    """Looks at every update's loss; warns once, or stops if it is told to.

    Args:
        plan: Its fp_exceptions stop at the first one, also of a gradient.
        update: Updates made before the first call.
        updates_per_epoch: To say where in the run it happened.
        stops_diverged: Whether to stop where the loss stays so.
    """

    def __init__(
        self,
        plan: Plan,
        update: int,
        updates_per_epoch: int | None = None,
        *,
        stops_diverged: bool = False,
    ) -> None:
        self._plan = plan
        self._update = update
        self._updates_per_epoch = updates_per_epoch
        self._stops_diverged = stops_diverged
        self._lost = 0
        self._warned = False

    def check(self, info: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Fetch the info of a call, look at it and return it."""
        values = {name: np.asarray(jax.device_get(value)) for name, value in info.items()}
        finite = np.isfinite(values["loss"])
        if self._plan.fp_exceptions:
            finite &= values["gradients_finite"] > 0
        self._count_lost(finite)
        if not finite.all():
            self._report(values["loss"], int(np.argmin(finite)))
        self._update += len(finite)
        return values

    def _count_lost(self, finite: np.ndarray) -> None:
        """Count the updates since the last one whose loss was finite."""
        places = np.flatnonzero(finite)
        before, last = (0, places[-1]) if len(places) else (self._lost, -1)
        self._lost = before + len(finite) - 1 - last

    def _report(self, losses: np.ndarray, first: int) -> None:
        update = self._update + first + 1
        what = f"The loss is {losses[first]:g}"
        if np.isfinite(losses[first]):
            what = "A gradient is not finite"
        where = f"{what} at update {update}"
        if self._updates_per_epoch:
            where += f" (epoch {update / self._updates_per_epoch:.2f})"
        if self._plan.fp_exceptions:
            raise NonFiniteError(f"{where}; fp_exceptions stops there.")
        may_be_lost = _MOST_SKIPPED if self._plan.loss_scaling == "dynamic" else 0
        if self._stops_diverged and self._lost > may_be_lost:
            raise NonFiniteError(f"{where}: training has diverged. {_remedy(self._plan)}")
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s. Training goes on; fp_exceptions would stop at this update.", where
            )
