"""HTML pages that need no script and no other file, and the parts they are made of."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from millrace.drawing.style import COLORS, FIGURES, PAGE
from millrace.numbers import format_value

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline';
 form-action 'none'; base-uri 'none'">
<title>{title}</title>
<style>{style}</style></head><body{attributes}>
{body}
</body></html>
"""

Cell = str | tuple[str, str]
"""The text of a table cell, or the text and its CSS class."""


def page(title: str, body: str, *, wide: bool = False) -> str:
    """Return a page; a wide one uses the whole window."""
    return _PAGE.format(
        title=escape(title),
        style=COLORS + FIGURES + PAGE,
        attributes=' class="wide"' if wide else "",
        body=body,
    )


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
