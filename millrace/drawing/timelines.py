"""Draw timelines, predicted or measured: devices from top to bottom, time to the right."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from millrace.config import ConfigurationError
from millrace.drawing.html import page, section, table, value_table
from millrace.drawing.style import LIGHT
from millrace.drawing.svg import (
    Drawing,
    Label,
    Line,
    Rect,
    Shape,
    estimate_width,
    to_svg,
)
from millrace.numbers import TimeUnit, choose_time_unit, format_percent, linear_ticks
from millrace.schedule.timeline import (
    KIND_NAMES,
    DeviceUse,
    Span,
    Timeline,
    device_uses,
    idle_share,
    time_range,
)

_SUFFIXES = (".svg", ".png", ".html")
_MARGIN, _LABEL_WIDTH, _FIGURE_WIDTH = 20, 128, 178
_LANE, _NARROW_LANE, _GAP = 30, 22, 8
_TEXT, _SMALL = 13, 11

NamedTimelines = Sequence[tuple[str, Timeline]]
"""Names, which may be empty, and the spans of each timeline."""


def check_drawing_path(path: Path) -> None:
    """Reject a file of a kind that cannot be drawn, or in a folder that does not exist."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigurationError(
            f"The file of a drawing must end in {', '.join(_SUFFIXES)}; got {path}."
        )
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"There is no folder {path.parent} for {path.name}. Create it first."
        )


def draw_timelines(
    timelines: NamedTimelines,
    path: Path | str,
    *,
    title: str = "Pipeline",
    subtitle: str = "",
    facts: Mapping[str, str] | None = None,
    unit: TimeUnit | None = None,
) -> None:
    """Draw timelines below each other, to one scale of time.

    Args:
        timelines: A name and the spans of each; a name may be empty.
        path: A file that ends in .svg, .png or .html.
        title: The title of the drawing.
        subtitle: A line below the title.
        facts: Names and values for a table; only .html has one.
        unit: The unit of the time axis; if None, one that suits the timelines.
    """
    path = Path(path)
    check_drawing_path(path)
    unit = unit or _choose_unit(timelines)
    drawing = _lay_out(timelines, title=title, subtitle=subtitle, unit=unit)
    kind = path.suffix.lower()
    if kind == ".png":
        from millrace.drawing.png import write_png

        write_png(drawing, LIGHT, path)
    elif kind == ".svg":
        path.write_text(to_svg(drawing, LIGHT) + "\n", encoding="utf-8")
    else:
        body = f'<div class="scroll">{to_svg(drawing)}</div>'
        body += section("Summary", value_table(facts or {}))
        for name, timeline in timelines:
            body += section(name or "Devices", _device_table(timeline, unit))
        path.write_text(page(title, body, wide=True), encoding="utf-8")


def timelines_svg(timelines: NamedTimelines, *, title: str) -> str:
    """Return a drawing of timelines as a part of a page."""
    unit = _choose_unit(timelines)
    return to_svg(_lay_out(timelines, title=title, subtitle="", unit=unit))


def _choose_unit(timelines: NamedTimelines) -> TimeUnit:
    ranges = [time_range(timeline) for _, timeline in timelines]
    return choose_time_unit(max(end - start for start, end in ranges))


def _device_table(timeline: Timeline, unit: TimeUnit) -> str:
    uses = device_uses(timeline)
    return table(
        [_device_row(str(use.device), [use], unit) for use in uses],
        head=["device", "stages", "busy", "idle", "idle share", "micro-batches held"],
        foot=_device_row("all", uses, unit),
        css_class="numbers",
    )


def _device_row(name: str, uses: Sequence[DeviceUse], unit: TimeUnit) -> list[str]:
    idle = sum(use.idle_seconds for use in uses)
    held = uses[0].held if len(uses) == 1 else {}
    return [
        name,
        ", ".join(map(str, held)),
        unit.format(sum(use.seconds for use in uses) - idle),
        unit.format(idle),
        format_percent(idle_share(uses)),
        ", ".join(map(str, held.values())),
    ]


def _lay_out(
    timelines: NamedTimelines, *, title: str, subtitle: str, unit: TimeUnit
) -> Drawing:
    """Draw named timelines below each other, all to the same scale of time."""
    spans = [span for _, timeline in timelines for span in timeline]
    longest = max(end - start for start, end in (time_range(t) for _, t in timelines))
    width = _plot_width(spans, longest)
    shapes: list[Shape] = [_text(_MARGIN, 30, title, size=18, bold=True)]
    y = 58.0
    if subtitle:
        shapes.append(_text(_MARGIN, y - 4, subtitle, color="muted"))
        y += 24
    shapes += _draw_legend(spans, y)
    y += 26
    for name, timeline in timelines:
        if name:
            shapes.append(_text(_MARGIN, y + 8, name, bold=True))
            y += 26
        chart = _TimelineChart(timeline, y, width, longest, unit)
        shapes += chart.draw()
        y = chart.bottom + 18
    return Drawing(title, _MARGIN + _LABEL_WIDTH + width + _FIGURE_WIDTH, y, shapes)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = _TEXT,
    color: str = "ink",
    bold: bool = False,
) -> Label:
    return Label(x, y, text, color=color, size=size, bold=bold)


