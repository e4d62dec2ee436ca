"""An endless stream of batches, shuffled anew each epoch, that resumes anywhere.

Where a batch comes from depends only on the seed and its number, so a position is one
integer and a resumed run sees exactly the batches an uninterrupted one would have seen.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from millrace.data.source import Source

Transform = Callable[[Any, np.random.Generator], Any]
"""Changes a batch on the host, drawing from the given generator only.

One with an attribute ``by_sample`` that is true changes each sample by itself and draws
its random numbers with the samples along the last dim: it can be given a part of a batch.
"""


class Stream:
    """Batches for training, without end.

    Args:
        source: Where samples come from.
        batch_size: Samples per batch: a micro-batch for every replica.
        batches_per_epoch: After how many batches the order is drawn anew. The samples
            left over are other ones in every epoch.
        seed: Of the order and of the transform's random numbers.
        shuffle: Draw the order at random; otherwise samples come as they lie.
        transform: Changes each batch, for augmentation.
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
    ) -> None:
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
        self._position = 0
        self._order: tuple[int, np.ndarray] | None = None
        self._rows = slice(0, batch_size)

    def seek(self, position: int) -> None:
        """Make the next iteration start with batch number `position`."""
        self._position = position

    def share(self, rows: slice) -> "Stream":
        """Return the same stream with only these samples of every batch.

        Only they are read, and they come out as they would in the whole batch.
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
        generator = np.random.default_rng([self._seed, 1, position])
        if transform is None or rows == slice(0, self.batch_size):
            batch = self.source[self.indices(position)[rows]]
            return batch if transform is None else transform(batch, generator)
        if getattr(transform, "by_sample", False):
            batch = self.source[self.indices(position)[rows]]
            drawing: Any = _PartOfDraws(generator, self.batch_size, rows)
            return transform(batch, drawing)
        whole = transform(self.source[self.indices(position)], generator)
        return {name: array[rows] for name, array in whole.items()}

    def indices(self, position: int) -> np.ndarray:
        """Return the samples that make up batch number `position`."""
        epoch, place = divmod(position, self.batches_per_epoch)
        first = place * self.batch_size
        return self._epoch_order(epoch)[first : first + self.batch_size]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            epoch = 0
        kept = self._order  # read once: several threads may ask
        if kept is None or kept[0] != epoch:
            order = np.arange(len(self.source))
            if self._shuffle:
                np.random.default_rng([self._seed, 0, epoch]).shuffle(order)
            kept = self._order = epoch, order
        return kept[1]


class _PartOfDraws:
    """Draws what a whole batch would be given, and hands out the part of some samples."""

    def __init__(self, generator: np.random.Generator, size: int, rows: slice) -> None:
        self._generator = generator
        self._size = size
        self._rows = rows

    def random(self, count: int) -> np.ndarray:
        """Return numbers between 0 and 1, one for each sample."""
        assert count == self._rows.stop - self._rows.start
        return self._generator.random(self._size)[self._rows]

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return whole numbers, with the samples along the last dim."""
        assert shape[-1] == self._rows.stop - self._rows.start
        drawn = self._generator.integers(low, high, (*shape[:-1], self._size))
        return drawn[..., self._rows]

    def spawn(self, count: int) -> list[np.random.Generator]:
        """Return a generator for each sample."""
        assert count == self._rows.stop - self._rows.start
        return self._generator.spawn(self._size)[self._rows]


@runtime_checkable
class PartlyUnreadable(Protocol):
    """A source that puts another sample in the place of one it cannot read."""

    def unreadable(self, indices: np.ndarray) -> np.ndarray:
        """Say which of these samples, all asked for before, could not be read."""
        ...


class EvaluationBatches:
    """Every sample once, in order; the last batch is padded and says what is real.

    Yields ``{"batch": ..., "valid": bool array}``. What stands in for a sample that
    cannot be read is not valid. `num_valid` counts the valid ones of the last pass.
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
        self._first, self._every = 0, 1

    def share(self, rows: slice) -> "EvaluationBatches":
        """Return the same batches with only these samples of each."""
        part = copy.copy(self)
        part._rows = rows
        return part

    def deal(self, first: int, every: int) -> "EvaluationBatches":
        """Return batch number `first` and every so many-th after it, whole."""
        part = copy.copy(self)
        part._first, part._every = first, every
        return part

    def __len__(self) -> int:
        return len(self._starts())

    def _starts(self) -> range:
        size = self.batch_size
        return range(self._first * size, len(self.source), self._every * size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.num_valid = 0
        for first in self._starts():
            places = np.arange(first, first + self.batch_size)[self._rows]
            valid = places < len(self.source)
            batch = self.source[np.minimum(places, len(self.source) - 1)]
            if isinstance(self.source, PartlyUnreadable):
                valid &= ~self.source.unreadable(places)
            self.num_valid += int(valid.sum())
            yield {"batch": batch, "valid": valid}
