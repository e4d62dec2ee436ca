"""HTML pages that need no other file, and the parts they are made of."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from millrace.drawing.interactive import CHART_DATA, chart_script
from millrace.drawing.style import COLORS, FIGURES, INTERACTIVE, PAGE
from millrace.numbers import format_value

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline';
 {sources}form-action 'none'; base-uri 'none'">
<title>{title}</title>
<style>{style}</style></head><body{attributes}>
{body}
{scripts}</body></html>
"""

Cell = str | tuple[str, str]
"""The text of a table cell, or the text and its CSS class."""


def page(
    title: str, body: str, *, wide: bool = False, script: str = "", polls: bool = False
) -> str:
    """Return a page.

    Args:
        title: The title of the window.
        body: The content. If it has interactive charts, the page has their script.
        wide: Whether the page uses the whole window.
        script: Another script of ours.
        polls: Whether the scripts may read from the server that the page is from.
    """
    scripts = [script] if script else []
    if scripts or CHART_DATA in body:
        scripts.insert(0, chart_script())
    # Only these very scripts may run, whatever else gets into a page.
    allowed = " ".join(f"'sha256-{_hash(each)}'" for each in scripts)
    sources = f"script-src {allowed}; " if scripts else ""
    sources += "connect-src 'self'; " if polls else ""
    text = _PAGE.format(
        title=escape(title),
        sources=sources,
        style=COLORS + FIGURES + PAGE + (INTERACTIVE if scripts else ""),
        attributes=' class="wide"' if wide else "",
        body=body,
        scripts="".join(f"<script>{each}</script>\n" for each in scripts),
    )
    # Names of files, and so those of classes, may be any bytes.
    return text.encode(errors="backslashreplace").decode()


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def section(heading: str, content: str) -> str:
    """Return content under a heading, or nothing if there is no content."""
    return f"<h2>{escape(heading)}</h2>{content}" if content else ""


def table(
    rows: Iterable[Sequence[Cell]],
    *,
    head: Sequence[Cell] = (),
    foot: Sequence[Cell] = (),
    css_class: str = "",
) -> str:
    """Return a table whose first column names the rows, or nothing if there are none."""
    body = "".join(map(_row, rows))
    if not body:
        return ""
    if head:
        heading = "".join(_cell(cell, "th") for cell in head)
        body = f"<thead><tr>{heading}</tr></thead><tbody>{body}</tbody>"
    if foot:
        body += f"<tfoot>{_row(foot)}</tfoot>"
    wrapper = f"scroll {css_class}".strip()
    return f'<div class="{wrapper}"><table>{body}</table></div>'


def value_table(values: Mapping[str, Any]) -> str:
    """Return a table of names and JSON values."""
    return table((str(name), format_value(value)) for name, value in values.items())


def _row(cells: Sequence[Cell]) -> str:
    name, *values = cells
    return f"<tr>{_cell(name, 'th')}{''.join(_cell(v, 'td') for v in values)}</tr>"


def _cell(cell: Cell, tag: str) -> str:
    text, css_class = (cell, "") if isinstance(cell, str) else cell
    attribute = f' class="{css_class}"' if css_class else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"


def figure(content: str, caption: str = "", note: str = "") -> str:
    """Return a figure with its caption above."""
    small = f" <small>{escape(note)}</small>" if note else ""
    above = f"<figcaption>{escape(caption)}{small}</figcaption>" if caption else ""
    return f"<figure>{above}{content}</figure>"


def figures(contents: Iterable[str]) -> str:
    """Return figures side by side, or nothing if there are none."""
    inside = "".join(contents)
    return f'<div class="figures">{inside}</div>' if inside else ""


def image(png: str, alt: str) -> str:
    """Return an image, given in base64, that is a part of the page itself."""
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{escape(png)}">'


def details(summary: str, content: str) -> str:
    """Return content that is folded away, or nothing if there is none."""
    if not content:
        return ""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
