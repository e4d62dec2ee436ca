"""Parses megabytes of ordinary lines at a time, with NumPy instead of a loop over lines.

All delimiters of a chunk are found at once, and digits are added up position by position
for all lines together. A chunk with anything unusual (quotes, spaces, signs, an error)
is not parsed here at all: the caller falls back to `parser.parse_lines`, which has the
same result for valid lines and a good message for the others.
"""

from typing import NamedTuple

import numpy as np

from millrace.data.ratings.parser import MAX_DIGITS, LineLayout, ParsedLines

_NEWLINE, _RETURN, _SPACE, _QUOTE, _DOT, _ZERO, _HYPHEN = b'\n\r ".0-'
_MAX_DECIMAL_DIGITS = 15
"""Digits of a rating, so that they are exact in float64."""
_MAX_TEXT_BYTES = 64
"""Length of a text identifier: NumPy pads all of them to the longest."""
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
"""Masks that keep this many of the first bytes of a little-endian word."""


class _Fields(NamedTuple):
    """One column: where its fields start and end in the text."""

    data: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return self.ends - self.starts

    def byte_at(self, offset: int) -> np.ndarray:
        """Return the byte at `offset` of every field; past its end it is arbitrary."""
        return self.data[np.minimum(self.starts + offset, self.ends)]


def parse_fast(chunk: bytes, layout: LineLayout) -> ParsedLines | None:
    """Parse lines that each end in a newline; return None unless all are ordinary."""
    columns = _find_fields(np.frombuffer(chunk, np.uint8), layout)
    if columns is None:
        return None
    users = _parse_identifiers(columns[layout.user], "user" in layout.texts)
    values = np.ones(len(columns[0].starts))
    if layout.rating is not None:
        values = _parse_decimals(columns[layout.rating])
    items = times = None
    if layout.item is not None:
        items = _parse_identifiers(columns[layout.item], "item" in layout.texts)
    if layout.time is not None:
        times = _parse_times(columns[layout.time])
    if (
        users is None
        or values is None
        or (items is None and layout.item is not None)
        or (times is None and layout.time is not None)
    ):
        return None
    is_valid = (values >= layout.limits[0]) & (values <= layout.limits[1])
    if layout.rating is not None and not is_valid.all():
        return None
    return ParsedLines(users, items, values.astype(np.float32), times)


def _find_fields(data: np.ndarray, layout: LineLayout) -> list[_Fields] | None:
    """Return the columns, if all lines have the right number of fields."""
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


def _parse_identifiers(fields: _Fields, as_text: bool) -> np.ndarray | None:
    return _parse_texts(fields) if as_text else _parse_integers(fields)


def _parse_integers(fields: _Fields, *, zero_padded: bool = False) -> np.ndarray | None:
    """Add up the digits from the right, one decimal position of all lines at a time."""
    lengths = fields.lengths
    shortest, longest = lengths.min(), lengths.max()
    if shortest < 1 or longest > MAX_DIGITS:
        return None
    has_leading_zero = (fields.data[fields.starts] == _ZERO) & (lengths > 1)
    if has_leading_zero.any() and not zero_padded:
        return None  # as an identifier, 007 is not 7
    values = np.zeros(len(lengths), np.int64)
    for position in range(longest):
        digits = fields.data[fields.ends - 1 - position] - np.uint8(_ZERO)
        if position >= shortest:
            digits[lengths <= position] = 0
        if digits.max() > 9:  # other characters wrap around to more than 9
            return None
        values += digits * np.int64(10**position)
    return values


