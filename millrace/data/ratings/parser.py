"""The layout of a ratings file, and a parser that reads it line by line.

`fast_parser` reads ordinary lines much faster; this parser defines what is valid and
explains what is wrong with a line that is not.
"""

import csv
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from millrace.config import ConfigurationError

MAX_DIGITS = 18
"""Digits of a numeric identifier, so that it fits into 64 bits."""
NAME_COLUMNS = (
    "millrace autoencoder convert --user-column NAME --item-column NAME "
    "--rating-column NAME"
)
_MAX_IDENTIFIER_BYTES = 255
# Canonical integers only: 007 and 7 are different identifiers.
_INTEGER = re.compile(rf"0|-?[1-9][0-9]{{0,{MAX_DIGITS - 1}}}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DELIMITERS = {b"\t": "tab", b"::": "'::'", b",": "comma", b";": "semicolon"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COLUMN_NAMES = {
    "user": "user userid username customer customerid uid reviewer reviewerid member "
    "memberid".split(),
    "item": "item itemid movie movieid iid asin parentasin product productid isbn book "
    "bookid game gameid song songid track trackid artist artistid anime animeid".split(),
    "rating": "rating ratings stars score overall bookrating".split(),
    "time": "time timestamp date unixreviewtime".split(),
}
"""Column names in the headers of well-known files, in lower case."""


class LineLayout(NamedTuple):
    """The columns of a line and the values they may have."""

    delimiter: bytes
    num_columns: int
    user: int
    item: int | None
    """Column of the item; None if the lines of an item follow a line that names it."""
    rating: int | None
    """Column of the rating; None if the file only says who chose what."""
    time: int | None
    """Column of the time; None if there is none or it is not needed."""
    limits: tuple[float, float]
    """The smallest and the largest valid rating."""
    texts: frozenset[str] = frozenset()
    """Which of "user" and "item" have identifiers that are not all integers."""


class FileLayout(NamedTuple):
    """The layout of a file and the length of its preamble."""

    lines: LineLayout
    num_bytes: int
    """Bytes before the first rating: byte order mark, blank lines, header."""
    num_lines: int
    """Lines before the first rating."""
    may_be_header: bool
    """Whether the first line has no number in it, though it is not a known header."""


class ParsedLines(NamedTuple):
    """The content of some lines, by column."""

    users: np.ndarray
    """int64, or bytes if identifiers are text."""
    items: np.ndarray | None
    values: np.ndarray
    """float32"""
    times: np.ndarray | None
    """int64, seconds since 1970."""


class BadLine(Exception):
    """A line that cannot be read."""

    def __init__(self, index: int, reason: str, text: str) -> None:
        super().__init__(index, reason, text)
        self.index, self.reason, self.text = index, reason, text


class TextIdentifier(BadLine):
    """A line that can only be read if identifiers of a kind may be text."""

    kind: str
    """ "user" or "item"."""


class _NotAnInteger(ValueError):
    """An identifier of this kind is not an integer."""


# ----------------------------------------------------------------------------- layout


def detect_layout(
    start: bytes,
    limits: tuple[float, float],
    columns: Mapping[str, str] | None = None,
    *,
    with_time: bool = False,
    no_ratings: bool = False,
) -> FileLayout:
    """Detect the layout of a file from its first lines.

    Args:
        start: The start of the file, with at least one line that is not blank.
        limits: The smallest and the largest valid rating.
        columns: The columns of "user", "item", "rating" and "time" that differ from the
            header or the usual order: a name, or a number starting at 1.
        with_time: Whether times are needed.
        no_ratings: Whether there are no ratings, or they are ignored: the usual order is
            user, item, time.

    Raises:
        ConfigurationError: A requested column does not exist.
        ValueError: The first line cannot be understood.
    """
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("it is UTF-16 text; save it as UTF-8")
    skipped = len(_BYTE_ORDER_MARK) if start.startswith(_BYTE_ORDER_MARK) else 0
    num_lines = 0
    while not (line := start[skipped:].partition(b"\n")[0]).strip():
        skipped += len(line) + 1
        num_lines += 1
    delimiter = next((mark for mark in _DELIMITERS if mark in line), None)
    if delimiter is None:
        raise ValueError(
            f"line {num_lines + 1} has no delimiter ({', '.join(_DELIMITERS.values())}): "
            f"{printable(line)!r}{_netflix_hint(line)}"
        )
    fields = split_line(line, delimiter)
    columns = columns or {}
    has_only_words = not any(is_number(field) for field in fields)
    has_header = has_only_words and _is_header(fields, columns)
    positions = find_columns(fields, has_header, columns, no_ratings=no_ratings)
    layout = LineLayout(
        delimiter=delimiter,
        num_columns=len(fields),
        user=positions["user"],
        item=positions["item"],
        rating=positions.get("rating"),
        time=positions.get("time") if with_time else None,
        limits=limits,
    )
    if has_header:
        return FileLayout(layout, skipped + len(line) + 1, num_lines + 1, False)
    return FileLayout(layout, skipped, num_lines, has_only_words)


