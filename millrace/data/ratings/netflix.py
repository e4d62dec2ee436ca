"""The Netflix Prize's own text: ``item:``, then ``user,rating,date`` for each rating.

It comes as one file for each item, or as a few files of many items.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millrace.data.ratings.chunks import in_parallel, open_text, read_chunks
from millrace.data.ratings.parser import BadLine, Layout, shown
from millrace.data.ratings.text import CodedLines, Events, bad_line, code_lines, join, parse
from millrace.data.source import DatasetError

_HEADER = re.compile(rb"\s*([0-9]{1,18}):\s*")
_LAYOUT = Layout(b",", 3, user=0, item=None, rating=1, time=2, limits=(0, 0))


class _Piece(NamedTuple):
    """Some lines of a file."""

    path: Path
    begins_file: bool
    item: int | None
    """What the first lines are about, if it stands further above."""
    text: bytes


class _Sections(NamedTuple):
    """A piece's lines without the headers, and whose they are."""

    items: list[int]
    bodies: list[bytes]


def is_sectioned(path: Path) -> bool:
    """Whether a file begins with the header of a section."""
    with open_text(path) as file:
        beginning = file.read(100).lstrip().partition(b"\n")[0]
    return _HEADER.fullmatch(beginning) is not None


def read_sections(
    paths: list[Path], limits: tuple[float, float], window: tuple[float, float]
) -> Events:
    """Read these files one after the other; see `read_events`."""
    layout = _LAYOUT._replace(limits=limits)

    def read(piece: _Piece) -> tuple[_Piece, CodedLines | BadLine]:
        try:
            return piece, _parse(piece, layout, window)
        except BadLine as error:
            return piece, error

    parsed = []
    num_lines = 0
    for piece, lines in in_parallel(read, _pieces(paths)):
        num_lines = 0 if piece.begins_file else num_lines
        if isinstance(lines, BadLine):
            raise bad_line(piece.path, num_lines, lines)
        num_lines += lines.num_lines
        parsed.append(lines)
    return join(parsed)


def _pieces(paths: list[Path]) -> Iterator[_Piece]:
    for path in paths:
        item, begins_file = None, True
        with open_text(path) as file:
            for text in read_chunks(file, path):
                yield _Piece(path, begins_file, item, text)
                item, begins_file = _last_item(text, item), False
        if begins_file:
            raise DatasetError(f"{path} is empty.")


def _last_item(text: bytes, item: int | None) -> int | None:
    """Return whose section goes on after this text."""
    line = text[text.rfind(b"\n", 0, max(0, text.rfind(b":"))) + 1 :].partition(b"\n")[0]
    header = _HEADER.fullmatch(line)
    return int(header[1]) if header else item


def _parse(piece: _Piece, layout: Layout, window: tuple[float, float]) -> CodedLines:
    items, bodies = _split(piece)
    counts = [body.count(b"\n") for body in bodies]
    try:
        lines = parse(b"".join(bodies), layout)
    except BadLine as error:
        headers_before = int(np.searchsorted(np.cumsum(counts), error.index, "right"))
        raise BadLine(error.index + headers_before, error.reason, error.text) from None
    if sum(counts) != len(lines.values):  # there are blank lines
        counts = [sum(map(bool, map(bytes.strip, body.split(b"\n")))) for body in bodies]
    item_of = np.repeat(np.array(items, np.int64), counts)
    num_lines = piece.text.count(b"\n")
    return code_lines(lines._replace(items=item_of), num_lines, window)


def _split(piece: _Piece) -> _Sections:
    """Take the headers out."""
    text, begin = piece.text, 0
    items, bodies = [0 if piece.item is None else piece.item], []
    for colon in np.flatnonzero(np.frombuffer(text, np.uint8) == ord(":")).tolist():
        start, end = text.rfind(b"\n", 0, colon) + 1, text.index(b"\n", colon)
        header = _HEADER.fullmatch(text[start:end])
        if header is None:
            reason = "it is neither an item and a colon nor user,rating,date"
            raise BadLine(text.count(b"\n", 0, start), reason, shown(text[start:end]))
        bodies.append(text[begin:start])
        items.append(int(header[1]))
        begin = end + 1
    bodies.append(text[begin:])
    if piece.item is None and bodies[0].strip():
        line = bodies[0].lstrip().partition(b"\n")[0]
        index = text.count(b"\n", 0, text.index(line))
        raise BadLine(index, "no item stands above it", shown(line))
    return _Sections(items, bodies)
