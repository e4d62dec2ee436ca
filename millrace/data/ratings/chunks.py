"""A text file in pieces of whole lines, plain or gzip, and threads to work on them."""

import collections
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from millrace.config import ConfigurationError
from millrace.data.source import DatasetError

LONGEST_LINE = 1 << 20
_CHUNK_BYTES = 1 << 23
_MOST_THREADS = 16
_GZIP = b"\x1f\x8b"
_ZIP = b"PK\x03\x04"

T = TypeVar("T")
U = TypeVar("U")


def check_plain_file(path: Path, wanted: str = "file") -> None:
    """Raise on what is not there, and on what cannot be read twice."""
    if path.is_dir():
        raise ConfigurationError(f"{path} is a directory, not a file of ratings.")
    if not path.exists():
        raise ConfigurationError(f"There is no {wanted} {path}.")
    if not path.is_file():
        raise ConfigurationError(
            f"{path} is not a plain file but a pipe or the like, and ratings are read more "
            "than once. Save them to a file first."
        )


def open_text(path: Path) -> BinaryIO:
    """Open a file, decompressing it if it is gzip, whatever its name."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"Cannot read {path}: {error.strerror}.") from error
    if file.peek(4)[:4] == _ZIP:
        file.close()
        raise ConfigurationError(
            f"{path} is a zip archive, of which there is no telling which file is meant. "
            "Unpack it first."
        )
    if file.peek(2)[:2] == _GZIP:
        return cast(BinaryIO, _Unzipped(file, path))
    return file


class _Unzipped(io.BufferedReader):
    """A gzip file whose damage is a plain error."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        super().__init__(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)), LONGEST_LINE)

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            return super().read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise DatasetError(f"{self._path} is a damaged gzip file: {error}.") from error

    def close(self) -> None:
        super().close()
        self._file.close()


def read_chunks(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the rest of a file in pieces of whole lines; the last line gets its end."""
    rest = b""
    while data := file.read(_CHUNK_BYTES):
        whole, newline, after = data.rpartition(b"\n")
        if newline:
            yield rest + whole + newline
            rest = after
        else:
            rest += data
        if len(rest) > LONGEST_LINE:
            raise DatasetError(
                f"{path} is not a text file of ratings: it has a line of more than "
                f"{LONGEST_LINE:,} bytes, which begins with {rest[:50]!r}."
            )
    if rest:
        yield rest + b"\n"


def in_parallel(function: Callable[[T], U], arguments: Iterable[T]) -> Iterator[U]:
    """Yield `function` of each argument, in order, with few under way at a time."""
    num_threads = min(os.cpu_count() or 1, _MOST_THREADS)
    under_way: collections.deque[Future[U]] = collections.deque()
    with ThreadPoolExecutor(num_threads, "millrace-ratings") as pool:
        try:
            for argument in arguments:
                under_way.append(pool.submit(function, argument))
                if len(under_way) > num_threads + 1:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