def detect_texts(start: bytes, layout: LineLayout) -> LineLayout:
    """Return the layout with text identifiers where the first line has some.

    A line that is wrong in another way leaves the layout as it is.
    """
    line = start.partition(b"\n")[0]
    while True:
        try:
            parse_lines(line, layout)
            return layout
        except TextIdentifier as error:
            layout = layout._replace(texts=layout.texts | {error.kind})
        except BadLine:
            return layout


def _is_header(fields: list[str], columns: Mapping[str, str]) -> bool:
    """Whether words are column names: well-known ones, or those requested."""
    known = {name for names in _COLUMN_NAMES.values() for name in names}
    normalized = _normalize(fields)
    return bool(known.intersection(normalized) or set(fields) & set(columns.values()))


def find_columns(
    fields: list[str],
    has_header: bool,
    columns: Mapping[str, str],
    *,
    no_ratings: bool = False,
) -> dict[str, int]:
    """Return the position of each column: as requested, as named, or in the usual order.

    Args:
        fields: The fields of the first line, or the names of the columns of a table.
        has_header: Whether they are names.
        columns: See `detect_layout`.
        no_ratings: See `detect_layout`.
    """
    shown = repr(", ".join(fields)[:100])
    if len(fields) < 2 or (len(fields) > 4 and not has_header and not columns):
        raise ValueError(
            "expected user, item, optionally a rating and a time, but the first line has "
            f"{len(fields)} fields: {shown}"
        )
    if has_header:
        positions = _match_header(fields)
    else:
        usual = (
            ("user", "item", "time") if no_ratings else ("user", "item", "rating", "time")
        )
        positions = {kind: position for position, kind in enumerate(usual[: len(fields)])}
    positions |= {
        kind: _find_column(column, fields, has_header) for kind, column in columns.items()
    }
    if no_ratings:
        positions.pop("rating", None)
    if missing := [kind for kind in ("user", "item") if kind not in positions]:
        missing += [] if "rating" in positions else ["rating"]
        raise ValueError(
            f"its header ({', '.join(fields)}) does not identify the column of the "
            f"{' or the '.join(missing)}. Rename columns to user, item and rating, or name "
            f"them: {NAME_COLUMNS}"
        )
    if len(set(positions.values())) < len(positions):
        raise ValueError(f"one column is used twice; the first line is {shown}")
    if has_header:
        _check_names_differ(fields, positions)
    return positions


def _check_names_differ(fields: list[str], positions: Mapping[str, int]) -> None:
    for position in positions.values():
        if fields.count(fields[position]) > 1:
            raise ValueError(f"it has more than one column named {fields[position]}")


def _match_header(fields: list[str]) -> dict[str, int]:
    """Find the columns with well-known names.

    A kind is left out if two columns fit that mean different things, such as artist and
    track.
    """
    names = _normalize(fields)
    positions = {}
    for kind, known in _COLUMN_NAMES.items():
        matches = [position for position, name in enumerate(names) if name in known]
        stems = {names[match].removesuffix("id").removesuffix("name") for match in matches}
        if len(stems) == 1:  # of user_name and user_id, take the latter
            positions[kind] = max(matches, key=lambda match: names[match].endswith("id"))
    return positions


def _normalize(fields: list[str]) -> list[str]:
    return [re.sub("[-_ ]", "", field.lower()) for field in fields]


def _find_column(column: str, fields: list[str], has_header: bool) -> int:
    if has_header and column in fields:
        return fields.index(column)
    if column.isdecimal() and 1 <= int(column) <= len(fields):
        return int(column) - 1
    has_numbers = any(is_number(field) for field in fields)
    choices = f"1 to {len(fields)}" if has_numbers else ", ".join(fields)
    raise ConfigurationError(f"There is no column {column}; choose from {choices}.")


