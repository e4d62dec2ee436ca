"""Drawings as a page by itself, with the figures as a table, light or dark."""

import html
from collections.abc import Mapping, Sequence

from millrace.drawing.canvas import Drawing
from millrace.drawing.palette import DARK, LIGHT
from millrace.drawing.quantities import Unit, percent
from millrace.drawing.svg import as_svg
from millrace.schedule.timeline import DeviceUse, Timeline, device_uses, idle_share

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; form-action 'none'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
body {{ background: var(--surface); color: var(--ink); margin: 1.5rem;
  font: 15px/1.5 system-ui, sans-serif; }}
h1, h2 {{ font-size: 1.1rem; margin: 1.6rem 0 .4rem; }}
.drawing {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .2rem 1.4rem .2rem 0; text-align: left; font-weight: normal; }}
th {{ color: var(--muted); }} thead th {{ border-bottom: 1px solid var(--grid); }}
tfoot td {{ border-top: 1px solid var(--grid); }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style></head><body>
<div class="drawing">{drawing}</div>
<h1>Figures</h1>
<table>{facts}</table>
{tables}
</body></html>
"""


def as_page(
    drawing: Drawing,
    timelines: Sequence[tuple[str, Timeline]],
    facts: Mapping[str, str],
    unit: Unit,
) -> str:
    """Return `drawing` and what can be counted in it as an HTML page."""
    return _PAGE.format(
        title=html.escape(drawing.title),
        light=css_variables(LIGHT),
        dark=css_variables(DARK),
        drawing=as_svg(drawing, {name: f"var(--{name})" for name in LIGHT}),
        facts="\n".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in facts.items()
        ),
        tables="\n".join(_table(name, timeline, unit) for name, timeline in timelines),
    )


def css_variables(colors: Mapping[str, str]) -> str:
    """Return colors as the variables that a style may use."""
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


def _table(name: str, timeline: Timeline, unit: Unit) -> str:
    uses = device_uses(timeline)
    rows = [_row(str(use.device), [use], unit) for use in uses]
    head = ["device", "stages", "at work", "idle", "idle", "held at most"]
    return (
        f"<h2>{html.escape(name or 'Devices')}</h2>\n<table>"
        f"<thead>{_cells(head, 'th')}</thead>\n<tbody>{''.join(rows)}</tbody>\n"
        f"<tfoot>{_row('all', uses, unit)}</tfoot></table>"
    )


def _row(name: str, uses: Sequence[DeviceUse], unit: Unit) -> str:
    idle = sum(use.idle_seconds for use in uses)
    held = uses[0].held if len(uses) == 1 else {}
    return _cells(
        [
            name,
            ", ".join(map(str, held)),
            unit.show(sum(use.seconds for use in uses) - idle),
            unit.show(idle),
            percent(idle_share(uses)),
            ", ".join(map(str, held.values())),
        ]
    )


def _cells(texts: Sequence[str], tag: str = "td") -> str:
    cells = (f'<{tag} class="number">{html.escape(text)}</{tag}>' for text in texts)
    return f"<tr>{''.join(cells)}</tr>\n"
