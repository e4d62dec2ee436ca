"""What a line of a ratings file means, and what is wrong with it; one line at a time."""

import csv
import math
import re
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

MOST_DIGITS = 18
"""So that an identifier fits into 64 bits."""
_LONGEST_IDENTIFIER = 255
_INTEGER = re.compile(rf"0|-?[1-9][0-9]{{0,{MOST_DIGITS - 1}}}")  # written as it would be
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Layout(NamedTuple):
    """What stands where in a line."""

    delimiter: bytes
    num_columns: int
    user: int
    item: int | None
    """None where lines do not say, because they stand under their item."""
    rating: int
    time: int | None
    """None where there is none, or nobody asks."""
    limits: tuple[float, float]
    """What ratings may be."""
    texts: frozenset[str] = frozenset()
    """Of "user" and "item", those whose identifiers are not all whole numbers."""


class Lines(NamedTuple):
    """What some lines say."""

    users: np.ndarray
    """int64, or bytes if identifiers are texts."""
    items: np.ndarray | None
    values: np.ndarray
    """float32"""
    times: np.ndarray | None
    """int64: seconds since 1970."""


class BadLine(Exception):
    """A line that cannot be read."""

    def __init__(self, index: int, reason: str, text: str) -> None:
        super().__init__(index, reason, text)
        self.index, self.reason, self.text = index, reason, text


class TextIdentifiers(BadLine):
    """A line that can be read if identifiers of a kind may be texts."""

    kind: str
    """ "user" or "item"."""


class _IsText(ValueError):
    """An identifier of this kind is not a whole number."""


def parse_lines(chunk: bytes, layout: Layout) -> Lines:
    """Read whole lines; blank ones say nothing.

    Raises:
        BadLine: With the place of the line in `chunk`, from 0.
        TextIdentifiers: The layout says numbers, but there is something else.
    """
    columns: list[list] = [[], [], [], []]
    for index, line in enumerate(chunk.split(b"\n")):
        if not line.strip():
            continue
        try:
            fields = _parse_line(line, layout)
        except _IsText as error:
            kind = str(error)
            raised = TextIdentifiers(index, f"its {kind} is not a number", shown(line))
            raised.kind = kind
            raise raised from None
        except ValueError as error:
            raise BadLine(index, str(error), shown(line)) from None
        for column, field in zip(columns, fields, strict=True):
            column.append(field)
    users, items, values, times = columns
    return Lines(
        users=np.array(users, np.bytes_ if "user" in layout.texts else np.int64),
        items=None
        if layout.item is None
        else np.array(items, np.bytes_ if "item" in layout.texts else np.int64),
        values=np.array(values, np.float32),
        times=None if layout.time is None else np.array(times, np.int64),
    )


def shown(line: bytes) -> str:
    """Return a line as it can be printed, whatever is in it."""
    return line.strip(b"\r\n").decode(errors="backslashreplace")


def split_line(line: bytes, delimiter: bytes) -> list[str]:
    """Return the fields of a line, without spaces and quotes around them."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    if "\0" in text:
        raise ValueError("it holds a zero byte")
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
    """Read seconds since 1970, or a date with or without a time of day."""
    if _INTEGER.fullmatch(text):
        return int(text)
    if is_number(text) and abs(float(text)) < 10**MOST_DIGITS:
        return math.floor(float(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"the time {text!r} is neither seconds since 1970 nor a date like 2005-12-31"
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return math.floor(moment.timestamp())


def _parse_line(line: bytes, layout: Layout) -> tuple:
    fields = split_line(line, layout.delimiter)
    if len(fields) != layout.num_columns:
        raise ValueError(f"it has {len(fields)} fields instead of {layout.num_columns}")
    return (
        _identifier(fields[layout.user], "user", layout),
        None if layout.item is None else _identifier(fields[layout.item], "item", layout),
        _rating(fields[layout.rating], layout.limits),
        None if layout.time is None else parse_time(fields[layout.time]),
    )


def _identifier(text: str, kind: str, layout: Layout) -> int | bytes:
    if not text:
        raise ValueError(f"it names no {kind}")
    encoded = text.encode()
    if len(encoded) > _LONGEST_IDENTIFIER:
        raise ValueError(f"its {kind} is longer than {_LONGEST_IDENTIFIER} bytes")
    if kind in layout.texts:
        return encoded
    if not _INTEGER.fullmatch(text):
        raise _IsText(kind)
    return int(text)


def _rating(text: str, limits: tuple[float, float]) -> float:
    if not is_number(text):
        raise ValueError(f"the rating {text!r} is not a number")
    lowest, highest = limits
    if not lowest <= float(text) <= highest:
        raise ValueError(f"the rating {text} is not between {lowest:g} and {highest:g}")
    return float(text)
