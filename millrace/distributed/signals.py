"""Handlers of signals, for as long as they are wanted."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

HANG_UP = getattr(signal, "SIGHUP", None)
"""What a process gets when its terminal is closed; Windows does not have it."""
ASKED_TO_STOP = (
    signal.SIGINT,
    signal.SIGTERM,
    *([] if HANG_UP is None else [HANG_UP]),
)
"""Ctrl-C, what a cluster sends, and a terminal that is closed."""


class _Heard:
    """Whether one of these signals has come since the outermost ``handling`` began."""

    depth = 0
    asked = False


@contextlib.contextmanager
def handling(handler: Handler, numbers: Sequence[int] = ASKED_TO_STOP) -> Iterator[None]:
    """Have these signals call `handler` inside; only the main thread may, others do not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _Heard.depth:
        _Heard.asked = False
    _Heard.depth += 1
    old = handle(handler, numbers)
    try:
        yield
    finally:
        _Heard.depth -= 1
        for number, before in old.items():
            signal.signal(number, before)


def handle(handler: Handler, numbers: Sequence[int] = ASKED_TO_STOP) -> dict[int, Any]:
    """Have these signals call `handler` from now on; return the handlers before.

    SIGHUP stays ignored where ``nohup`` has it ignored. When a terminal is closed, the
    kernel and the shell send it several times: it counts only if nothing came before it,
    so that it never stops a process that is saving a checkpoint.
    """

    def first_hang_up(number: int, frame: FrameType | None) -> None:
        if number == HANG_UP and _Heard.asked:
            return
        _Heard.asked = True
        handler(number, frame)

    return {
        number: signal.signal(number, first_hang_up)
        for number in numbers
        if not (number == HANG_UP and signal.getsignal(number) == signal.SIG_IGN)
    }
