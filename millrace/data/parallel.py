"""The batches of a stream, made ahead of time by several threads, in order."""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class BatchesByPosition(Protocol):
    """What a stream offers that can make any of its batches."""

    def batch(self, position: int) -> Any:
        """Return batch number `position`."""
        ...


class ParallelStream:
    """A stream whose next batches are made while the current one is used.

    The batches are those of the plain stream. An exception is raised at the batch that
    caused it, after the good ones before it.

    Args:
        stream: Makes a batch by its number, for example a `Stream`.
        num_workers: Batches made at a time. An `ImageSource` decodes in threads of its
            own, which all workers share: two workers keep them busy.
        ahead: Batches that may be ready or under way beyond the one in use; twice
            `num_workers` where not given.
    """

    def __init__(
        self,
        stream: BatchesByPosition,
        num_workers: int = 2,
        ahead: int | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}.")
        if ahead is not None and ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {ahead}.")
        self.stream = stream
        self.num_workers = num_workers
        self.ahead = 2 * num_workers if ahead is None else ahead
        self._position = 0

    def seek(self, position: int) -> None:
        """Make the next iteration start with batch number `position`."""
        self._position = position

    @property
    def share(self) -> Callable[[slice], "ParallelStream"]:
        """Return the same stream with only some samples of every batch.

        There only where the stream that makes the batches can share them.
        """
        share_stream = self.stream.share  # pyright: ignore[reportAttributeAccessIssue]
        return lambda rows: ParallelStream(share_stream(rows), self.num_workers, self.ahead)

    def batch(self, position: int) -> Any:
        """Return batch number `position`, made here and now."""
        return self.stream.batch(position)

    def __iter__(self) -> Iterator[Any]:
        # A generator: closing or dropping it runs the `finally`.
        workers = _Workers(self.stream, self._position, self.num_workers, self.ahead)
        try:
            while True:
                yield workers.next_batch()
        finally:
            workers.stop()


class _Workers:
    """Threads that make the batches from a position on, a bounded number ahead."""

    def __init__(
        self, stream: BatchesByPosition, position: int, num_workers: int, ahead: int
    ) -> None:
        self._ahead = ahead
        self._wanted = position
        self._next = position
        self._made: dict[int, tuple[Any, BaseException | None]] = {}
        self._stopped = False
        self._changed = threading.Condition()
        for number in range(num_workers):
            # A copy each: a stream remembers the order of one epoch, and two workers
            # may be in different ones. Daemons, so that leaving Python never waits.
            threading.Thread(
                target=self._work,
                args=(copy.copy(stream),),
                name=f"millrace-batch-{number}",
                daemon=True,
            ).start()

    def next_batch(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted in self._made)
            batch, error = self._made.pop(self._wanted)
            self._wanted += 1
            self._changed.notify_all()
        if error is not None:
            raise error
        return batch

    def stop(self) -> None:
        """Let the workers go after the batch in hand, without waiting for them.

        Waiting could last for ever: the garbage collector may call this on a worker.
        """
        with self._changed:
            self._stopped = True
            self._made.clear()
            self._changed.notify_all()

    def _work(self, stream: BatchesByPosition) -> None:
        while (position := self._take()) is not None:
            try:
                made = stream.batch(position), None
            except BaseException as error:
                made = None, error
            with self._changed:
                self._made[position] = made
                self._changed.notify_all()
            del made  # a worker that waits must not keep its last batch

    def _take(self) -> int | None:
        """Return the next position to make, once there is room for it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or self._next < self._wanted + self._ahead
            )
            if self._stopped:
                return None
            position = self._next
            self._next += 1
            return position
