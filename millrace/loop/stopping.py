"""When a run ends early: on a signal, or as the program asks, in all processes at once."""

import contextlib
import logging
import signal
from typing import Any

from millrace.distributed import coordination
from millrace.distributed.coordination import CoordinatedStop
from millrace.distributed.signals import handle_signals

_log = logging.getLogger("millrace")


class StopRequest:
    """Whether a run should end at its next stop point.

    Args:
        saves: Whether it then saves a checkpoint.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self._next = ", then saving a checkpoint" if saves else ""
        self.signal: int | None = None
        """The signal that ends the run, if one does."""
        self._is_requested = False
        self._is_requested_here = False
        self._stop_points = 0
        self._coordinated_stop = CoordinatedStop(1)

    def request(self) -> None:
        """Ask for the end; with several processes, all must do so at the same update."""
        self._is_requested = True

    def request_here(self) -> None:
        """Ask for the end in this process; all agree on the update, as for a signal."""
        self._is_requested_here = True

    @property
    def is_first_point(self) -> bool:
        """Whether there was no stop point yet."""
        return not self._stop_points

    def pass_point(self) -> None:
        """Record that the run has reached a point at which it could stop."""
        self._stop_points += 1

    def should_stop(self) -> bool:
        """Whether to end here, as the program or a signal asks."""
        signaled = self._coordinated_stop.should_stop(
            self._stop_points,
            requested=self.signal is not None or self._is_requested_here,
        )
        return self._is_requested or signaled

    def is_cut_short(self) -> bool:
        """Whether a signal ends what the run is doing.

        With several processes it ends only training, because all of them have to stop at
        the same point.
        """
        return self.signal is not None and coordination.num_processes() == 1

    def on_signals(self) -> contextlib.AbstractContextManager[None]:
        """End the run after the current execution on the first Ctrl-C or SIGTERM.

        Signals reach only the main thread; in another thread the caller stops the run.
        """

        def handle(number: int, frame: Any) -> None:
            del frame
            if self.signal is not None:
                raise KeyboardInterrupt
            self.signal = number
            _log.warning(
                "%s: finishing the current execution%s. Repeat it to stop immediately.",
                signal.Signals(number).name,
                self._next,
            )

        return handle_signals(handle)
