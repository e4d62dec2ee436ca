"""Callbacks: a user's own code between the executions of a run."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from millrace.config import ConfigurationError
from millrace.distributed import coordination


class Callback:
    """Your own code between the executions of a run; override what you need.

    Methods are called in the main thread of the first process, after the event has been
    written, with values on the host. A method that returns True ends training after the
    current execution, with a checkpoint. An exception ends the run; it can be resumed from
    its last checkpoint.

    >>> class StopWhenGood(mr.Callback):
    ...     def on_validation(self, event):
    ...         return event["validation_accuracy"] > 0.97
    """

    def on_log(self, event: dict[str, Any]) -> bool | None:
        """Receive the means since the last log event, with update, epoch and time."""

    def on_validation(self, event: dict[str, Any]) -> bool | None:
        """Receive ``validation_`` metrics, with update, epoch and time."""

    def on_save(self, update: int, path: Path) -> bool | None:
        """Receive the folder of a checkpoint, once it is on disk."""

    def close(self) -> None:
        """Release what was opened; called however the run ends."""


class Callbacks:
    """The callbacks of a run; only those of the first process are called.

    Args:
        callbacks: In the order in which they are called.
        stop: Called if a callback asks for the end of training.
    """

    def __init__(self, callbacks: Iterable[Callback], stop: Callable[[], None]) -> None:
        callbacks = check_callbacks(callbacks)
        self._callbacks = callbacks if coordination.is_first() else []
        self._stop = stop
        self._unsaved: tuple[int, Path] | None = None
        self._last_saved = -1
        self.stopped_by: str | None = None
        """The type of the callback that ended training."""

    def send_event(self, event: dict[str, Any], *, is_validation: bool) -> None:
        """Pass on a log event."""
        for callback in self._callbacks:
            method = callback.on_validation if is_validation else callback.on_log
            self._note(callback, method(dict(event)))

    def start_saving(self, update: int, path: Path) -> None:
        """Remember a checkpoint that is being written, unless it was written before."""
        if update != self._last_saved:
            self._unsaved = update, path
            self._last_saved = update

    def send_saved(self, *, is_done: bool) -> None:
        """Pass on the checkpoint that was being written, if that is done."""
        if self._unsaved is None or not is_done:
            return
        saved, self._unsaved = self._unsaved, None
        for callback in self._callbacks:
            self._note(callback, callback.on_save(*saved))

    def _note(self, callback: Callback, answer: Any) -> None:
        if answer:  # also NumPy's True, as a comparison may give
            self.stopped_by = self.stopped_by or type(callback).__name__
            self._stop()


def check_callbacks(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return callbacks as a list; raise if one is something else."""
    if not isinstance(callbacks, Iterable):
        raise ConfigurationError(f"callbacks must be a list, got {callbacks!r}.")
    listed = list(callbacks)
    for callback in listed:
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks must be objects of subclasses of mr.Callback, got {callback!r}."
            )
    return listed
