"""Reads a text file of ratings in pieces, by several threads, in bounded memory."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from millrace.config import ConfigurationError
from millrace.data.ratings.chunks import (
    LONGEST_LINE,
    in_parallel,
    open_text,
    read_chunks,
)
from millrace.data.ratings.fast_parser import parse_quickly
from millrace.data.ratings.layout import NAME_COLUMNS, Start, find_layout
from millrace.data.ratings.parser import (
    BadLine,
    Layout,
    Lines,
    TextIdentifiers,
    parse_lines,
)
from millrace.data.source import DatasetError

_log = logging.getLogger("millrace")

_MILLISECONDS_FROM = 10**11
"""As seconds, times from here on would be after the year 5000."""
_SPARSENESS = 8
"""Up to so many possible identifiers for each that is there, a table is quicker."""


class Coded(NamedTuple):
    """Identifiers, each different one kept once, in order."""

    ids: np.ndarray
    codes: np.ndarray
    """int32: places in `ids`."""


class Events(NamedTuple):
    """Ratings as they stand in a file, one after the other."""

    users: Coded
    items: Coded
    values: np.ndarray
    """float32"""
    times: np.ndarray | None
    """int64: seconds since 1970."""


class CodedLines(NamedTuple):
    """What a piece of a file says."""

    users: Coded
    items: Coded
    values: np.ndarray
    times: np.ndarray | None
    num_lines: int
    """Lines of text, blank ones included."""


def read_events(
    path: Path,
    limits: tuple[float, float],
    columns: Mapping[str, str] | None = None,
    *,
    window: tuple[float, float] | None = None,
) -> Events:
    """Read ratings from text, plain or gzip: user, item, rating and perhaps a time.

    Fields stand between tabs, commas, semicolons or '::'. A header says by well-known
    names which column is which, and must say it of user, item and rating.

    Args:
        path: The file.
        limits: The smallest and the largest that a rating may be.
        columns: See `find_layout`.
        window: If times are wanted too, the first that is of use and the first that is
            not any more; the rest is left out.
    """
    with open_text(path) as file:
        beginning = file.read(LONGEST_LINE)
    if not beginning.strip():
        raise DatasetError(f"{path} has no ratings in it: it is empty.")
    try:
        start = find_layout(beginning, limits, columns, with_time=window is not None)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise DatasetError(f"{path} cannot be read as ratings: {error}.") from None
    layout = start.layout
    while True:
        try:
            return _read(path, start._replace(layout=layout), window)
        except TextIdentifiers as found:  # at most twice, and nearly always at once
            if found.index > start.num_lines:
                _log.warning("%s So all are taken as texts.", bad_line(path, 0, found))
            layout = layout._replace(texts=layout.texts | {found.kind})


def _read(path: Path, start: Start, window: tuple[float, float] | None) -> Events:
    num_lines = start.num_lines
    pieces = []
    with open_text(path) as file:
        file.read(start.num_bytes)
        chunks = read_chunks(file, path)
        for piece in in_parallel(lambda chunk: _parse(chunk, start.layout, window), chunks):
            if isinstance(piece, TextIdentifiers):
                piece.index += num_lines
                raise piece
            if isinstance(piece, BadLine):
                if start.begins_with_words and num_lines + piece.index == start.num_lines:
                    piece.reason += f" (if the line is a header: {NAME_COLUMNS})"
                raise bad_line(path, num_lines, piece)
            num_lines += piece.num_lines
            pieces.append(piece)
    if not pieces or (window is None and not any(len(piece.values) for piece in pieces)):
        raise DatasetError(f"{path} has no ratings in it, only a header.")
    return join(pieces)


def _parse(
    chunk: bytes, layout: Layout, window: tuple[float, float] | None
) -> CodedLines | BadLine:
    try:
        lines = parse(chunk, layout)
    except BadLine as error:  # only who has read what is before knows the line's number
        return error
    return code_lines(lines, chunk.count(b"\n"), window)


def code_lines(
    lines: Lines, num_lines: int, window: tuple[float, float] | None
) -> CodedLines:
    """Keep each identifier once, and only what is in the window of time."""
    users, items, values, times = lines
    assert items is not None
    if window is not None and times is not None:
        times = np.where(times < _MILLISECONDS_FROM, times, times // 1000)
        inside = (times >= window[0]) & (times < window[1])
        users, items, values = users[inside], items[inside], values[inside]
        times = times[inside]
    return CodedLines(_code(users), _code(items), values, times, num_lines)


def parse(chunk: bytes, layout: Layout) -> Lines:
    """Read whole lines, quickly if they are ordinary."""
    return parse_quickly(chunk, layout) or parse_lines(chunk, layout)


def bad_line(path: Path, lines_before: int, error: BadLine) -> DatasetError:
    """Say which line of which file is wrong, and why."""
    text = error.text if len(error.text) <= 100 else f"{error.text[:100]}…"
    number = lines_before + error.index + 1
    return DatasetError(f"{path}, line {number}: {error.reason}: {text!r}.")


def _code(ids: np.ndarray) -> Coded:
    """Keep each different identifier once."""
    if len(ids) == 0 or ids.dtype.kind == "S" or np.ptp(ids) > _SPARSENESS * len(ids):
        different, codes = np.unique(ids, return_inverse=True)
        return Coded(different, codes.astype(np.int32))
    first = ids.min()  # no sorting needed: mark in a table who is there, and number them
    present = np.zeros(np.ptp(ids) + 1, bool)
    present[ids - first] = True
    numbers = np.cumsum(present, dtype=np.int32) - np.int32(1)
    return Coded(np.flatnonzero(present) + first, numbers[ids - first])


def join(pieces: list[CodedLines]) -> Events:
    """Put pieces together, which are used up."""
    users = _join_coded([piece.users for piece in pieces])
    items = _join_coded([piece.items for piece in pieces])
    values = np.concatenate([piece.values for piece in pieces])
    times = None
    if pieces[0].times is not None:
        times = np.concatenate([cast(np.ndarray, piece.times) for piece in pieces])
    pieces.clear()
    return Events(users, items, values, times)


def _join_coded(pieces: list[Coded]) -> Coded:
    ids = np.unique(np.concatenate([piece.ids for piece in pieces]))
    codes = np.concatenate(
        [np.searchsorted(ids, piece.ids).astype(np.int32)[piece.codes] for piece in pieces]
    )
    if ids.dtype.kind == "S":
        ids = np.char.decode(ids, "utf-8")
    return Coded(ids, codes)
