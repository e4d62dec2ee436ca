"""Prepares the next batches of a stream in background threads, in order."""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class RandomAccessStream(Protocol):
    """A stream that can produce any of its batches."""

    def batch(self, position: int) -> Any:
        """Return batch number `position`."""
        ...


class ParallelStream:
    """A stream that prepares its next batches while the current one is in use.

    The batches equal those of the plain stream. An exception is raised at the batch that
    caused it, after the good batches before it.

    Args:
        stream: Produces a batch by its number, for example a `Stream`.
        num_workers: Batches prepared at a time. All workers share the decoding threads
            of an `ImageSource`, so two workers keep those busy.
        ahead: Batches that may be ready or in progress beyond the one in use; by default
            twice `num_workers`.
    """

    def __init__(
        self,
        stream: RandomAccessStream,
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
        """Return a function that makes a stream of only some samples of every batch.

        Raises AttributeError where the underlying stream has no `share`, so `hasattr`
        answers for both.
        """
        share_stream = self.stream.share  # pyright: ignore[reportAttributeAccessIssue]
        return lambda rows: ParallelStream(share_stream(rows), self.num_workers, self.ahead)

    def batch(self, position: int) -> Any:
        """Return batch number `position`, prepared in the calling thread."""
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
    """Threads that prepare batches from a position on, a bounded number ahead."""

    def __init__(
        self, stream: RandomAccessStream, position: int, num_workers: int, ahead: int
    ) -> None:
        self._ahead = ahead
        self._wanted = position
        self._next = position
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        self._stopped = False
        self._changed = threading.Condition()
        for number in range(num_workers):
            # One copy per worker: a stream caches the order of one epoch, and two workers
            # may be in different epochs. Daemons, so that exiting Python never waits.
            threading.Thread(
                target=self._work,
                args=(copy.copy(stream),),
                name=f"millrace-batch-{number}",
                daemon=True,
            ).start()

    def next_batch(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._wanted in self._results)
            batch, error = self._results.pop(self._wanted)
            self._wanted += 1
            self._changed.notify_all()
        if error is not None:
            raise error
        return batch

    def stop(self) -> None:
        """Tell the workers to stop after their current batch, without waiting for them.

        The garbage collector may call this on a worker, which would wait for itself.
        """
        with self._changed:
            self._stopped = True
            self._results.clear()
            self._changed.notify_all()

    def _work(self, stream: RandomAccessStream) -> None:
        while (position := self._claim_position()) is not None:
            try:
                result = stream.batch(position), None
            except BaseException as error:
                result = None, error
            with self._changed:
                self._results[position] = result
                self._changed.notify_all()
            del result  # an idle worker must not keep its last batch alive

    def _claim_position(self) -> int | None:
        """Return the next position to prepare once it is within `ahead`; None to stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or self._next < self._wanted + self._ahead
            )
            if self._stopped:
                return None
            position = self._next
            self._next += 1
            return position
