"""Ratings in text, read in chunks of whole lines by several threads, in bounded memory.

NumPy releases the GIL while it parses, so threads are enough. Identifiers are replaced by
codes chunk by chunk: a text identifier is then kept once instead of once per rating.
"""

import collections
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

import numpy as np

from millrace.config import ConfigurationError
from millrace.data.ratings.fast_parser import parse_fast
from millrace.data.ratings.identifiers import CodedIds, encode, merge
from millrace.data.ratings.parser import BadLine, LineLayout, ParsedLines, parse_lines
from millrace.data.source import DatasetError

MAX_LINE_BYTES = 1 << 20
# Parsing takes about seven times this much memory per thread. Smaller chunks parse as
# fast, but each adds its distinct identifiers to the final merge.
_CHUNK_BYTES = 1 << 23
_MAX_THREADS = 16
_GZIP = b"\x1f\x8b"
_ZIP = b"PK\x03\x04"
MIN_MILLISECONDS = 10**11
"""Times from here on are milliseconds: as seconds they would be after the year 5000."""

T = TypeVar("T")
U = TypeVar("U")


class Events(NamedTuple):
    """Ratings in the order of the file."""

    users: CodedIds
    items: CodedIds
    values: np.ndarray
    """float32"""
    times: np.ndarray | None
    """int64, seconds since 1970."""
    implicit: bool = False
    """Whether there are no ratings, only choices; every value is then 1."""


class Chunk(NamedTuple):
    """Some whole lines of a file, each ending in a newline."""

    text: bytes
    lines_before: int
    """Lines of the file before this chunk."""


# ------------------------------------------------------------------------------ files


def check_regular_file(path: Path, wanted: str = "file") -> None:
    """Raise unless `path` is a file that can be read more than once."""
    if path.is_dir():
        raise ConfigurationError(f"{path} is a directory, not a file of ratings.")
    if not path.exists():
        raise ConfigurationError(f"There is no {wanted} {path}.")
    if not path.is_file():
        raise ConfigurationError(
            f"{path} is a pipe or a device, but ratings are read more than once. Save them "
            "to a file first."
        )


def open_text(path: Path) -> BinaryIO:
    """Open a file, decompressing gzip regardless of its name."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}.") from error
    if file.peek(4)[:4] == _ZIP:
        file.close()
        raise ConfigurationError(
            f"{path} is a zip archive, which may contain several files. Unpack it first."
        )
    if file.peek(2)[:2] == _GZIP:
        return cast(BinaryIO, _GzipReader(file, path))
    return file


class _GzipReader(io.BufferedReader):
    """A gzip file that reports damage as a DatasetError."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        super().__init__(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)), MAX_LINE_BYTES)

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            return super().read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise DatasetError(f"{self._path} is a damaged gzip file: {error}.") from error

    def close(self) -> None:
        super().close()
        self._file.close()


def read_chunks(file: BinaryIO, path: Path, lines_before: int = 0) -> Iterator[Chunk]:
    """Yield the rest of a file in chunks of whole lines."""
    rest = b""
    while data := file.read(_CHUNK_BYTES):
        whole, newline, after = data.rpartition(b"\n")
        if newline:
            text = rest + whole + newline
            yield Chunk(text, lines_before)
            lines_before += text.count(b"\n")
            rest = after
        else:
            rest += data
        if len(rest) > MAX_LINE_BYTES:
            raise DatasetError(
                f"{path} is not a text file of ratings: it has a line of more than "
                f"{MAX_LINE_BYTES:,} bytes, which starts with {rest[:50]!r}."
            )
    if rest:
        yield Chunk(rest + b"\n", lines_before)


def map_in_order(function: Callable[[T], U], arguments: Iterable[T]) -> Iterator[U]:
    """Yield `function` of each argument, in order, computed by a few threads ahead."""
    num_threads = min(os.cpu_count() or 1, _MAX_THREADS)
    pending: collections.deque[Future[U]] = collections.deque()
    with ThreadPoolExecutor(num_threads, "millrace-ratings") as pool:
        try:
            for argument in arguments:
                pending.append(pool.submit(function, argument))
                # Submitting everything at once would read the whole file into memory.
                if len(pending) > num_threads + 1:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


# ----------------------------------------------------------------------------- chunks


def parse_chunk(text: bytes, layout: LineLayout) -> ParsedLines:
    """Parse whole lines, with the fast parser if they are ordinary."""
    return parse_fast(text, layout) or parse_lines(text, layout)


def encode_lines(lines: ParsedLines, window: tuple[float, float] | None) -> Events:
    """Encode identifiers, and keep only the ratings in the time window."""
    users, items, values, times = lines
    assert items is not None
    if window is not None and times is not None:
        times = np.where(times < MIN_MILLISECONDS, times, times // 1000)
        inside = (times >= window[0]) & (times < window[1])
        users, items, values = users[inside], items[inside], values[inside]
        times = times[inside]
    return Events(encode(users), encode(items), values, times)


def bad_line_error(path: Path, error: BadLine) -> DatasetError:
    """Return an error that names the file, the line and what is wrong with it."""
    text = error.text if len(error.text) <= 100 else f"{error.text[:100]}…"
    return DatasetError(f"{path}, line {error.index + 1}: {error.reason}: {text!r}.")


def concatenate(chunks: list[Events]) -> Events:
    """Join chunks; the list is emptied to free their memory early."""
    users = merge([chunk.users for chunk in chunks])
    items = merge([chunk.items for chunk in chunks])
    values = np.concatenate([chunk.values for chunk in chunks])
    times = None
    if chunks[0].times is not None:
        times = np.concatenate([cast(np.ndarray, chunk.times) for chunk in chunks])
    chunks.clear()
    return Events(users, items, values, times)
