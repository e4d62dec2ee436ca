"""Detect losses that are not finite or explode, and name the update."""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from millrace.plan import Plan

_log = logging.getLogger("millrace")
_MAX_SKIPPED = 24
"""Updates in a row that dynamic loss scaling may skip: it halves its factor at each, from
at most 2^24."""


_EXPLODED = 100.0
"""A loss this many times larger than the first ones, for long, has exploded."""
_FIRST_UPDATES = 10
_SMALL_LOSS = 1.0
"""First losses below this count as this much: a loss may start close to 0."""
_MIN_PATIENCE, _MAX_PATIENCE = 5, 100
_RISEN = 1.5
"""A loss that ends this many times above the first ones has not been learned from."""
_LAST_UPDATES = 100


_MAX_BAD_BATCHES = 1
"""Updates in a row with a non-finite loss that may come from the data. Weights that are not
finite never recover."""


class NonFiniteError(FloatingPointError):
    """A loss or gradient was not finite in a run that stops on it."""


class DivergenceError(NonFiniteError):
    """The loss exploded in a run that stops on it."""


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
        stop_on_divergence: Whether to stop if the loss stays non-finite or explodes.
        total_updates: Number of updates of the run; a loss has exploded if it is large for
            a twentieth of them.
        first_losses: The losses of the first updates, if a resumed run has made them.
    """

    def __init__(
        self,
        plan: Plan,
        update: int,
        updates_per_epoch: int | None = None,
        *,
        stop_on_divergence: bool = False,
        total_updates: int | None = None,
        first_losses: Iterable[float] = (),
    ) -> None:
        self.divergence: dict[str, float] | None = None
        """The update, the loss there and the first loss of a run that has diverged."""
        self.first_losses = list(first_losses)
        """The losses of the first updates of the run."""
        self._last_losses = np.zeros(0)
        self._large_in_a_row = 0
        patience = (total_updates or 0) // 20
        self._patience = min(_MAX_PATIENCE, max(_MIN_PATIENCE, patience))
        self._plan = plan
        self._update = update
        self._updates_per_epoch = updates_per_epoch
        self._stop_on_divergence = stop_on_divergence
        self._non_finite_in_a_row = 0
        self._warned = False

    def check(
        self, info: Mapping[str, Any], updates: int | None = None
    ) -> dict[str, np.ndarray]:
        """Fetch the info of a call, check it and return it.

        Args:
            info: The info; leaves are (updates, ...).
            updates: Number of updates in it; what follows is ignored.
        """
        values = {
            name: np.asarray(jax.device_get(value))[:updates]
            for name, value in info.items()
        }
        finite = np.isfinite(values["loss"])
        if self._plan.fp_exceptions:
            finite &= values["gradients_finite"] > 0
        self._count_in_a_row(finite)
        if not finite.all():
            self._report(values["loss"], int(np.argmin(finite)))
        self._check_size(values["loss"])
        self._update += len(finite)
        return values

    def _check_size(self, losses: np.ndarray) -> None:
        """Report a loss that stays far above the first ones."""
        missing = _FIRST_UPDATES - len(self.first_losses)
        if missing > 0:
            self.first_losses += losses[:missing].astype(float).tolist()
        self._last_losses = np.append(self._last_losses, losses)[-_LAST_UPDATES:]
        first = self._find_first_loss()
        if not math.isfinite(first) or self.divergence is not None:
            return
        is_large = ~(np.abs(losses) <= _EXPLODED * max(first, _SMALL_LOSS))
        for index, large in enumerate(is_large):
            self._large_in_a_row = self._large_in_a_row + 1 if large else 0
            if self._large_in_a_row == self._patience:
                self._report_explosion(self._update + index + 1, float(losses[index]))
                return

    def _report_explosion(self, update: int, loss: float) -> None:
        first = self._find_first_loss()
        self.divergence = {"update": update, "loss": loss, "first_loss": first}
        text = (
            f"The loss is {loss:.4g} at update {update}{self._place(update)}; it was "
            f"{first:.4g} at the start: training has diverged."
        )
        if self._stop_on_divergence:
            raise DivergenceError(f"{text} {_advice(self._plan)}")
        _log.warning("%s Training continues. %s", text, _advice(self._plan))

    def _find_first_loss(self) -> float:
        """Return the loss at the start: that of the first update, if the next explode."""
        if not self.first_losses:
            return math.nan
        sizes = np.abs(self.first_losses)
        return float(min(sizes[0], np.median(sizes)))

    def find_rise(self) -> dict[str, float] | None:
        """Return the last loss and the first one if training has made it clearly larger.

        A loss with negative values may be any objective, so it is never reported. Every one
        of the last losses must be above the first: a single batch may be easy by chance.
        """
        first = self._find_first_loss()
        last = self._last_losses[-(self._update // 2) :]
        if len(last) < _FIRST_UPDATES or min(self.first_losses) <= 0:
            return None
        mean = float(last.mean())
        if not (last.min() > first and mean > _RISEN * max(first, _SMALL_LOSS)):
            return None
        return {"loss": mean, "updates": len(last), "first_loss": first}

    def _place(self, update: int) -> str:
        if not self._updates_per_epoch:
            return ""
        return f" (epoch {update / self._updates_per_epoch:.2f})"

    def _count_in_a_row(self, finite: np.ndarray) -> None:
        """Count the updates since the last one with a finite loss."""
        places = np.flatnonzero(finite)
        if len(places):
            self._non_finite_in_a_row = len(finite) - 1 - int(places[-1])
        else:
            self._non_finite_in_a_row += len(finite)

    def _report(self, losses: np.ndarray, first_index: int) -> None:
        update = self._update + first_index + 1
        what = f"The loss is {losses[first_index]:g}"
        if np.isfinite(losses[first_index]):
            what = "A gradient is not finite"
        where = f"{what} at update {update}{self._place(update)}"
        if self._plan.fp_exceptions:
            raise NonFiniteError(f"{where}; fp_exceptions stops there.")
        allowed = _MAX_SKIPPED if self._plan.loss_scaling == "dynamic" else _MAX_BAD_BATCHES
        has_diverged = self._non_finite_in_a_row > allowed
        if has_diverged and self.divergence is None:
            first = self._find_first_loss()
            loss = float(losses[first_index])
            self.divergence = {"update": update, "loss": loss, "first_loss": first}
        if self._stop_on_divergence and has_diverged:
            raise NonFiniteError(f"{where}: training has diverged. {_advice(self._plan)}")
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s. Training continues; fp_exceptions would stop at this update.", where
            )
