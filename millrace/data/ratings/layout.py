"""Finds out from the first line of a ratings file what stands where."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from millrace.config import ConfigurationError
from millrace.data.ratings.parser import Layout, is_number, shown, split_line

DELIMITERS = {b"\t": "tab", b"::": "'::'", b",": "comma", b";": "semicolon"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NAMES = {
    "user": "user userid username customer customerid uid reviewer reviewerid member "
    "memberid".split(),
    "item": "item itemid movie movieid iid asin parentasin product productid isbn book "
    "bookid game gameid song songid track trackid artist artistid anime animeid".split(),
    "rating": "rating ratings stars score overall bookrating".split(),
    "time": "time timestamp date unixreviewtime".split(),
}
"""What columns are called in the headers of well-known files, in lower case."""
NAME_COLUMNS = (
    "millrace autoencoder convert --user-column NAME --item-column NAME "
    "--rating-column NAME"
)


class Start(NamedTuple):
    """How a file begins."""

    layout: Layout
    num_bytes: int
    """To leave out: a byte order mark, blank lines, the header."""
    num_lines: int
    """The lines among them."""
    begins_with_words: bool
    """Whether the line that follows has no number in it, though it is no header."""


def find_layout(
    start: bytes,
    limits: tuple[float, float],
    columns: Mapping[str, str] | None = None,
    *,
    with_time: bool = False,
) -> Start:
    """Tell a file's layout from its first lines.

    Args:
        start: The beginning of the file, with at least one line that is not blank.
        limits: What ratings may be.
        columns: Where "user", "item", "rating" and "time" are, if not where a header or
            custom says: a column's name, or its number from 1.
        with_time: Whether times are wanted.

    Raises:
        ConfigurationError: A column that was asked for is not there.
        ValueError: With the line, and what is wrong with it.
    """
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("it is UTF-16 text; save it as UTF-8")
    skipped = len(_BYTE_ORDER_MARK) if start.startswith(_BYTE_ORDER_MARK) else 0
    num_lines = 0
    while not (line := start[skipped:].partition(b"\n")[0]).strip():
        skipped += len(line) + 1
        num_lines += 1
    delimiter = next((mark for mark in DELIMITERS if mark in line), None)
    if delimiter is None:
        raise ValueError(
            f"line {num_lines + 1} has no {', '.join(DELIMITERS.values())} between fields: "
            f"{shown(line)!r}{_what_to_do(line)}"
        )
    fields = split_line(line, delimiter)
    columns = columns or {}
    has_words_only = not any(is_number(field) for field in fields)
    has_header = has_words_only and _is_header(fields, columns)
    places = _places(fields, has_header, columns, line)
    layout = Layout(
        delimiter=delimiter,
        num_columns=len(fields),
        user=places["user"],
        item=places["item"],
        rating=places["rating"],
        time=places.get("time") if with_time else None,
        limits=limits,
    )
    if has_header:
        return Start(layout, skipped + len(line) + 1, num_lines + 1, False)
    return Start(layout, skipped, num_lines, has_words_only)


def _is_header(fields: list[str], columns: Mapping[str, str]) -> bool:
    """Whether words are names of columns: well-known ones, or those asked for."""
    known = {name for names in _NAMES.values() for name in names}
    return bool(known.intersection(_plain(fields)) or set(fields) & set(columns.values()))


def _places(
    fields: list[str], has_header: bool, columns: Mapping[str, str], line: bytes
) -> dict[str, int]:
    """Return the place of each column: as given, as named, or by custom."""
    if len(fields) < 3 or (len(fields) > 4 and not has_header and not columns):
        raise ValueError(
            f"a line is user, item, rating and perhaps a time, but the first has "
            f"{len(fields)} fields: {shown(line)!r}"
        )
    places = _named(fields) if has_header else _by_custom(fields)
    places |= {kind: _place(column, fields, has_header) for kind, column in columns.items()}
    if missing := [kind for kind in ("user", "item", "rating") if kind not in places]:
        raise ValueError(
            "its header does not say plainly which column is the "
            f"{' or the '.join(missing)}; there is {', '.join(fields)}. Rename columns to "
            f"user, item and rating, or say which they are: {NAME_COLUMNS}"
        )
    if len(set(places.values())) < len(places):
        raise ValueError(
            f"the columns cannot be told apart; the first line is {shown(line)!r}"
        )
    return places


def _by_custom(fields: list[str]) -> dict[str, int]:
    kinds = ("user", "item", "rating", "time")
    return {kind: place for place, kind in enumerate(kinds[: len(fields)])}


def _named(fields: list[str]) -> dict[str, int]:
    """Find the columns that a header calls by a well-known name.

    Where two of them are of different things, such as artist and track, it says nothing.
    """
    plain = _plain(fields)
    found = {}
    for kind, names in _NAMES.items():
        places = [place for place, field in enumerate(plain) if field in names]
        things = {plain[place].removesuffix("id").removesuffix("name") for place in places}
        if len(things) == 1:
            found[kind] = max(places, key=lambda place: plain[place].endswith("id"))
    return found


def _plain(fields: list[str]) -> list[str]:
    return [re.sub("[-_ ]", "", field.lower()) for field in fields]


def _place(column: str, fields: list[str], has_header: bool) -> int:
    if has_header and column in fields:
        return fields.index(column)
    if column.isdecimal() and 1 <= int(column) <= len(fields):
        return int(column) - 1
    has_numbers = any(is_number(field) for field in fields)
    there = f"1 to {len(fields)}" if has_numbers else ", ".join(fields)
    raise ConfigurationError(f"There is no column {column}; there is {there}.")


def _what_to_do(line: bytes) -> str:
    if line.strip().endswith(b":"):
        return ". Files of the Netflix Prize need millrace autoencoder convert first"
    return ""
