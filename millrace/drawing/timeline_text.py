"""Timelines in a terminal: a line per device, in color if the terminal has colors."""

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from millrace.drawing.style import LIGHT
from millrace.numbers import format_percent
from millrace.schedule.timeline import (
    KIND_NAMES,
    Span,
    SpanKind,
    Timeline,
    device_uses,
    idle_share,
    time_range,
)

_SIGNS = {
    **{"forward": ">", "backward": "<", "weights": "="},
    **{"all_reduce": "+", "update": "*"},
}
# The terminal picks the nearest color it has.
_STYLES = {kind: f"{LIGHT[f'on_{kind}']} on {LIGHT[kind]}" for kind in _SIGNS}
_LABEL_WIDTH, _FIGURE_WIDTH = 7, 7


def print_timeline(timeline: Timeline, console: Console, *, width: int) -> None:
    """Print what each device does over time, in at most `width` columns."""
    start, end = time_range(timeline)
    colored = console.color_system is not None and not console.no_color
    columns = _count_columns(timeline, end - start, width - _LABEL_WIDTH - _FIGURE_WIDTH)
    device_spans: dict[int, list[Span]] = defaultdict(list)
    for span in timeline:
        device_spans[span.device].append(span)
    console.print(f"{'device':<{_LABEL_WIDTH}}{'':{columns}}{'idle':>{_FIGURE_WIDTH}}")
    middles = [start + (end - start) * (n + 0.5) / columns for n in range(columns)]
    for use in device_uses(timeline):
        row = Text(f"{use.device:>{_LABEL_WIDTH - 1}} ")
        row.append(_format_row(device_spans[use.device], middles, colored))
        console.print(row.append(f"{format_percent(idle_share([use])):>{_FIGURE_WIDTH}}"))
    console.print(_format_legend({span.kind for span in timeline}, colored))


def _format_legend(kinds: set[SpanKind], colored: bool) -> Text:
    legend = Text(" " * _LABEL_WIDTH)
    for kind, sign in _SIGNS.items():
        if kind in kinds:
            legend.append("   " if colored else sign, _STYLES[kind] if colored else "")
            legend.append(f" {KIND_NAMES[kind]}   ")
    return legend.append("· idle")


def _count_columns(timeline: Timeline, seconds: float, at_most: int) -> int:
    """Return enough columns for a number in the shortest action, or `at_most`."""
    numbered = [span for span in timeline if span.micro_batch is not None]
    shortest = min((s.end - s.start for s in numbered if s.end > s.start), default=seconds)
    digits = len(str(max((span.micro_batch or 0 for span in numbered), default=0)))
    actions = seconds / shortest
    # Whole columns per action, so that equal times look equal.
    for columns_each in range(digits + 1, 0, -1):
        if round(columns_each * actions) <= at_most:
            return round(columns_each * actions)
    return max(at_most, 10)


def _format_row(spans: Timeline, middles: Iterable[float], colored: bool) -> Text:
    """Show what a device does at the middle of each column."""
    row = Text()
    for span, columns in itertools.groupby(_spans_at(spans, middles)):
        width = len(list(columns))
        if span is None:
            row.append("·" * width, "dim" if colored else "")
        else:
            row.append(*_format_span(span, width, colored))
    return row


def _spans_at(spans: Timeline, times: Iterable[float]) -> Iterator[Span | None]:
    """Yield the span at each of `times`, which must be in order."""
    waiting = deque(sorted(spans, key=lambda span: span.start))
    for time in times:
        while waiting and waiting[0].end <= time:
            waiting.popleft()
        yield waiting[0] if waiting and waiting[0].start <= time else None


def _format_span(span: Span, width: int, colored: bool) -> tuple[str, str]:
    """Return the number of the micro-batch, if it fits, and the style."""
    number = "" if span.micro_batch is None else str(span.micro_batch)
    room = width if colored else width - 1  # without color, a sign follows
    fill = " " if colored else _SIGNS[span.kind]
    text = f"{number if len(number) <= room else '':{fill}<{width}}"
    return text, _STYLES[span.kind] if colored else ""
