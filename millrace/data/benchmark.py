"""Measures how fast a dataset can be read on the host."""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np


def dataset_benchmark(
    dataset: Iterable[Any],
    number_of_epochs: int,
    elements_per_epoch: int,
    *,
    print_stats: bool = True,
    do_memcpy: bool = True,
) -> str:
    """Read a dataset as fast as possible and return the throughput of every epoch.

    Args:
        dataset: An iterable that does not end; repeat it if necessary.
        number_of_epochs: Number of measurements.
        elements_per_epoch: Elements (usually batches) per measurement.
        print_stats: Print the throughput of each epoch to standard error.
        do_memcpy: Copy every array once, as staging for a device would.

    Returns:
        A JSON object whose "epochs" is a list of objects with elements_processed,
        total_bytes_processed, time_elapsed (s), elements_per_second and
        bandwidth (GB/s).
    """
    for name, value in (
        ("number_of_epochs", number_of_epochs),
        ("elements_per_epoch", elements_per_epoch),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    elements = iter(dataset)
    epochs = [
        _measure(elements, epoch, elements_per_epoch, print_stats, do_memcpy)
        for epoch in range(number_of_epochs)
    ]
    return json.dumps({"epochs": epochs})


def _measure(
    elements: Iterator[Any], epoch: int, count: int, print_stats: bool, do_memcpy: bool
) -> dict[str, float]:
    size = 0
    started = time.perf_counter()
    for done in range(count):
        try:
            element = next(elements)
        except StopIteration:
            raise ValueError(
                f"The dataset ended after {epoch * count + done} elements; a benchmark "
                f"needs {count} per epoch without end. Repeat the dataset."
            ) from None
        for array in _arrays(element):
            size += (array.copy() if do_memcpy else array).nbytes
    return epoch_stats(epoch, count, size, time.perf_counter() - started, print_stats)


def epoch_stats(
    epoch: int, count: int, size: int, elapsed: float, print_stats: bool
) -> dict[str, float]:
    """Return the measurement of one epoch as the fields of the JSON object."""
    elapsed = max(elapsed, 1e-9)
    stats = {
        "elements_processed": count,
        "total_bytes_processed": size,
        "time_elapsed": elapsed,
        "elements_per_second": count / elapsed,
        "bandwidth": size / (1e9 * elapsed),
    }
    if print_stats:
        print(
            f"epoch {epoch}: {stats['elements_per_second']:,.1f} elements/s, "
            f"{stats['bandwidth']:.3f} GB/s",
            file=sys.stderr,
        )
    return stats


def _arrays(element: Any) -> Iterator[np.ndarray]:
    """Yield the leaves of a pytree of dicts, lists and tuples, without JAX."""
    if isinstance(element, dict):
        element = element.values()
    elif not isinstance(element, list | tuple):
        yield np.asarray(element)
        return
    for part in element:
        yield from _arrays(part)
