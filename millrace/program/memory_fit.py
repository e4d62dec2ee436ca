"""Whether a compiled program fits the device's memory, and which batch would."""

import os
from collections.abc import Callable
from typing import Any

from millrace.numbers import format_bytes


def memory_limit(device: Any) -> int:
    """Return the bytes that programs may use on a device; on CPU, the machine's memory."""
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def too_large(
    batch: int, needed: int, limit: int, needs: Callable[[int], int]
) -> str | None:
    """Say what a batch needs and which would fit; None if it fits.

    Args:
        batch: Samples.
        needed: Bytes that these need.
        limit: Bytes there are.
        needs: Returns the bytes that another batch needs, once it has been compiled.
    """
    if needed <= limit:
        return None
    sizes = [format_bytes(size, digits=2) for size in (needed, limit)]
    said = f"batch {batch} needs {sizes[0]} of {sizes[1]}"
    smaller = 1 << max(0, (batch - 1).bit_length() - 1)  # the next power of two below
    while smaller < batch:
        if needs(smaller) <= limit:
            return f"{said}; the largest power of two that fits is {smaller}"
        if smaller == 1:
            break
        smaller //= 2
    return f"{said}; not even a batch of 1 fits"