def _plot_width(spans: Sequence[Span], longest: float) -> float:
    """Return a width with room for the numbers in most boxes, within limits."""
    lengths = sorted(
        span.end - span.start
        for span in spans
        if span.micro_batch is not None and span.end > span.start
    )
    typical = lengths[len(lengths) // 4] if lengths else longest
    return min(max(760.0, 17 * longest / typical if typical else 0.0), 2200.0)


def _draw_legend(spans: Sequence[Span], y: float) -> list[Shape]:
    kinds = {span.kind for span in spans}
    entries = [(kind, name, "") for kind, name in KIND_NAMES.items() if kind in kinds]
    entries += [("surface", "micro-batch 0", "ink"), ("idle", "idle", "")]
    shapes: list[Shape] = []
    x = float(_MARGIN)
    for fill, name, outline in entries:
        box = (x, y - 7, 22, 14)
        shapes.append(Rect(*box, fill, outline=outline, outline_width=2))
        shapes.append(_text(x + 29, y, name))
        x += 29 + estimate_width(name, _TEXT) + 24
    return shapes


class _TimelineChart:
    """One timeline: a band per device, and in it a lane per stage."""

    def __init__(
        self, timeline: Timeline, top: float, width: float, longest: float, unit: TimeUnit
    ) -> None:
        self._timeline, self._unit = timeline, unit
        self._scale = width / longest if longest else 0.0
        self._figures = _MARGIN + _LABEL_WIDTH + width + 18
        self._start, self._end = time_range(timeline)
        self._uses = device_uses(timeline)
        self._lane_height = {
            use.device: _LANE if len(use.held) == 1 else _NARROW_LANE for use in self._uses
        }
        self._lane_y: dict[tuple[int, int], float] = {}
        y = top
        for use in self._uses:
            for stage in use.held:
                self._lane_y[use.device, stage] = y
                y += self._lane_height[use.device]
            y += _GAP
        self._axis = y
        self.bottom = y + 22

    def draw(self) -> list[Shape]:
        shapes: list[Shape] = []
        for use in self._uses:
            shapes += self._draw_band(use)
        # Outlined boxes last, so that no neighbor covers a part of the outline.
        for span in sorted(self._timeline, key=lambda span: span.micro_batch == 0):
            shapes += self._draw_span(span)
        return shapes + self._draw_time_axis()

    def _x(self, time: float) -> float:
        return _MARGIN + _LABEL_WIDTH + (time - self._start) * self._scale

    def _draw_band(self, use: DeviceUse) -> list[Shape]:
        lane = self._lane_height[use.device]
        top, height = self._lane_y[use.device, min(use.held)], lane * len(use.held)
        middle, idle = top + height / 2, format_percent(idle_share([use]))
        shapes: list[Shape] = [
            _text(_MARGIN, middle, f"device {use.device}", bold=True),
            _text(self._figures, middle, f"{idle} idle"),
        ]
        for stage, held in use.held.items():
            y, right = (
                self._lane_y[use.device, stage] + lane / 2,
                _MARGIN + _LABEL_WIDTH - 8,
            )
            shapes.append(Label(right, y, f"stage {stage}", "end", size=_SMALL))
            if held:
                shapes.append(Label(self._figures + 90, y, f"holds {held}", size=_SMALL))
        for since, until in use.idle:
            x, width = self._x(since), (until - since) * self._scale
            hint = f"device {use.device} idle, {self._unit.format(until - since)}"
            shapes.append(Rect(x, top, width, height, "idle", hint=hint))
        return shapes

    def _draw_span(self, span: Span) -> list[Shape]:
        x, y = self._x(span.start), self._lane_y[span.device, span.stage]
        width, height = self._x(span.end) - x, self._lane_height[span.device]
        box = Rect(x, y, width, height, span.kind, hint=self._hint(span))
        if span.micro_batch == 0:
            box = box._replace(outline="ink", outline_width=2.0)
        else:  # a gap between neighbors, smaller for small boxes
            box = box._replace(outline="surface", outline_width=min(1.0, width / 8))
        number = "" if span.micro_batch is None else str(span.micro_batch)
        size = min(_TEXT, (width - 3) / (0.6 * max(len(number), 1)))
        if not number or size < 8:
            return [box]
        color = f"on_{span.kind}"
        middle = (x + width / 2, y + height / 2)
        return [box, Label(*middle, number, "middle", color, size)]

    def _hint(self, span: Span) -> str:
        action = f"stage {span.stage} {KIND_NAMES[span.kind]}"
        if span.micro_batch is not None:
            action += f" of micro-batch {span.micro_batch}"
        start, end = (self._unit.format(t - self._start) for t in (span.start, span.end))
        return f"{action}, {start} to {end}"

    def _draw_time_axis(self) -> list[Shape]:
        y, seconds = self._axis, self._end - self._start
        left, right = self._x(self._start), self._x(self._end)
        shapes: list[Shape] = [Line([(left, y), (right, y)], "muted")]
        for time in linear_ticks(0.0, seconds * self._unit.per_second, at_most=13):
            x = self._x(self._start + time / self._unit.per_second)
            shapes.append(Line([(x, y), (x, y + 5)], "muted"))
            shapes.append(Label(x, y + 13, f"{time:g}", "middle", size=_SMALL))
        shapes.append(Label(_MARGIN, y + 13, self._unit.name, size=_SMALL))
        total = f"{format_percent(idle_share(self._uses))} idle in total"
        return [*shapes, _text(self._figures, y + 13, total, bold=True)]
