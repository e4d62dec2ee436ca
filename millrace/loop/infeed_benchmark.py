"""Measure how fast an infeed moves a dataset to the device."""

import json
import time

import jax

from millrace.data.benchmark import epoch_stats
from millrace.feeds.infeed import DatasetEnded, Infeed
from millrace.loop.repeat import check_infeed


def infeed_benchmark(
    infeed: Infeed,
    number_of_epochs: int,
    elements_per_epoch: int,
    *,
    print_stats: bool = True,
) -> str:
    """Take elements from an infeed as fast as they reach the device; return JSON.

    The JSON has the fields of ``dataset_benchmark``; the difference between the two is
    the cost of staging and transfer.
    """
    check_infeed(infeed)
    for name, value in (
        ("number_of_epochs", number_of_epochs),
        ("elements_per_epoch", elements_per_epoch),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    epochs = []
    for epoch in range(number_of_epochs):
        started = time.perf_counter()
        size = _take(infeed, elements_per_epoch)
        elapsed = time.perf_counter() - started
        epochs.append(epoch_stats(epoch, elements_per_epoch, size, elapsed, print_stats))
    return json.dumps({"epochs": epochs})


def _take(infeed: Infeed, count: int) -> int:
    """Take `count` elements and return their size in bytes."""
    size = taken = 0
    while taken < count:
        chunk = infeed.chunk()
        if chunk is None:
            raise DatasetEnded(
                f"The dataset ended after {infeed.position} elements, but the benchmark "
                f"needs {count} per epoch. Repeat the dataset without end."
            )
        jax.block_until_ready(chunk.data)
        used = min(count - taken, chunk.stop - chunk.start)
        leaves = jax.tree.leaves(chunk.data)
        size += used * sum(leaf.nbytes // leaf.shape[0] for leaf in leaves)
        infeed.took(used)
        taken += used
    return size
