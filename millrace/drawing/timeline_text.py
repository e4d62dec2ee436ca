"""Timelines in a terminal: a line for each device, in color where there is any."""

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from millrace.drawing.quantities import percent
from millrace.schedule.timeline import (
    Span,
    SpanKind,
    Timeline,
    begin_and_end,
    device_uses,
    idle_share,
)

_STYLES = {  # the drawings' colors; the terminal picks the nearest it has
    "forward": "#ffffff on #0072b2",
    "backward": "#000000 on #e69f00",
    "all_reduce": "#000000 on #cc79a7",
    "update": "#000000 on #009e73",
}
_SIGNS = {"forward": ">", "backward": "<", "all_reduce": "+", "update": "*"}
_LABEL, _FIGURES = 7, 7


def print_timeline(timeline: Timeline, console: Console, *, width: int) -> None:
    """Print what each device does, time across, in at most `width` columns."""
    start, end = begin_and_end(timeline)
    colored = console.color_system is not None and not console.no_color
    columns = _columns(timeline, end - start, width - _LABEL - _FIGURES)
    spans_of: dict[int, list[Span]] = defaultdict(list)
    for span in timeline:
        spans_of[span.device].append(span)
    console.print(f"{'device':<{_LABEL}}{'':{columns}}{'idle':>{_FIGURES}}")
    for use in device_uses(timeline):
        row = Text(f"{use.device:>{_LABEL - 1}} ")
        row.append(_row(spans_of[use.device], start, end, columns, colored))
        console.print(row.append(f"{percent(idle_share([use])):>{_FIGURES}}"))
    console.print(_legend({span.kind for span in timeline}, colored))


def _legend(kinds: set[SpanKind], colored: bool) -> Text:
    legend = Text(" " * _LABEL)
    for kind, sign in _SIGNS.items():
        if kind in kinds:
            legend.append("   " if colored else sign, _STYLES[kind] if colored else "")
            legend.append(f" {kind.replace('_', '-')}   ")
    return legend.append("· idle")


def _columns(timeline: Timeline, seconds: float, at_most: int) -> int:
    """As many columns as give the shortest action room for its number, or all there are."""
    numbered = [span for span in timeline if span.micro_batch is not None]
    shortest = min((s.end - s.start for s in numbered if s.end > s.start), default=seconds)
    digits = len(str(max((span.micro_batch or 0 for span in numbered), default=0)))
    actions = seconds / shortest
    for columns_each in range(digits + 1, 0, -1):  # whole, so that equal times look equal
        if round(columns_each * actions) <= at_most:
            return round(columns_each * actions)
    return max(at_most, 10)


def _row(spans: Timeline, start: float, end: float, columns: int, colored: bool) -> Text:
    """What the device does in the middle of each column's time."""
    row = Text()
    middles = (
        start + (end - start) * (column + 0.5) / columns for column in range(columns)
    )
    for span, same in itertools.groupby(_at(spans, middles)):
        width = len(list(same))
        if span is None:
            row.append("·" * width, "dim" if colored else "")
        else:
            row.append(*_box(span, width, colored))
    return row


def _at(spans: Timeline, times: Iterable[float]) -> Iterator[Span | None]:
    """Return what is done at each of `times`, which must be in order."""
    waiting = deque(sorted(spans, key=lambda span: span.start))
    for time in times:
        while waiting and waiting[0].end <= time:
            waiting.popleft()
        yield waiting[0] if waiting and waiting[0].start <= time else None


def _box(span: Span, width: int, colored: bool) -> tuple[str, str]:
    """The micro-batch's number, if there is room for it and, without color, a sign."""
    number = "" if span.micro_batch is None else str(span.micro_batch)
    room = width if colored else width - 1
    fill = " " if colored else _SIGNS[span.kind]
    text = f"{number if len(number) <= room else '':{fill}<{width}}"
    return text, _STYLES[span.kind] if colored else ""
