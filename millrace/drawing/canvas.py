"""Where everything in a drawing of timelines stands: devices down, time across.

The drawing is a list of shapes with named colors, so that each format draws the same.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from millrace.drawing.quantities import Unit, percent, round_steps
from millrace.schedule.timeline import (
    DeviceUse,
    Span,
    Timeline,
    begin_and_end,
    device_uses,
    idle_share,
)

KIND_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "all_reduce": "all-reduce",
    "update": "weight update",
}
MARGIN, LABELS, FIGURES = 20, 128, 178
LANE, NARROW_LANE, GAP = 30, 22, 8
TEXT, SMALL = 13, 11


class Rect(NamedTuple):
    """A filled box; `hint` is shown when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    outlined: bool = False
    hint: str = ""


class Label(NamedTuple):
    """A line of text; `y` is its middle."""

    x: float
    y: float
    text: str
    size: float = TEXT
    color: str = "ink"
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


class Line(NamedTuple):
    """A thin straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    color: str = "grid"


Shape = Rect | Label | Line


class Drawing(NamedTuple):
    """Shapes, in the order in which they are drawn, and the size of their page."""

    title: str
    width: float
    height: float
    shapes: list[Shape]


def lay_out(
    timelines: Sequence[tuple[str, Timeline]], *, title: str, subtitle: str, unit: Unit
) -> Drawing:
    """Draw `timelines` one below another, all to the same scale of time."""
    longest = max(end - start for start, end in (begin_and_end(t) for _, t in timelines))
    width = _plot_width([timeline for _, timeline in timelines], longest)
    shapes: list[Shape] = [Label(MARGIN, 30, title, size=18, bold=True)]
    y = 58.0
    if subtitle:
        shapes.append(Label(MARGIN, y - 4, subtitle, color="muted"))
        y += 24
    shapes += _legend([timeline for _, timeline in timelines], y)
    y += 26
    for name, timeline in timelines:
        if name:
            shapes.append(Label(MARGIN, y + 8, name, bold=True))
            y += 26
        chart = _Chart(timeline, y, width, longest, unit)
        shapes += chart.shapes()
        y = chart.bottom + 18
    full_width = MARGIN + LABELS + width + FIGURES
    return Drawing(title, full_width, y, shapes)


def _plot_width(timelines: Sequence[Timeline], longest: float) -> float:
    """Wide enough for numbers in the boxes, within what a screen shows."""
    boxes = sorted(
        span.end - span.start
        for timeline in timelines
        for span in timeline
        if span.micro_batch is not None and span.end > span.start
    )
    typical = boxes[len(boxes) // 4] if boxes else longest
    return min(max(760.0, 17 * longest / typical if typical else 0.0), 2200.0)


def _legend(timelines: Sequence[Timeline], y: float) -> list[Shape]:
    kinds = {span.kind for timeline in timelines for span in timeline}
    entries = [(kind, name, False) for kind, name in KIND_NAMES.items() if kind in kinds]
    entries.append(("surface", "micro-batch 0", True))
    entries.append(("idle", "idle", False))
    shapes: list[Shape] = []
    x = float(MARGIN)
    for fill, name, outlined in entries:
        shapes.append(Rect(x, y - 7, 22, 14, fill, outlined))
        shapes.append(Label(x + 29, y, name))
        x += 29 + 7.2 * len(name) + 24
    return shapes


class _Chart:
    """One timeline: a band for each device, in it a lane for each of its stages."""

    def __init__(
        self, timeline: Timeline, top: float, width: float, longest: float, unit: Unit
    ) -> None:
        self._timeline, self._unit = timeline, unit
        self._scale = width / longest if longest else 0.0
        self._figures = MARGIN + LABELS + width + 18
        self._start, self._end = begin_and_end(timeline)
        self._uses = device_uses(timeline)
        self._lane_y: dict[tuple[int, int], float] = {}
        y = top
        for use in self._uses:
            for stage in use.held:
                self._lane_y[use.device, stage] = y
                y += _lane_height(use)
            y += GAP
        self._lane_height = {use.device: _lane_height(use) for use in self._uses}
        self._axis = y
        self.bottom = y + 22

    def shapes(self) -> list[Shape]:
        shapes: list[Shape] = []
        for use in self._uses:
            shapes += self._band(use)
        # Outlined boxes last, so that no neighbor covers a part of the outline.
        for span in sorted(self._timeline, key=lambda span: span.micro_batch == 0):
            shapes += self._box(span)
        return shapes + self._time_axis()

    def _x(self, time: float) -> float:
        return MARGIN + LABELS + (time - self._start) * self._scale

    def _band(self, use: DeviceUse) -> list[Shape]:
        lane, right = _lane_height(use), self._figures
        top, height = self._lane_y[use.device, min(use.held)], lane * len(use.held)
        shapes: list[Shape] = [
            Label(MARGIN, top + height / 2, f"device {use.device}", bold=True),
            Label(right, top + height / 2, f"{percent(idle_share([use]))} idle"),
        ]
        for stage, held in use.held.items():
            y, x = self._lane_y[use.device, stage] + lane / 2, MARGIN + LABELS - 8
            shapes.append(Label(x, y, f"stage {stage}", SMALL, "muted", "end"))
            if held:
                shapes.append(Label(right + 90, y, f"holds {held}", SMALL, "muted"))
        for since, until in use.idle:
            x, width = self._x(since), (until - since) * self._scale
            hint = f"device {use.device} idle, {self._unit.show(until - since)}"
            shapes.append(Rect(x, top, width, height, "idle", hint=hint))
        return shapes

    def _box(self, span: Span) -> list[Shape]:
        x, y = self._x(span.start), self._lane_y[span.device, span.stage]
        width, height = self._x(span.end) - x, self._lane_height[span.device]
        shapes: list[Shape] = [
            Rect(x, y, width, height, span.kind, span.micro_batch == 0, self._hint(span))
        ]
        text = "" if span.micro_batch is None else str(span.micro_batch)
        size = min(TEXT, (width - 3) / (0.6 * max(len(text), 1)))
        if text and size >= 8:
            middle = (x + width / 2, y + height / 2)
            shapes.append(Label(*middle, text, size, f"on_{span.kind}", "middle"))
        return shapes

    def _hint(self, span: Span) -> str:
        what = f"stage {span.stage} {KIND_NAMES[span.kind]}"
        if span.micro_batch is not None:
            what += f" of micro-batch {span.micro_batch}"
        since, until = (self._unit.show(t - self._start) for t in (span.start, span.end))
        return f"{what}, {since} to {until}"

    def _time_axis(self) -> list[Shape]:
        y, seconds = self._axis, self._end - self._start
        shapes: list[Shape] = [Line(self._x(self._start), y, self._x(self._end), y)]
        for time in round_steps(seconds * self._unit.per_second, at_most=12):
            x = self._x(self._start + time / self._unit.per_second)
            shapes.append(Line(x, y, x, y + 5))
            shapes.append(Label(x, y + 13, f"{time:g}", SMALL, "muted", "middle"))
        shapes.append(Label(MARGIN, y + 13, self._unit.name, SMALL, "muted"))
        idle = percent(idle_share(self._uses))
        return [*shapes, Label(self._figures, y + 13, f"{idle} idle in all", bold=True)]


def _lane_height(use: DeviceUse) -> float:
    return LANE if len(use.held) == 1 else NARROW_LANE
