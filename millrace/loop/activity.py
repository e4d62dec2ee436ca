"""What long host loops report while they work, and how a signal ends them.

A loop such as an evaluation calls ``report_progress`` a few times per second. The run that
it belongs to shows the progress and may end the loop, without being passed through all
functions in between: it is a context variable.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from typing import NamedTuple, TypeVar

from millrace.distributed.signals import end_with_signal_while
from millrace.feeds.threads import with_settings

_POLL_SECONDS = 0.05

Value = TypeVar("Value")


class ActivityStopped(Exception):
    """The run ends, so the activity did not finish; its result is not needed."""


class Listener(NamedTuple):
    """Receives the progress of activities."""

    show: Callable[[int, int | None], None]
    """Called with how much is done, and with the total if it is known."""
    should_stop: Callable[[], bool] = lambda: False
    """Returns whether activities should end now."""


_listener: ContextVar[Listener | None] = ContextVar("activity", default=None)


def report_progress(done: int, total: int | None = None) -> None:
    """Report the progress of the current activity; raise if the run ends now.

    Raises:
        ActivityStopped: The run has been asked to end.
    """
    listener = _listener.get()
    if listener is None:
        return
    if listener.should_stop():
        raise ActivityStopped
    listener.show(done, total)


@contextlib.contextmanager
def listening(
    show: Callable[[int, int | None], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[None]:
    """Receive the progress of activities in the block.

    Args:
        show: Called with how much is done and the total; by default as outside.
        should_stop: Returns whether activities should end; by default as outside.
    """
    outer = _listener.get() or Listener(lambda done, total: None)
    listener = Listener(show or outer.show, should_stop or outer.should_stop)
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def run_stoppable(function: Callable[[], Value]) -> Value:
    """Call a function that computes or compiles for long, and return its result.

    It runs on another thread, because Python handles signals only while the main thread is
    not in C++. If the run ends meanwhile, the thread is abandoned. If it still works when
    the process exits, the signal ends the process: Python would crash in the thread.

    Raises:
        ActivityStopped: The run has been asked to end.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    result: Future[Value] = Future()
    compute = with_settings(function)

    def run() -> None:
        try:
            result.set_result(compute())
        except BaseException as error:
            result.set_exception(error)

    context = copy_context()
    name = "millrace-activity"
    thread = threading.Thread(target=context.run, args=(run,), name=name, daemon=True)
    thread.start()
    while True:
        with contextlib.suppress(TimeoutError):
            return result.result(_POLL_SECONDS)
        if result.done():  # the function itself has raised a TimeoutError
            return result.result()
        listener = _listener.get()
        if listener is not None and listener.should_stop():
            end_with_signal_while(thread.is_alive)
            raise ActivityStopped
