"""The memory that compiled programs need, and the batch that would fit."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from millrace.numbers import format_bytes


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all leaves, which may be arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def peak_bytes(programs: Sequence[jax.stages.Compiled]) -> int:
    """Return the memory per device that the largest of some programs needs."""
    return max((_program_bytes(program) for program in programs), default=0)


def _program_bytes(program: jax.stages.Compiled) -> int:
    analysis: Any = program.memory_analysis()
    if analysis is None:  # not every platform has one
        return 0
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def memory_limit(device: Any) -> int:
    """Return the bytes available to programs on a device; on CPU, the machine's memory."""
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_shortage(
    batch: int, needed: int, limit: int, measure: Callable[[int], int]
) -> str | None:
    """Return how much memory a batch lacks and which batch would fit; None if it fits.

    Args:
        batch: Samples.
        needed: Bytes that they need.
        limit: Bytes available.
        measure: Returns the bytes that another batch needs, by compiling for it.
    """
    if needed <= limit:
        return None
    shortage = f"batch {batch} needs {format_bytes(needed)} of {format_bytes(limit)}"
    smaller = 1 << max(0, (batch - 1).bit_length() - 1)  # the next power of two below
    while smaller < batch:
        if measure(smaller) <= limit:
            return f"{shortage}; the largest power of two that fits is {smaller}"
        if smaller == 1:
            break
        smaller //= 2
    return f"{shortage}; not even a batch of 1 fits"
