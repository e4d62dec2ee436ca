"""Drop output that cannot be written, so that a lost terminal or log does not end a run.

A full disk, a pipe without a reader, or a closed terminal would otherwise raise an error
in whatever happens to print next.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any


class _DroppingFile(io.FileIO):
    """A file descriptor that claims to have written what it could not write."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


_UNWRITABLE = (OSError, ValueError, RuntimeError)
"""Errors of a stream. ValueError: it is closed. RuntimeError: a signal handler prints while
the thread that it interrupts waits in the same stream, as for the reader of a full pipe."""


class DroppingStream:
    """Wraps any text stream, such as that of a notebook, and ignores write errors."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` if possible; return its length either way."""
        with contextlib.suppress(*_UNWRITABLE):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        with contextlib.suppress(*_UNWRITABLE):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def drop_lost_output() -> None:
    """Make standard output and standard error drop what they cannot write.

    Streams that were replaced, such as by a test runner, are left alone. Closed descriptors
    are opened on the null device: otherwise the next file to be opened would get their
    number, and with it everything that libraries print.
    """
    _open_missing_descriptors()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None or stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _dropping(stream, descriptor))


@contextlib.contextmanager
def dropping_lost_output() -> Iterator[None]:
    """Apply ``drop_lost_output`` only inside the block."""
    before = sys.stdout, sys.stderr
    drop_lost_output()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _dropping(stream: Any, descriptor: int) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(_DroppingFile(descriptor, "w", closefd=False))
    if stream is None:
        return io.TextIOWrapper(buffer, errors="backslashreplace", line_buffering=True)
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        # Names of files may be any bytes, and terminals may not have all characters.
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        # PYTHONUNBUFFERED sets write_through, which only writes as far as our buffer.
        line_buffering=stream.line_buffering or stream.write_through,
    )


def _open_missing_descriptors() -> None:
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            os.set_inheritable(opened, True)


def error_line(message: str) -> None:
    """Print an error message as plain text on standard error, if there is one."""
    if sys.stderr is not None:
        print(f"millrace: {message}", file=DroppingStream(sys.stderr), flush=True)
