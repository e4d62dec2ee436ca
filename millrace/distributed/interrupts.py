"""Ctrl-C, SIGTERM and SIGHUP before and after training, where no runner waits for them."""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from millrace.distributed.signals import HANG_UP, handle, handling

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""

_RETRY_SECONDS = 0.02
_SWALLOWING = {"_xla_gc_callback"}
"""Functions that C++ calls: what they raise is lost, or ends the process."""


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Have signals raise KeyboardInterrupt, as soon as it can be raised safely.

    Raised while an extension module is being imported, or where C++ has called back, it
    is swallowed or ends in a crash.
    """
    return handling(_interrupt)


def leave_on_signals() -> None:
    """End the process at once on a signal: for when nothing has been begun."""

    def leave(*_: Any) -> None:
        os._exit(INTERRUPTED)

    handle(leave)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _is_safe(frame):
        raise KeyboardInterrupt
    # A second SIGHUP would not be heard.
    resent = signal.SIGTERM if number == HANG_UP else number
    again = threading.Timer(_RETRY_SECONDS, os.kill, (os.getpid(), resent))
    again.daemon = True
    again.start()


def _is_safe(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name in _SWALLOWING or code.co_filename.startswith("<frozen importlib"):
            return False
        frame = frame.f_back
    return not sys.is_finalizing()