def _netflix_hint(line: bytes) -> str:
    if line.strip().endswith(b":"):
        return ". Files of the Netflix Prize need millrace autoencoder convert first"
    return ""


# ------------------------------------------------------------------------------ lines


def parse_lines(chunk: bytes, layout: LineLayout) -> ParsedLines:
    """Parse whole lines; blank lines are skipped.

    Raises:
        BadLine: With the index of the line in `chunk`.
        TextIdentifier: The layout has integers where there is text.
    """
    columns: list[list] = [[], [], [], []]
    for index, line in enumerate(chunk.split(b"\n")):
        if not line.strip():
            continue
        try:
            fields = _parse_line(line, layout)
        except _NotAnInteger as error:
            kind = str(error)
            bad_line = TextIdentifier(index, f"its {kind} is not a number", printable(line))
            bad_line.kind = kind
            raise bad_line from None
        except ValueError as error:
            raise BadLine(index, str(error), printable(line)) from None
        for column, field in zip(columns, fields, strict=True):
            column.append(field)
    users, items, values, times = columns
    return ParsedLines(
        users=np.array(users, np.bytes_ if "user" in layout.texts else np.int64),
        items=None
        if layout.item is None
        else np.array(items, np.bytes_ if "item" in layout.texts else np.int64),
        values=np.array(values, np.float32),
        times=None if layout.time is None else np.array(times, np.int64),
    )


def printable(line: bytes) -> str:
    """Return a line as text, with bytes that are not UTF-8 escaped."""
    return line.strip(b"\r\n").decode(errors="backslashreplace")


def split_line(line: bytes, delimiter: bytes) -> list[str]:
    """Return the fields of a line, without spaces and quotes around them."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    if "\0" in text:
        raise ValueError("it contains a zero byte")
    mark = delimiter.decode()
    if '"' in text and len(mark) == 1:
        try:
            (fields,) = csv.reader([text.strip("\r\n")], delimiter=mark, strict=True)
        except (csv.Error, ValueError):
            raise ValueError("its quotes do not match") from None
    else:
        fields = text.split(mark)
    return [field.strip() for field in fields]


def is_number(text: str) -> bool:
    """Whether a text is a decimal number."""
    return _NUMBER.fullmatch(text) is not None


def parse_time(text: str) -> int:
    """Parse seconds since 1970, or a date with or without a time of day."""
    if _INTEGER.fullmatch(text):
        return int(text)
    if is_number(text) and abs(float(text)) < 10**MAX_DIGITS:
        return math.floor(float(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"the time {text!r} is neither seconds since 1970 nor a date like 2005-12-31"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return math.floor(moment.timestamp())


def _parse_line(line: bytes, layout: LineLayout) -> tuple:
    fields = split_line(line, layout.delimiter)
    if len(fields) != layout.num_columns:
        raise ValueError(f"it has {len(fields)} fields instead of {layout.num_columns}")
    item = None
    if layout.item is not None:
        item = _parse_identifier(fields[layout.item], "item", layout)
    return (
        _parse_identifier(fields[layout.user], "user", layout),
        item,
        1.0
        if layout.rating is None
        else _parse_rating(fields[layout.rating], layout.limits),
        None if layout.time is None else parse_time(fields[layout.time]),
    )


def _parse_identifier(text: str, kind: str, layout: LineLayout) -> int | bytes:
    if not text:
        raise ValueError(f"it has no {kind}")
    encoded = text.encode()
    if len(encoded) > _MAX_IDENTIFIER_BYTES:
        raise ValueError(f"its {kind} is longer than {_MAX_IDENTIFIER_BYTES} bytes")
    if kind in layout.texts:
        return encoded
    if not _INTEGER.fullmatch(text):
        raise _NotAnInteger(kind)
    return int(text)


def _parse_rating(text: str, limits: tuple[float, float]) -> float:
    if not is_number(text):
        raise ValueError(f"the rating {text!r} is not a number")
    lowest, highest = limits
    if not lowest <= float(text) <= highest:
        raise ValueError(f"the rating {text} is not between {lowest:g} and {highest:g}")
    return float(text)
