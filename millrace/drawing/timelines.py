"""Draw timelines into a file: what is predicted, what was measured, or both."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from millrace.config import ConfigurationError
from millrace.drawing.canvas import lay_out
from millrace.drawing.palette import DARK, LIGHT
from millrace.drawing.quantities import Unit, unit_for
from millrace.drawing.svg import as_svg
from millrace.drawing.timeline_page import as_page, css_variables
from millrace.schedule.timeline import Timeline, begin_and_end

SUFFIXES = (".svg", ".png", ".html")


def check_picture_path(path: Path) -> None:
    """Refuse a file of a kind we do not draw, or in a folder that is not there."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(
            f"A drawing is a file that ends in {', '.join(SUFFIXES)}; got {path}."
        )
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"There is no folder {path.parent} for the drawing {path.name}. Make it first."
        )


def draw_timelines(
    timelines: Sequence[tuple[str, Timeline]],
    path: Path | str,
    *,
    title: str = "Pipeline",
    subtitle: str = "",
    facts: Mapping[str, str] | None = None,
    unit: Unit | None = None,
) -> None:
    """Draw timelines one below another, to one scale of time, as `path`'s suffix says.

    Args:
        timelines: A name and the spans of each; a name may be empty.
        path: A file that ends in .svg, .png or .html.
        title: Of the whole drawing.
        subtitle: A line below the title.
        facts: Names and values for the page's table; only .html has one.
        unit: Of the time axis; if None, the one that suits the timelines.
    """
    path = Path(path)
    check_picture_path(path)
    unit = unit or _unit_of(timelines)
    drawing = lay_out(timelines, title=title, subtitle=subtitle, unit=unit)
    kind = path.suffix.lower()
    if kind == ".png":
        from millrace.drawing.png import write_png

        write_png(drawing, LIGHT, path)
    elif kind == ".svg":
        path.write_text(as_svg(drawing, LIGHT), encoding="utf-8")
    else:
        page = as_page(drawing, timelines, facts or {}, unit)
        path.write_text(page, encoding="utf-8")


def themed_svg(
    timelines: Sequence[tuple[str, Timeline]], *, title: str, within: str
) -> tuple[str, str]:
    """Return the same as a part of a page: an SVG, and the style that it needs.

    Args:
        timelines: A name and the spans of each.
        title: Of the drawing.
        within: The CSS selector of what the SVG will stand in.
    """
    drawing = lay_out(timelines, title=title, subtitle="", unit=_unit_of(timelines))
    style = (
        f"{within} {{ {css_variables(LIGHT)} }} @media (prefers-color-scheme: dark) "
        f"{{ {within} {{ {css_variables(DARK)} }} }}"
    )
    return as_svg(drawing, {name: f"var(--{name})" for name in LIGHT}), style


def _unit_of(timelines: Sequence[tuple[str, Timeline]]) -> Unit:
    spans = [begin_and_end(timeline) for _, timeline in timelines]
    return unit_for(max(end - start for start, end in spans))
