"""Validation on a background thread while training continues."""

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple


class PendingValidation(NamedTuple):
    """A validation that has started."""

    update: int
    """The update after which the state was copied."""
    metrics: Future[dict[str, float]]


class AsyncValidation:
    """Validation that overlaps training, one at a time.

    Args:
        snapshot: Copies what `validate` needs from a state. The next update donates the
            state, so the copy must not share its buffers.
        validate: Returns the metrics of a snapshot.
    """

    def __init__(
        self,
        snapshot: Callable[[Any], Any],
        validate: Callable[[Any], dict[str, float]],
    ) -> None:
        self._snapshot = snapshot
        self._validate = validate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millrace-validation")
        self.pending: PendingValidation | None = None

    def start(self, state: Any, update: int) -> None:
        """Start validating a state; the previous validation must have been collected."""
        assert self.pending is None
        snapshot = self._snapshot(state)
        # The run keeps its compiler options, and the list of what it compiles, in context
        # variables, which a new thread would not see.
        context = contextvars.copy_context()
        metrics = self._thread.submit(context.run, self._validate, snapshot)
        self.pending = PendingValidation(update, metrics)

    def collect(self, *, wait: bool) -> tuple[int, dict[str, float]] | None:
        """Return the update and metrics of the pending validation, or raise its error.

        Args:
            wait: Whether to wait for it; otherwise None is returned until it is done.
        """
        pending = self.pending
        if pending is None or not (wait or pending.metrics.done()):
            return None
        self.pending = None
        return pending.update, pending.metrics.result()

    def close(self) -> None:
        """End the thread; a pending result is dropped."""
        self._thread.shutdown()
