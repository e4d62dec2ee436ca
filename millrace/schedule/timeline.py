"""Timelines, predicted or measured: when each device was busy, and with what."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

SpanKind = Literal["forward", "backward", "weights", "all_reduce", "update"]
KIND_NAMES: dict[SpanKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weight gradients",
    "all_reduce": "all-reduce",
    "update": "weight update",
}


class Span(NamedTuple):
    """A time in which a device was busy; start and end are in seconds."""

    device: int
    start: float
    end: float
    kind: SpanKind
    stage: int
    micro_batch: int | None = None
    """None for work that is done once per weight update."""


Timeline = Sequence[Span]


def time_range(timeline: Timeline) -> tuple[float, float]:
    """Return the start of the first span and the end of the last."""
    return min(span.start for span in timeline), max(span.end for span in timeline)


class DeviceUse(NamedTuple):
    """How a device spent its time."""

    device: int
    seconds: float
    """The length of the whole timeline."""
    idle: list[tuple[float, float]]
    """Starts and ends of the times without work."""
    held: dict[int, int]
    """For each of its stages, the most micro-batches between its first and last pass."""

    @property
    def idle_seconds(self) -> float:
        """The total time without work."""
        return sum(until - since for since, until in self.idle)


def device_uses(timeline: Timeline) -> list[DeviceUse]:
    """Return how each device spent its time, by device."""
    start, end = time_range(timeline)
    device_spans: dict[int, list[Span]] = defaultdict(list)
    for span in timeline:
        device_spans[span.device].append(span)
    return [
        DeviceUse(device, end - start, _find_idle(spans, start, end), _count_held(spans))
        for device, spans in sorted(device_spans.items())
    ]


def idle_share(uses: Sequence[DeviceUse]) -> float:
    """Return the share of their time in which devices had no work."""
    seconds = sum(use.seconds for use in uses)
    return sum(use.idle_seconds for use in uses) / seconds if seconds else 0.0


def _find_idle(spans: Timeline, start: float, end: float) -> list[tuple[float, float]]:
    idle, reached = [], start
    for span in sorted(spans, key=lambda span: span.start):  # measured spans may overlap
        if span.start > reached:
            idle.append((reached, span.start))
        reached = max(reached, span.end)
    return [*idle, (reached, end)] if end > reached else idle


def _count_held(spans: Timeline) -> dict[int, int]:
    changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
    last = "weights" if any(span.kind == "weights" for span in spans) else "backward"
    for span in spans:
        own = changes[span.stage]
        if span.kind == "forward":
            own.append((span.start, 1))
        elif span.kind == last:
            own.append((span.end, -1))
    return {stage: _find_peak(changes[stage]) for stage in sorted(changes)}


def _find_peak(changes: list[tuple[float, int]]) -> int:
    if all(change > 0 for _, change in changes):
        return 0  # inference: nothing is kept for a backward pass
    # Sorted, releases (-1) come before acquisitions (+1) at the same time.
    return max(itertools.accumulate(change for _, change in sorted(changes)))
