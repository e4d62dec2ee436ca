"""Which checkpoint of a run is the best. Imports nothing heavy."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from millrace.config import ConfigurationError, did_you_mean

Mode = Literal["max", "min"]

_SMALLER_IS_BETTER = ("loss", "error", "rmse", "mae")


class BestMetric(NamedTuple):
    """The metric that decides which checkpoint is the best."""

    name: str
    """Its name in log events, such as ``validation_accuracy``."""
    mode: Mode
    """Whether larger or smaller is better."""

    def get(self, scores: Mapping[str, Any]) -> float | None:
        """Return the metric, or None if it is missing or not finite."""
        value = scores.get(self.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None  # numbers that are not finite are text in JSON
        return float(value) if math.isfinite(value) else None

    def is_better(self, value: float, other: float) -> bool:
        """Whether a value beats another; equal ones do not."""
        return value > other if self.mode == "max" else value < other

    def choose(self, scores: Iterable[tuple[Any, Mapping[str, Any]]]) -> Any | None:
        """Return the first of several things whose scores are the best, if any has some.

        Args:
            scores: Each thing with its scores.
        """
        best: tuple[Any, float] | None = None
        for thing, own in scores:
            value = self.get(own)
            if value is not None and (best is None or self.is_better(value, best[1])):
                best = thing, value
        return None if best is None else best[0]

    def check(self, scores: Mapping[str, Any]) -> None:
        """Raise an error unless a validation has the metric."""
        if self.name not in scores:
            raise ConfigurationError(
                f"The best checkpoint is chosen by {self.name}, but validation has only "
                f"{', '.join(sorted(scores))}.{did_you_mean(self.name, scores)}"
            )


def parse_best(best: str | None, mode: Mode | None = None) -> BestMetric | None:
    """Return the metric that a user has named, or None for an empty name.

    Args:
        best: A name; a leading minus sign means that smaller is better.
        mode: ``max`` or ``min`` (default: ``min`` for a minus sign or a name that contains
            loss, error, rmse or mae; otherwise ``max``).
    """
    if mode not in (None, "max", "min"):
        raise ConfigurationError(f"mode must be max or min, got {mode!r}.")
    if not best:
        return None
    name = best.removeprefix("-")
    is_negated = name != best
    if is_negated and mode == "max":
        raise ConfigurationError(f"{best!r} means that smaller is better, but mode is max.")
    smaller = is_negated or any(word in name for word in _SMALLER_IS_BETTER)
    return BestMetric(name, mode or ("min" if smaller else "max"))


def read_best_metric(manifest: Mapping[str, Any]) -> BestMetric | None:
    """Return the metric that the run of a checkpoint has recorded, if any."""
    match manifest.get("best_by"):
        case [str(name), "max" | "min" as mode]:
            return BestMetric(name, mode)
    return None
