"""Handlers of signals, for as long as they are wanted."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

ASKED_TO_STOP = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what a cluster sends."""


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], Any],
    numbers: Sequence[int] = ASKED_TO_STOP,
) -> Iterator[None]:
    """Have these signals call `handler` inside; only the main thread may, others do not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)
