"""Endless shuffled batches for training, and one padded pass for evaluation.

A training batch depends only on the seed and its number. The position of a stream is
therefore one integer, and a resumed run sees exactly the batches of an uninterrupted one.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from millrace.card import Card, with_card
from millrace.data.source import Source

Transform = Callable[[Any, np.random.Generator], Any]
"""Changes a batch on the host and draws random numbers only from the given generator.

A transform with a true attribute ``by_sample`` treats each sample on its own and draws
random numbers with the samples along the last dim. It can be given a part of a batch.
"""


Annotate = Callable[[np.ndarray, int], Mapping[str, np.ndarray]]
"""Returns more arrays of a batch, given the indices of its samples and the epoch."""


@with_card
class Stream:
    """Training batches without end, in a new order each epoch.

    Args:
        source: Provides the samples.
        batch_size: Samples per batch: one micro-batch for every replica.
        batches_per_epoch: Batches until the samples are shuffled again. The leftover
            samples differ from epoch to epoch.
        seed: Seed for the order and for the random numbers of the transform.
        shuffle: Shuffle the samples each epoch; otherwise keep the order of the source.
        transform: Changes each batch, for example for augmentation.
        annotate: Adds arrays to each batch before it is transformed.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        batches_per_epoch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        transform: Transform | None = None,
        annotate: Annotate | None = None,
    ) -> None:
        if isinstance(source, tuple | list | Mapping | np.ndarray):
            raise TypeError(
                "A stream needs a source, such as mr.ArraySource({'x': ..., 'y': ...}), "
                f"got {type(source).__name__}."
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        whole = len(source) // batch_size
        if batches_per_epoch is None:
            batches_per_epoch = whole
        if not 1 <= batches_per_epoch <= whole:
            raise ValueError(
                f"{len(source)} samples make {whole} batches of {batch_size}, but an "
                f"epoch needs {max(1, batches_per_epoch)}."
            )
        self.source = source
        self.batch_size = batch_size
        self.batches_per_epoch = batches_per_epoch
        self._seed = seed
        self._shuffle = shuffle
        self._transform = transform
        self._annotate = annotate
        self._position = 0
        self._order: tuple[int, np.ndarray] | None = None
        self._rows = slice(0, batch_size)

    def card(self) -> Card:
        """Return what a terminal or a notebook shows."""
        source = self.source
        rows = {
            "source": source if hasattr(source, "card") else type(source).__name__,
            "batch_size": self.batch_size,
            "batches_per_epoch": self.batches_per_epoch,
        }
        return Card("Stream", rows)

    def seek(self, position: int) -> None:
        """Make the next iteration start with batch number `position`."""
        self._position = position

    def share(self, rows: slice) -> "Stream":
        """Return a stream of only these samples of every batch.

        Only they are read, and they equal the same samples of the whole batch.
        """
        part = copy.copy(self)
        part._rows = rows
        return part

    def __iter__(self) -> Iterator[Any]:
        position = self._position
        while True:
            yield self.batch(position)
            position += 1

    def batch(self, position: int) -> Any:
        """Return batch number `position`, counted from the start of training."""
        transform, rows = self._transform, self._rows
        # Seeds [seed, 0, epoch] draw the order, [seed, 1, position] the transform: the two
        # never overlap, and neither depends on what was drawn before.
        generator = np.random.default_rng([self._seed, 1, position])
        if transform is None or rows == slice(0, self.batch_size):
            batch = self._read(position, rows)
            return batch if transform is None else transform(batch, generator)
        if getattr(transform, "by_sample", False):
            batch = self._read(position, rows)
            partial_generator: Any = _PartialGenerator(generator, self.batch_size, rows)
            return transform(batch, partial_generator)
        whole = transform(self._read(position, slice(None)), generator)
        return {name: array[rows] for name, array in whole.items()}

    def _read(self, position: int, rows: slice) -> Any:
        """Return samples of a batch, before they are transformed."""
        batch = self.source[self.indices(position)[rows]]
        more = self.annotations(position)
        return {**batch, **{n: array[rows] for n, array in more.items()}} if more else batch

    def annotations(self, position: int) -> Mapping[str, np.ndarray]:
        """Return what is added to batch number `position`."""
        if self._annotate is None:
            return {}
        return self._annotate(self.indices(position), position // self.batches_per_epoch)

    def indices(self, position: int) -> np.ndarray:
        """Return the indices of the samples in batch number `position`."""
        epoch, number = divmod(position, self.batches_per_epoch)
        first = number * self.batch_size
        return self._epoch_order(epoch)[first : first + self.batch_size]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            epoch = 0
        cached = self._order  # read once: another thread may replace it
        if cached is None or cached[0] != epoch:
            order = np.arange(len(self.source))
            if self._shuffle:
                np.random.default_rng([self._seed, 0, epoch]).shuffle(order)
            cached = self._order = epoch, order
        return cached[1]


class _PartialGenerator:
    """Draws random numbers for a whole batch and returns those of some of its samples."""

    def __init__(self, generator: np.random.Generator, size: int, rows: slice) -> None:
        self._generator = generator
        self._size = size
        self._rows = rows

    def random(self, count: int) -> np.ndarray:
        """Return one number between 0 and 1 per sample."""
        assert count == self._rows.stop - self._rows.start
        return self._generator.random(self._size)[self._rows]

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return integers, with the samples along the last dim."""
        assert shape[-1] == self._rows.stop - self._rows.start
        drawn = self._generator.integers(low, high, (*shape[:-1], self._size))
        return drawn[..., self._rows]


@runtime_checkable
class ReplacesCorrupt(Protocol):
    """A source that returns another sample in place of one it cannot read."""

    def is_corrupt(self, indices: np.ndarray) -> np.ndarray:
        """Return which of these samples, all requested before, could not be read."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A source that reads batches while earlier ones are in use."""

    def batches(
        self, contents: Iterable[tuple[np.ndarray, None]], batch_size: int
    ) -> Iterator[Any]:
        """Yield the batches with these samples, none of them changed at random."""
        ...


class EvaluationBatches:
    """Every sample once, in order; the last batch is padded.

    Yields ``{"batch": ..., "valid": bool array}``. Padding and replacements of corrupt
    samples are not valid. `num_valid` counts the valid samples of the last pass.
    """

    def __init__(self, source: Source, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if len(source) == 0:
            raise ValueError("There are no samples to evaluate.")
        self.source = source
        self.batch_size = batch_size
        self.num_valid = 0
        self._rows = slice(0, batch_size)
        self._first, self._step = 0, 1

    @property
    def failure(self) -> BaseException | None:
        """Why the source cannot read any more, although earlier batches are good."""
        return getattr(self.source, "failure", None)

    def share(self, rows: slice) -> "EvaluationBatches":
        """Return the same batches with only these samples of each."""
        part = copy.copy(self)
        part._rows = rows
        return part

    def every(self, step: int, *, first: int) -> "EvaluationBatches":
        """Return every `step`-th batch, starting with batch number `first`."""
        part = copy.copy(self)
        part._first, part._step = first, step
        return part

    def __len__(self) -> int:
        return len(self._starts())

    def _starts(self) -> range:
        size = self.batch_size
        return range(self._first * size, len(self.source), self._step * size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.num_valid = 0
        last = len(self.source) - 1
        wanted = [
            np.arange(start, start + self.batch_size)[self._rows]
            for start in self._starts()
        ]
        read = self._read(np.minimum(indices, last) for indices in wanted)
        for indices, batch in zip(wanted, read, strict=True):
            valid = indices <= last
            if isinstance(self.source, ReplacesCorrupt):
                valid &= ~self.source.is_corrupt(indices)
            self.num_valid += int(valid.sum())
            yield {"batch": batch, "valid": valid}

    def _read(self, wanted: Iterator[np.ndarray]) -> Iterator[Any]:
        if isinstance(self.source, ReadsAhead):
            rows = self._rows.stop - self._rows.start
            return self.source.batches(((indices, None) for indices in wanted), rows)
        return (self.source[indices] for indices in wanted)


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
        num_workers: Batches prepared at a time.
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
