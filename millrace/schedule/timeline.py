"""A timeline: what devices did when, predicted or measured, and what follows from it."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

SpanKind = Literal["forward", "backward", "all_reduce", "update"]


class Span(NamedTuple):
    """A stretch of time in which a device was at work."""

    device: int
    start: float
    """In seconds."""
    end: float
    kind: SpanKind
    stage: int
    micro_batch: int | None = None
    """None for what is done once per weight update."""


Timeline = Sequence[Span]


def begin_and_end(timeline: Timeline) -> tuple[float, float]:
    """Return when the first span begins and the last one ends."""
    return min(span.start for span in timeline), max(span.end for span in timeline)


class DeviceUse(NamedTuple):
    """How a device spent its time."""

    device: int
    seconds: float
    """From the beginning of the timeline to its end."""
    idle: list[tuple[float, float]]
    """Stretches of time in which it had nothing to do."""
    held: dict[int, int]
    """For each of its stages, the most micro-batches between forward and backward."""

    @property
    def idle_seconds(self) -> float:
        """The time in which it had nothing to do."""
        return sum(until - since for since, until in self.idle)


def device_uses(timeline: Timeline) -> list[DeviceUse]:
    """Return how each device spent its time, in their order."""
    start, end = begin_and_end(timeline)
    spans_of: dict[int, list[Span]] = defaultdict(list)
    for span in timeline:
        spans_of[span.device].append(span)
    return [
        DeviceUse(device, end - start, _idle(spans, start, end), _held(spans))
        for device, spans in sorted(spans_of.items())
    ]


def idle_share(uses: Sequence[DeviceUse]) -> float:
    """Return the share of the devices' time in which they had nothing to do."""
    seconds = sum(use.seconds for use in uses)
    return sum(use.idle_seconds for use in uses) / seconds if seconds else 0.0


def _idle(spans: Timeline, start: float, end: float) -> list[tuple[float, float]]:
    idle, reached = [], start
    for span in sorted(spans, key=lambda span: span.start):  # measured ones may overlap
        if span.start > reached:
            idle.append((reached, span.start))
        reached = max(reached, span.end)
    return [*idle, (reached, end)] if end > reached else idle


def _held(spans: Timeline) -> dict[int, int]:
    changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for span in spans:
        own = changes[span.stage]
        if span.kind == "forward":
            own.append((span.start, 1))
        elif span.kind == "backward":
            own.append((span.end, -1))
    return {stage: _most(changes[stage]) for stage in sorted(changes)}


def _most(changes: list[tuple[float, int]]) -> int:
    if all(change > 0 for _, change in changes):
        return 0  # inference: nothing waits for a backward
    # At one moment, what is given up comes before what is taken on.
    return max(itertools.accumulate(change for _, change in sorted(changes)))
