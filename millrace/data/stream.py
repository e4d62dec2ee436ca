"""An endless stream of batches, shuffled anew each epoch, that resumes anywhere.

Where a batch comes from depends only on the seed and its number, so a position is one
integer and a resumed run sees exactly the batches an uninterrupted one would have seen.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from millrace.data.source import Source

Transform = Callable[[Any, np.random.Generator], Any]
"""Changes a batch on the host, drawing from the given generator only."""


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

    def seek(self, position: int) -> None:
        """Make the next iteration start with batch number `position`."""
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        position = self._position
        while True:
            yield self.batch(position)
            position += 1

    def batch(self, position: int) -> Any:
        """Return batch number `position`, counted from the start of training."""
        batch = self.source[self.indices(position)]
        if self._transform is None:
            return batch
        generator = np.random.default_rng([self._seed, 1, position])
        return self._transform(batch, generator)

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

    def __len__(self) -> int:
        return -(-len(self.source) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.num_valid = 0
        for first in range(0, len(self.source), self.batch_size):
            places = np.arange(first, first + self.batch_size)
            valid = places < len(self.source)
            batch = self.source[np.minimum(places, len(self.source) - 1)]
            if isinstance(self.source, PartlyUnreadable):
                valid &= ~self.source.unreadable(places)
            self.num_valid += int(valid.sum())
            yield {"batch": batch, "valid": valid}
