"""Ctrl-C, SIGTERM and SIGHUP: temporary handlers, and safe interrupts.

The training loop handles these signals itself and saves a checkpoint. Everywhere else they
raise ``KeyboardInterrupt`` (``interruptible``) or end the process (``exit_on_signals``).
Python calls a handler only when the main thread is not in C++, and an import is never
interrupted, so a command that has nothing to save also ends itself after some seconds
(``end_if_unanswered``).
"""

import atexit
import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, ClassVar

Handler = Callable[[int, FrameType | None], Any]

INTERRUPTED = 130
"""Exit status after a signal: 128 + SIGINT, as in shells."""
SIGHUP = getattr(signal, "SIGHUP", None)
"""Sent when the terminal is closed; Windows does not have it."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([] if SIGHUP is None else [SIGHUP]))
"""Signals that ask a process to stop: Ctrl-C, a cluster, a closed terminal."""

_RETRY_SECONDS = 0.02
_ANSWER_SECONDS = 2.5
"""Starting the driver of a GPU and loading its libraries can take longer than this."""
_END_SECONDS = 1.5
"""How much later a process must have ended that began to end in time."""
_LAST_ACTIONS_SECONDS = 0.7
_SAME_MOMENT_SECONDS = 1.0
"""The thread that watches may learn of a signal this much later than its handler."""
_CALLED_FROM_CPP = {"_xla_gc_callback"}
"""Functions that C++ calls: it swallows their exceptions or aborts the process."""


class _Received:
    """Whether a stop signal has arrived since the outermost ``handle_signals`` began."""

    depth = 0
    any = False
    last: int | None = None
    """Its number; it is kept when the context ends."""
    answered_at = -math.inf
    """When a handler was called last, on the monotonic clock."""
    ending_at = -math.inf
    """When a handler was called last that ends the process, on the same clock."""
    may_end = False
    """Whether the process may end without having called the handler."""
    last_actions: ClassVar[list[Callable[[], Any]]] = []


def last_signal() -> int | None:
    """Return the last stop signal that was handled in ``handle_signals``."""
    return _Received.last


def end_with_signal_while(busy: Callable[[], bool]) -> None:
    """End the process with the last signal at its exit, if it is still busy then.

    A thread that was interrupted in C++ would hold up the exit, or crash in it.
    """
    number = _Received.last

    def end() -> None:
        if number is not None and busy():
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    atexit.register(end)


@contextlib.contextmanager
def handle_signals(
    handler: Handler, numbers: Sequence[int] = STOP_SIGNALS, *, may_end: bool = False
) -> Iterator[None]:
    """Call `handler` on these signals inside the context.

    Python allows this in the main thread only; in other threads nothing changes.

    Args:
        handler: The handler.
        numbers: The signals.
        may_end: Whether `handler` ends the process. It may then also end if that takes
            more than some seconds; see ``end_if_unanswered``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not _Received.depth:
        _Received.any = False
        _Received.last = None
    _Received.depth += 1
    could_end, _Received.may_end = _Received.may_end, may_end
    previous = install_handler(handler, numbers, may_end=may_end)
    try:
        yield
    finally:
        _Received.depth -= 1
        _Received.may_end = could_end
        for number, before in previous.items():
            signal.signal(number, before)


def install_handler(
    handler: Handler, numbers: Sequence[int] = STOP_SIGNALS, *, may_end: bool = False
) -> dict[int, Any]:
    """Call `handler` on these signals from now on; return the previous handlers.

    SIGHUP stays ignored under ``nohup``. When a terminal is closed, the kernel and the
    shell may both send SIGHUP: it counts only if no stop signal came before it. A second
    stop signal means "stop now", and would abort the checkpoint that the first one saves.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        _Received.answered_at = time.monotonic()
        if number == SIGHUP and _Received.any:
            return
        if may_end and not _Received.any:  # it may be called again, see `_interrupt`
            _Received.ending_at = _Received.answered_at
        _Received.any = True
        _Received.last = number
        handler(number, frame)

    return {
        number: signal.signal(number, handle)
        for number in numbers
        if not (number == SIGHUP and signal.getsignal(number) == signal.SIG_IGN)
    }


def exit_on_signals() -> None:
    """Exit immediately on a signal, for processes that have not started any work."""

    def exit_now(*_: Any) -> None:
        if os.isatty(2):
            os.write(2, b"\n")  # the terminal shows ^C: the prompt comes on the next line
        os._exit(INTERRUPTED)

    install_handler(exit_now)
    _Received.may_end = True


def end_if_unanswered(seconds: float = _ANSWER_SECONDS) -> None:
    """End this process some seconds after a signal, unless a handler saves its work.

    A handler with `may_end` has `seconds` to be called, and the process a little more to
    end. Call this once, in the main thread of a program. ``acting_before_end`` adds what
    to do first.
    """
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    signal.set_wakeup_fd(sending.detach(), warn_on_full_buffer=False)
    threading.Thread(
        target=_watch, args=(receiving, seconds), name="millrace-signals", daemon=True
    ).start()


def _watch(receiving: socket.socket, seconds: float) -> None:
    """Wait for the signals whose numbers C writes to a socket, whatever Python does."""
    while numbers := receiving.recv(64):
        received_at = time.monotonic()
        if not any(number in STOP_SIGNALS for number in numbers):
            continue
        time.sleep(seconds)
        earliest = received_at - _SAME_MOMENT_SECONDS
        if _Received.answered_at < earliest and _Received.may_end:
            _end_now()
        if _Received.ending_at > earliest:
            time.sleep(_END_SECONDS)
            _end_now()


def _end_now() -> None:
    timer = threading.Timer(_LAST_ACTIONS_SECONDS, os._exit, (INTERRUPTED,))
    timer.daemon = True
    timer.start()
    for action in list(_Received.last_actions):
        with contextlib.suppress(Exception):
            action()
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def acting_before_end(action: Callable[[], Any]) -> Iterator[None]:
    """Call `action` on another thread, if ``end_if_unanswered`` ends the process."""
    _Received.last_actions.append(action)
    try:
        yield
    finally:
        _Received.last_actions.remove(action)


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt on a signal, as soon as that is safe.

    Raised during the import of an extension module or in a callback from C++, the
    exception would be swallowed or crash the process.
    """
    return handle_signals(_interrupt, may_end=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if _is_safe(frame):
        raise KeyboardInterrupt
    # Try again soon. A second SIGHUP would be ignored, so send SIGTERM instead.
    resent = signal.SIGTERM if number == SIGHUP else number
    retry = threading.Timer(_RETRY_SECONDS, os.kill, (os.getpid(), resent))
    retry.daemon = True
    retry.start()


def _is_safe(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        is_import = code.co_filename.startswith("<frozen importlib")
        if is_import or code.co_name in _CALLED_FROM_CPP:
            return False
        frame = frame.f_back
    return not sys.is_finalizing()