def _parse_decimals(fields: _Fields) -> np.ndarray | None:
    """Parse digits with at most one dot among them."""
    lengths = fields.lengths
    longest = lengths.max()
    if lengths.min() < 1 or longest > _MAX_DECIMAL_DIGITS + 1:
        return None
    digits = np.zeros(len(lengths), np.int64)
    num_digits, num_decimals, num_dots = (np.zeros(len(lengths), np.int8) for _ in "123")
    for position in range(longest):
        is_inside = lengths > position
        characters = fields.byte_at(position)
        values = characters - np.uint8(_ZERO)
        is_dot, is_digit = is_inside & (characters == _DOT), is_inside & (values <= 9)
        if not (is_dot | is_digit | ~is_inside).all():
            return None
        digits = np.where(is_digit, 10 * digits + values, digits)
        num_digits += is_digit
        num_decimals += is_digit & (num_dots > 0)
        num_dots += is_dot
    is_valid = (num_dots <= 1) & (num_digits >= 1) & (num_digits <= _MAX_DECIMAL_DIGITS)
    return digits / 10.0**num_decimals if is_valid.all() else None


def _parse_texts(fields: _Fields) -> np.ndarray | None:
    """Gather texts as words of eight bytes, padded with zeros."""
    lengths = fields.lengths
    longest = int(lengths.max())
    if lengths.min() < 1 or longest > _MAX_TEXT_BYTES or not _are_ordinary(fields):
        return None
    padded = np.append(fields.data, np.zeros(_MAX_TEXT_BYTES, np.uint8))
    # A word starts at every byte: its eight bytes overlap with those of the next.
    overlapping = np.ndarray(len(fields.data) + 1, "<u8", padded, strides=(1,))
    num_words = -(-longest // 8)
    words = np.empty((len(lengths), num_words), "<u8")
    for number in range(num_words):
        offset = 8 * number
        starts = np.minimum(fields.starts + offset, fields.ends)
        masks = _MASKS[np.clip(lengths - offset, 0, 8)]
        np.bitwise_and(overlapping[starts], masks, out=words[:, number])
    return words.view(f"S{8 * num_words}").ravel()


def _are_ordinary(fields: _Fields) -> bool:
    """Whether texts are UTF-8 without zero bytes, and start and end with a character."""
    data = fields.data
    for outermost in (data[fields.starts], data[fields.ends - 1]):
        if (outermost <= _SPACE).any() or (outermost == _QUOTE).any():
            return False
    if data.min() == 0:
        return False
    if data.max() < 128:
        return True
    # Unicode has spaces, too, so text that starts or ends with it is looked at in full.
    is_outside = (data[fields.starts] >= 128) | (data[fields.ends - 1] >= 128)
    try:
        whole = data.tobytes()
        whole.decode()
        for place in np.flatnonzero(is_outside).tolist():
            text = whole[fields.starts[place] : fields.ends[place]].decode()
            if text != text.strip():
                return False
    except UnicodeDecodeError:
        return False
    return True


def _parse_times(fields: _Fields) -> np.ndarray | None:
    if (fields.lengths == len("2005-12-31")).all():
        days = _parse_dates(fields)
        if days is not None:
            return days.astype("datetime64[s]").astype(np.int64)
    return _parse_integers(fields)


def _parse_dates(fields: _Fields) -> np.ndarray | None:
    """Parse dates like 2005-12-31; return None if one does not exist."""
    data, starts = fields.data, fields.starts
    if (data[starts + 4] != _HYPHEN).any() or (data[starts + 7] != _HYPHEN).any():
        return None
    year = _parse_integers(_Fields(data, starts, starts + 4), zero_padded=True)
    month = _parse_integers(_Fields(data, starts + 5, starts + 7), zero_padded=True)
    day = _parse_integers(_Fields(data, starts + 8, starts + 10), zero_padded=True)
    if year is None or month is None or day is None:
        return None
    months = 12 * (year - 1970) + month - 1
    days = months.astype("datetime64[M]").astype("datetime64[D]") + (day - 1)
    # A day past the end of its month lands in the next one.
    exists = days.astype("datetime64[M]").astype(np.int64) == months
    return days if (exists & (month >= 1) & (month <= 12)).all() else None
