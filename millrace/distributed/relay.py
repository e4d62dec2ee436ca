"""What the processes of a launch print: each line with the number of its process."""

import atexit
import contextlib
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

_NOISE = re.compile(
    r"[EFW]\d{4} .*(coordination_service|/client\.h|client\.h:)"
    r"|\*\*\* Check failure stack trace|    @ +0x|Additional GRPC error|:UNKNOWN:Error"
    r"|Original error: |RPC: /xla"
)
"""Lines that JAX and gRPC print when process 0 is gone. The launcher reports it better."""
_GREETING = "[Gloo] Rank "
_GREETING_PIECES = re.compile(
    rf"({re.escape(_GREETING)}|\d+| is connected to | peer ranks\. "
    r"|Expected number of connected peer ranks is : )*"
)
"""Pieces of the lines that Gloo prints at every start. Its threads interleave them."""

_PRINTING = threading.Lock()
# A thread that prints while Python exits would keep the lock of the stream forever, and
# Python, which needs it for the last flush, would abort the process.
atexit.register(_PRINTING.acquire, timeout=2)


def copy_lines(number: int, source: Any, target: Any) -> None:
    """Copy the output of a process, each line prefixed with its number.

    Reads to the end even if `target` is closed: once a pipe is full, the process that
    writes to it blocks.
    """
    with source:
        for line in _drop_noise(source):
            print_line(f"[{number}] {line}", target)


def _drop_noise(source: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines that the process itself has printed, without those of libraries."""
    open_greetings = 0  # greetings whose end has not been read yet
    for raw in source:
        text = raw.decode(errors="replace").rstrip("\n")
        open_greetings += text.count(_GREETING)
        if open_greetings:
            pieces = _GREETING_PIECES.match(text)
            text = text[pieces.end() :] if pieces else text
            if not text:
                open_greetings -= 1
                continue
        if not _NOISE.match(text):
            yield text


def print_line(line: str, target: Any) -> None:
    """Print a line in one write; drop it if the terminal, pipe or log is gone."""
    with _PRINTING, contextlib.suppress(OSError, ValueError):
        target.write(f"{line}\n")
        target.flush()
