"""Finds out from the first line of a ratings file what stands where."""

from collections.abc import Mapping
from typing import NamedTuple

from millrace.config import ConfigurationError
from millrace.data.ratings.lines import Layout, is_number, shown, split_line

DELIMITERS = {b"\t": "tab", b"::": "'::'", b",": "comma", b";": "semicolon"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NAMES = {
    "user": {"user", "userid", "customer", "customerid", "uid", "reviewerid"},
    "item": {"item", "itemid", "movie", "movieid", "iid", "asin", "productid", "isbn"},
    "rating": {"rating", "ratings", "stars", "score", "overall", "bookrating"},
    "time": {"time", "timestamp", "date", "unixreviewtime"},
}
"""What columns are called in the headers of well-known files, in lower case."""


class Start(NamedTuple):
    """How a file begins."""

    layout: Layout
    num_bytes: int
    """To leave out: a byte order mark, blank lines, the header."""
    num_lines: int
    """The lines among them."""


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
    has_header = not any(is_number(field) for field in fields)
    places = _places(fields, has_header, columns or {}, line)
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
        return Start(layout, skipped + len(line) + 1, num_lines + 1)
    return Start(layout, skipped, num_lines)


def _places(
    fields: list[str], has_header: bool, columns: Mapping[str, str], line: bytes
) -> dict[str, int]:
    """Return the place of each column: as given, as named, or by custom."""
    places = {"user": 0, "item": 1, "rating": 2}
    if has_header:
        places |= _named(fields)
    elif len(fields) > 3:
        places["time"] = 3
    places |= {kind: _place(column, fields, has_header) for kind, column in columns.items()}
    is_custom = not columns and (not has_header or len(_named(fields)) < 3)
    if len(fields) < 3 or (is_custom and len(fields) > 4):
        raise ValueError(
            f"a line is user, item, rating and perhaps a time, but the first has "
            f"{len(fields)} fields: {shown(line)!r}"
        )
    if len(set(places.values())) < len(places):
        raise ValueError(
            f"the columns cannot be told apart; the first line is {shown(line)!r}"
        )
    return places


def _named(fields: list[str]) -> dict[str, int]:
    """Find the columns that a header calls by a well-known name."""
    plain = [field.lower().replace("_", "").replace("-", "") for field in fields]
    found = {}
    for kind, names in _NAMES.items():
        places = [place for place, field in enumerate(plain) if field in names]
        found |= {kind: places[0]} if places else {}
    return found


def _place(column: str, fields: list[str], has_header: bool) -> int:
    if has_header and column in fields:
        return fields.index(column)
    if column.isdecimal() and 1 <= int(column) <= len(fields):
        return int(column) - 1
    there = ", ".join(fields) if has_header else f"1 to {len(fields)}"
    raise ConfigurationError(f"There is no column {column}; there is {there}.")


def _what_to_do(line: bytes) -> str:
    if line.strip().endswith(b":"):
        return ". Files of the Netflix Prize need millrace autoencoder convert first"
    return ""
