"""The text format of the Netflix Prize: ``item:``, then its ``user,rating,date`` lines.

The data come as one file per item, or as a few files of many items.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millrace.data.ratings.chunks import (
    Chunk,
    Events,
    bad_line_error,
    concatenate,
    encode_lines,
    map_in_order,
    open_text,
    parse_chunk,
    read_chunks,
)
from millrace.data.ratings.parser import BadLine, LineLayout, ParsedLines, printable
from millrace.data.source import DatasetError

_HEADER = re.compile(rb"\s*([0-9]{1,18}):\s*")
_LAYOUT = LineLayout(b",", 3, user=0, item=None, rating=1, time=2, limits=(0, 0))


class _ItemChunk(NamedTuple):
    """A chunk, and what is needed to understand it."""

    path: Path
    item: int | None
    """The item of the first lines, if its header is in an earlier chunk."""
    lines: Chunk


def is_netflix_file(path: Path) -> bool:
    """Whether a file starts with the header of an item."""
    with open_text(path) as file:
        first_line = file.read(100).lstrip().partition(b"\n")[0]
    return _HEADER.fullmatch(first_line) is not None


def read_netflix(
    paths: list[Path], limits: tuple[float, float], window: tuple[float, float]
) -> Events:
    """Read these files in order; `limits` and `window` are those of `read_events`."""
    layout = _LAYOUT._replace(limits=limits)

    def parse(chunk: _ItemChunk) -> Events:
        try:
            return encode_lines(_parse(chunk, layout), window)
        except BadLine as error:
            error.index += chunk.lines.lines_before
            raise bad_line_error(chunk.path, error) from None

    return concatenate(list(map_in_order(parse, _read_chunks(paths))))


def _read_chunks(paths: list[Path]) -> Iterator[_ItemChunk]:
    for path in paths:
        item, is_empty = None, True
        with open_text(path) as file:
            for chunk in read_chunks(file, path):
                yield _ItemChunk(path, item, chunk)
                item, is_empty = _last_item(chunk.text, item), False
        if is_empty:
            raise DatasetError(f"{path} is empty.")


def _last_item(text: bytes, item: int | None) -> int | None:
    """Return the item whose lines continue after this text."""
    line = text[text.rfind(b"\n", 0, max(0, text.rfind(b":"))) + 1 :].partition(b"\n")[0]
    header = _HEADER.fullmatch(line)
    return int(header[1]) if header else item


def _parse(chunk: _ItemChunk, layout: LineLayout) -> ParsedLines:
    items, bodies = _split_items(chunk)
    counts = [body.count(b"\n") for body in bodies]
    try:
        # One call for all items of a chunk: most items have only a few lines.
        lines = parse_chunk(b"".join(bodies), layout)
    except BadLine as error:
        error.index += int(np.searchsorted(np.cumsum(counts), error.index, "right"))
        raise
    if sum(counts) != len(lines.values):  # there are blank lines
        counts = [sum(map(bool, map(bytes.strip, body.split(b"\n")))) for body in bodies]
    return lines._replace(items=np.repeat(np.array(items, np.int64), counts))


def _split_items(chunk: _ItemChunk) -> tuple[list[int], list[bytes]]:
    """Return the items of a chunk, and the lines of each without its header."""
    text, start_of_body = chunk.lines.text, 0
    items, bodies = [0 if chunk.item is None else chunk.item], []
    for colon in np.flatnonzero(np.frombuffer(text, np.uint8) == ord(":")).tolist():
        start, end = text.rfind(b"\n", 0, colon) + 1, text.index(b"\n", colon)
        header = _HEADER.fullmatch(text[start:end])
        if header is None:
            reason = "it is neither an item with a colon nor user,rating,date"
            raise BadLine(text.count(b"\n", 0, start), reason, printable(text[start:end]))
        bodies.append(text[start_of_body:start])
        items.append(int(header[1]))
        start_of_body = end + 1
    bodies.append(text[start_of_body:])
    if chunk.item is None and bodies[0].strip():
        line = bodies[0].lstrip().partition(b"\n")[0]
        index = text.count(b"\n", 0, text.index(line))
        raise BadLine(index, "no item precedes it", printable(line))
    return items, bodies
