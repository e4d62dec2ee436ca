"""Validation beside training: on a thread of its own, while the next updates are made."""

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple


class UnderWay(NamedTuple):
    """A validation that has been started."""

    update: int
    """After which the weights were put aside."""
    found: Future[dict[str, float]]


class AsyncValidation:
    """A validation that training does not wait for, until the next one is due.

    Args:
        snapshot: Copies what is to be validated of a state, which the next update ends.
        validate: Returns the metrics of what was put aside.
    """

    def __init__(
        self,
        snapshot: Callable[[Any], Any],
        validate: Callable[[Any], dict[str, float]],
    ) -> None:
        self._put_aside = snapshot
        self._validate = validate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millrace-validation")
        self.under_way: UnderWay | None = None

    def start(self, state: Any, update: int) -> None:
        """Begin to validate a state; the one before must have been collected."""
        assert self.under_way is None
        kept = self._put_aside(state)
        # With the compiler options of the run, and so that what it compiles is counted.
        context = contextvars.copy_context()
        found = self._thread.submit(context.run, self._validate, kept)
        self.under_way = UnderWay(update, found)

    def collect(self, *, wait: bool) -> tuple[int, dict[str, float]] | None:
        """Return the update and the metrics of what is done, and raise what it raised."""
        done = self.under_way
        if done is None or not (wait or done.found.done()):
            return None
        self.under_way = None
        return done.update, done.found.result()

    def close(self) -> None:
        """End the thread; what is under way is lost."""
        self._thread.shutdown()
