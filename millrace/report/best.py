"""The best result of a run, and which metric decides it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from millrace.numbers import format_number
from millrace.report.metrics import readable_name, split_metric, without_length
from millrace.report.record import RunRecord, as_number

_LOWER_IS_BETTER = ("loss", "rmse", "mae", "perplexity", "error", "seconds")
_HIGHER_IS_BETTER = ("accuracy", "elbo", "likelihood", "recall", "ndcg", "per_second")
_DECISIVE = (
    *("accuracy", "log_likelihood", "elbo", "rmse", "mae", "ndcg", "recall"),
    *("perplexity", "loss"),
)
"""The quantities by which runs are judged, the most telling first."""
NOT_SAVED = "not saved"
"""How the text about a result begins whose weights no checkpoint has."""
_SPLITS = ("validation", "test", "", "train")


class Best(NamedTuple):
    """The best value of a metric, and when it was measured."""

    metric: str
    value: float
    update: int | None = None
    epoch: float | None = None
    place: str = ""
    """Which checkpoint has it, as text, if that is known."""

    def format(self) -> str:
        """Return the value and its epoch: ``0.75 at epoch 11``."""
        text = format_number(self.value) + self.format_epoch(" at ")
        return f"{text} ({NOT_SAVED})" if self.place.startswith(NOT_SAVED) else text

    def format_epoch(self, before: str = "") -> str:
        """Return the epoch after some text, or nothing if it is not known."""
        return "" if self.epoch is None else f"{before}epoch {self.epoch:.4g}"


def choose_better(metric: str) -> Callable[[Sequence[float]], float] | None:
    """Return `max` or `min`, whichever is better for a metric, if that is known."""
    if any(word in metric for word in _HIGHER_IS_BETTER):
        return max
    return min if any(word in metric for word in _LOWER_IS_BETTER) else None


def choose_metric(metrics: Iterable[str]) -> str | None:
    """Return the metric that decides which state is the best: a held-out one if any."""

    def rank(metric: str) -> tuple[int, int]:
        split, quantity = split_metric(metric)
        return _SPLITS.index(split), _DECISIVE.index(without_length(quantity))

    known = [
        metric for metric in metrics if without_length(split_metric(metric)[1]) in _DECISIVE
    ]
    return min(known, key=rank, default=None)


def find_best(record: RunRecord) -> Best | None:
    """Return the best result, from the summary or else from the log."""
    recorded = read_best(record.summary)
    if recorded is not None:
        return recorded
    metric = choose_metric(dict.fromkeys(name for event in record.events for name in event))
    best = None
    if metric is not None:
        for event in record.events:
            best = better_of(best, metric, event)
    return best


def read_best(summary: Mapping[str, Any]) -> Best | None:
    """Return the best result that the summary of a run records, if any."""
    entry = summary.get("best")
    if not isinstance(entry, dict) or not isinstance(entry.get("metric"), str):
        # A sweep records the error of its best trial as a metric.
        values = summary.get("metrics") or {}
        found = [name for name in values if name.startswith("best_")]
        entry = {"metric": found[0][5:], "value": values[found[0]]} if found else {}
    if not entry:
        return None
    value, update, epoch = (as_number(entry.get(n)) for n in ("value", "update", "epoch"))
    if not math.isfinite(value):
        return None
    return Best(
        entry["metric"],
        value,
        int(update) if math.isfinite(update) else None,
        epoch if math.isfinite(epoch) else None,
        describe_checkpoint(entry),
    )


def describe_checkpoint(entry: Mapping[str, Any]) -> str:
    """Return which checkpoint has the best result in a summary, and if none, the best one.

    >>> describe_checkpoint({"checkpoint": "checkpoints/update-44"})
    'checkpoints/update-44'
    >>> other = {"value": 0.97, "epoch": 30, "checkpoint": "checkpoints/update-66"}
    >>> describe_checkpoint({"checkpoint": None, "best_checkpoint": other})
    'not saved; best checkpoint: 0.97 at epoch 30, checkpoints/update-66'
    """
    if "checkpoint" not in entry:
        return ""
    if entry["checkpoint"] is not None:
        return str(entry["checkpoint"])
    other = entry.get("best_checkpoint")
    if not isinstance(other, dict):
        return NOT_SAVED
    best = Best("", as_number(other.get("value")), epoch=as_number(other.get("epoch")))
    return f"{NOT_SAVED}; best checkpoint: {best.format()}, {other.get('checkpoint')}"


def better_of(best: Best | None, metric: str, event: Mapping[str, Any]) -> Best | None:
    """Return the best so far, or the metric in a log event if that is better."""
    value, choose = as_number(event.get(metric)), choose_better(metric)
    if choose is None or not math.isfinite(value):
        return best
    if best is not None and choose([best.value, value]) == best.value:
        return best
    if not event.get("update"):  # measured without training
        return Best(metric, value)
    return Best(metric, value, event["update"], as_number(event.get("epoch")))


def format_best(best: Best) -> str:
    """Return a line about the best: ``validation accuracy 0.75 at epoch 11``."""
    return f"{readable_name(best.metric)} {best.format()}"
