"""Short descriptions of objects: one line in a terminal, a table in a notebook."""

import html
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

Class = TypeVar("Class", bound=type)

_MAX_REPR = 240
_STYLE = "border-left: 3px solid #4c78a8; padding: 2px 12px; margin: 4px 0"


class Card(NamedTuple):
    """What an object shows of itself."""

    title: str
    rows: Mapping[str, Any]
    """Facts by name, in the order of their importance."""


def with_card(cls: Class) -> Class:
    """Give a class with a method ``card()`` a short ``repr`` and a table in notebooks."""

    def to_text(self: Any) -> str:
        return format_text(self.card())

    def to_html(self: Any) -> str:
        return format_html(self.card())

    target: Any = cls
    target.__repr__, target._repr_html_ = to_text, to_html
    return cls


def format_text(card: Card) -> str:
    """Return a card in one line."""
    facts = ", ".join(f"{name}={value}" for name, value in card.rows.items())
    text = f"{card.title}({facts})"
    return text if len(text) <= _MAX_REPR else text[: _MAX_REPR - 2] + "…)"


def format_html(card: Card) -> str:
    """Return a card as a table."""
    rows = "".join(
        f"<tr><td>{html.escape(str(name).replace('_', ' '))}</td>"
        f"<td>{html.escape(str(value))}</td></tr>"
        for name, value in card.rows.items()
    )
    title = html.escape(card.title)
    return f'<div style="{_STYLE}"><b>{title}</b><table>{rows}</table></div>'
