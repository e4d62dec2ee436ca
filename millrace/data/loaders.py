"""Loaders of other libraries as endless batches of NumPy arrays that can seek."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np


def from_torch_loader(loader: Any, *, seed: int = 0) -> "TorchBatches":
    """Return the batches of a PyTorch ``DataLoader``, epoch after epoch.

    A resumed run continues with the next batch, without loading those before it: the order
    of samples depends only on the seed and the epoch.

    Args:
        loader: Over a dataset with an index. Its batches must have the same size
            (``drop_last=True``).
        seed: Seed of the order, for a loader that shuffles.
    """
    return TorchBatches(loader, seed)


class TorchBatches:
    """The batches of a PyTorch ``DataLoader``; see ``from_torch_loader``."""

    def __init__(self, loader: Any, seed: int) -> None:
        if getattr(loader, "batch_sampler", None) is None:
            raise TypeError(
                "from_torch_loader takes a torch.utils.data.DataLoader that makes batches "
                "of a dataset with an index. Pass any other loader to Infeed itself."
            )
        if not getattr(loader.batch_sampler, "drop_last", True):
            raise ValueError("The loader must drop its last batch: set drop_last=True.")
        self._loader = loader
        self._seed = seed
        self._position = 0

    def seek(self, position: int) -> None:
        """Make the next iteration start with batch number `position`."""
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        per_epoch = len(self._loader.batch_sampler)
        if per_epoch == 0:
            raise ValueError("The loader has no batches: its dataset is too small.")
        first, skipped = divmod(self._position, per_epoch)
        for epoch in itertools.count(first):
            batches = list(self._index_batches(epoch))[skipped if epoch == first else 0 :]
            yield from map(to_numpy, self._load(batches))

    def _index_batches(self, epoch: int) -> Iterable[Sequence[int]]:
        """Return the indices of the samples of every batch of an epoch."""
        import torch  # pyright: ignore[reportMissingImports]  (the user's)

        sampler = self._loader.sampler
        if hasattr(sampler, "set_epoch"):  # as DistributedSampler
            sampler.set_epoch(epoch)
        seed = int(np.random.SeedSequence([self._seed, epoch]).generate_state(1)[0])
        generator = getattr(sampler, "generator", None)
        if generator is not None:
            generator.manual_seed(seed)
            return list(self._loader.batch_sampler)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return list(self._loader.batch_sampler)

    def _load(self, batches: Sequence[Sequence[int]]) -> Iterable[Any]:
        # The user's own package.
        from torch.utils.data import (  # pyright: ignore[reportMissingImports]
            DataLoader,
        )

        loader = self._loader
        return DataLoader(
            loader.dataset,
            batch_sampler=batches,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )


def from_tf_data(dataset: Any) -> "TensorFlowBatches":
    """Return the batches of a ``tf.data.Dataset``, repeated without end.

    A resumed run continues with the next batch: TensorFlow skips those before it. Give
    ``shuffle`` a seed, so that the order is the same.

    Args:
        dataset: Batched, with ``drop_remainder=True``.
    """
    return TensorFlowBatches(dataset)


class TensorFlowBatches:
    """The batches of a ``tf.data.Dataset``; see ``from_tf_data``."""

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "as_numpy_iterator"):
            raise TypeError(
                f"from_tf_data takes a tf.data.Dataset, got {type(dataset).__name__}."
            )
        self._dataset = dataset
        self._position = 0

    def seek(self, position: int) -> None:
        """Make the next iteration start with batch number `position`."""
        self._position = position

    def __iter__(self) -> Iterator[Any]:
        repeated = self._dataset.repeat()
        if self._position:
            repeated = repeated.skip(self._position)
        return iter(repeated.as_numpy_iterator())


def to_numpy(value: Any) -> Any:
    """Return tensors in dictionaries, lists and tuples as NumPy arrays."""
    if isinstance(value, dict):
        return {name: to_numpy(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_numpy, value))
    if isinstance(value, list | tuple):
        return tuple(map(to_numpy, value))
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)
