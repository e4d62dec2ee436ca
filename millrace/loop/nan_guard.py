"""Detect losses and gradients that are not finite, and name the update."""

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from millrace.plan import Plan

_log = logging.getLogger("millrace")
_MAX_SKIPPED = 24
"""Updates in a row that dynamic loss scaling may skip: it halves its factor at each, from
at most 2^24."""


class NonFiniteError(FloatingPointError):
    """A loss or gradient was not finite in a run that stops on it."""


def _advice(plan: Plan) -> str:
    if plan.types.compute != "float16" or plan.loss_scaling == "dynamic":
        return "Start again with a smaller learning rate."
    return (
        "Start again with a smaller learning rate, or with loss_scaling dynamic, which "
        "skips an update that overflows float16."
    )


class NonFiniteCheck:
    """Checks the loss of every update; warns once, or stops the run if asked to.

    Args:
        plan: With its fp_exceptions, the first non-finite loss or gradient stops the run.
        update: Updates made before the first call.
        updates_per_epoch: Adds the epoch to messages.
        stop_on_divergence: Whether to stop the run if the loss stays non-finite.
    """

    def __init__(
        self,
        plan: Plan,
        update: int,
        updates_per_epoch: int | None = None,
        *,
        stop_on_divergence: bool = False,
    ) -> None:
        self._plan = plan
        self._update = update
        self._updates_per_epoch = updates_per_epoch
        self._stop_on_divergence = stop_on_divergence
        self._non_finite_in_a_row = 0
        self._warned = False

    def check(self, info: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Fetch the info of a call, check it and return it."""
        values = {name: np.asarray(jax.device_get(value)) for name, value in info.items()}
        finite = np.isfinite(values["loss"])
        if self._plan.fp_exceptions:
            finite &= values["gradients_finite"] > 0
        self._count_in_a_row(finite)
        if not finite.all():
            self._report(values["loss"], int(np.argmin(finite)))
        self._update += len(finite)
        return values

    def _count_in_a_row(self, finite: np.ndarray) -> None:
        """Count the updates since the last one with a finite loss."""
        places = np.flatnonzero(finite)
        if len(places):
            self._non_finite_in_a_row = len(finite) - 1 - int(places[-1])
        else:
            self._non_finite_in_a_row += len(finite)

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
        allowed = _MAX_SKIPPED if self._plan.loss_scaling == "dynamic" else 0
        if self._stop_on_divergence and self._non_finite_in_a_row > allowed:
            raise NonFiniteError(f"{where}: training has diverged. {_advice(self._plan)}")
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s. Training continues; fp_exceptions would stop at this update.", where
            )
