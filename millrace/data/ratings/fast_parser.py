"""Reads whole megabytes of ordinary lines at a time.

All delimiters are found at once, and digits added up column by column. Where anything is
out of the ordinary (quotes, spaces, signs, a fault) there is no answer, and the lines have
to be read one by one.
"""

from typing import NamedTuple

import numpy as np

from millrace.data.ratings.parser import MOST_DIGITS, Layout, Lines

_NEWLINE, _RETURN, _SPACE, _QUOTE, _DOT, _ZERO, _HYPHEN = b'\n\r ".0-'
_MOST_DECIMAL_DIGITS = 15
"""So that a rating's digits are exact in 64 bits of floating point."""
_LONGEST_TEXT = 64
"""Every identifier takes the room of the longest."""


class _Fields(NamedTuple):
    """A column: where its fields begin and end in the text."""

    data: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.ends - self.starts


def parse_quickly(chunk: bytes, layout: Layout) -> Lines | None:
    """Read lines that each end in a newline, or None if they are not ordinary ones."""
    columns = _columns(np.frombuffer(chunk, np.uint8), layout)
    if columns is None:
        return None
    users = _identifiers(columns[layout.user], "user" in layout.texts)
    values = _decimals(columns[layout.rating])
    items = times = None
    if layout.item is not None:
        items = _identifiers(columns[layout.item], "item" in layout.texts)
    if layout.time is not None:
        times = _times(columns[layout.time])
    if (
        users is None
        or values is None
        or (items is None and layout.item is not None)
        or (times is None and layout.time is not None)
        or not _all_between(values, layout.limits)
    ):
        return None
    return Lines(users, items, values.astype(np.float32), times)


def _all_between(values: np.ndarray, limits: tuple[float, float]) -> bool:
    return bool((values >= limits[0]).all() and (values <= limits[1]).all())


def _columns(data: np.ndarray, layout: Layout) -> list[_Fields] | None:
    """Find where every field is, if all lines have the right number of them."""
    is_mark = data == layout.delimiter[0]
    if len(layout.delimiter) == 2:
        is_mark[:-1] &= data[1:] == layout.delimiter[1]
        is_mark[-1:] = False
    marks = np.flatnonzero(is_mark | (data == _NEWLINE))
    num_columns = layout.num_columns
    if len(marks) == 0 or len(marks) % num_columns:
        return None
    ends = marks.reshape(-1, num_columns)
    is_newline = data[ends] == _NEWLINE
    if is_newline[:, :-1].any() or not is_newline[:, -1].all():
        return None
    starts = np.empty_like(ends)
    starts[0, 0] = 0
    starts[1:, 0] = ends[:-1, -1] + 1
    starts[:, 1:] = ends[:, :-1] + len(layout.delimiter)
    ends[:, -1] -= data[ends[:, -1] - 1] == _RETURN
    return [
        _Fields(data, starts[:, column].copy(), ends[:, column].copy())
        for column in range(num_columns)
    ]


def _identifiers(fields: _Fields, as_text: bool) -> np.ndarray | None:
    return _texts(fields) if as_text else _integers(fields)


def _integers(fields: _Fields, *, padded: bool = False) -> np.ndarray | None:
    """Add up digits from the right, for all lines at a time."""
    lengths = fields.lengths
    shortest, longest = lengths.min(), lengths.max()
    if shortest < 1 or longest > MOST_DIGITS:
        return None
    if ((fields.data[fields.starts] == _ZERO) & (lengths > 1)).any() and not padded:
        return None  # 007 is not 7, if it names someone
    values = np.zeros(len(lengths), np.int64)
    for place in range(longest):
        digits = fields.data[fields.ends - 1 - place] - np.uint8(_ZERO)
        if place >= shortest:
            digits[lengths <= place] = 0
        if digits.max() > 9:
            return None
        values += digits * np.int64(10**place)
    return values


def _decimals(fields: _Fields) -> np.ndarray | None:
    """Read digits with at most one dot among them."""
    lengths = fields.lengths
    longest = lengths.max()
    if lengths.min() < 1 or longest > _MOST_DECIMAL_DIGITS + 1:
        return None
    digits = np.zeros(len(lengths), np.int64)
    num_digits, num_decimals, num_dots = (np.zeros(len(lengths), np.int8) for _ in "123")
    for place in range(longest):
        inside = lengths > place
        characters = fields.data[np.minimum(fields.starts + place, fields.ends)]
        values = characters - np.uint8(_ZERO)
        is_dot, is_digit = inside & (characters == _DOT), inside & (values <= 9)
        if not (is_dot | is_digit | ~inside).all():
            return None
        digits = np.where(is_digit, 10 * digits + values, digits)
        num_digits += is_digit
        num_decimals += is_digit & (num_dots > 0)
        num_dots += is_dot
    well_formed = (num_dots <= 1) & (num_digits >= 1) & (num_digits <= _MOST_DECIMAL_DIGITS)
    return digits / 10.0**num_decimals if well_formed.all() else None


def _texts(fields: _Fields) -> np.ndarray | None:
    lengths = fields.lengths
    longest = lengths.max()
    if lengths.min() < 1 or longest > _LONGEST_TEXT:
        return None
    for outermost in (fields.data[fields.starts], fields.data[fields.ends - 1]):
        if (outermost <= _SPACE).any() or (outermost == _QUOTE).any():
            return None
    characters = np.zeros((len(lengths), longest), np.uint8)
    for place in range(longest):
        inside = lengths > place
        column = fields.data[np.minimum(fields.starts + place, fields.ends)]
        # Whether zeros are allowed, and whether it is UTF-8, is seen line by line.
        if (inside & ((column == 0) | (column >= 128))).any():
            return None
        characters[:, place] = column * inside
    return characters.view(f"S{longest}").ravel()


def _times(fields: _Fields) -> np.ndarray | None:
    if (fields.lengths == len("2005-12-31")).all():
        days = _dates(fields)
        if days is not None:
            return days.astype("datetime64[s]").astype(np.int64)
    return _integers(fields)


def _dates(fields: _Fields) -> np.ndarray | None:
    """Read dates like 2005-12-31."""
    data, starts = fields.data, fields.starts
    if (data[starts + 4] != _HYPHEN).any() or (data[starts + 7] != _HYPHEN).any():
        return None
    year = _integers(_Fields(data, starts, starts + 4), padded=True)
    month = _integers(_Fields(data, starts + 5, starts + 7), padded=True)
    day = _integers(_Fields(data, starts + 8, starts + 10), padded=True)
    if year is None or month is None or day is None:
        return None
    months = 12 * (year - 1970) + month - 1
    days = months.astype("datetime64[M]").astype("datetime64[D]") + (day - 1)
    exists = days.astype("datetime64[M]").astype(np.int64) == months
    return days if (exists & (month >= 1) & (month <= 12)).all() else None
