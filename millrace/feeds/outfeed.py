"""The outfeed: results of a compiled loop reach the host while it is running."""

import collections
import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax import lax

_log = logging.getLogger("millrace")


class OutfeedFull(RuntimeError):
    """The buffer of an outfeed is full and nobody reads it."""


class Outfeed:
    """Collects one element per step of a compiled loop, in order.

    Read it after the loop, or from another thread while the loop runs. Nothing is lost:
    when the buffer is full, the loop logs a warning and waits for the reader.

    Args:
        mode: "all" keeps every element, "last" only the newest.
        capacity_bytes: Size of the buffer.
        patience_seconds: How long a loop waits for room in a full buffer before it raises
            ``OutfeedFull``. The time starts again whenever something is read.
    """

    def __init__(
        self,
        mode: Literal["all", "last"] = "all",
        *,
        capacity_bytes: int = 1 << 30,
        patience_seconds: float = 30.0,
    ) -> None:
        if mode not in ("all", "last"):
            raise ValueError(f"mode must be 'all' or 'last', got {mode!r}.")
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes must be positive, got {capacity_bytes}.")
        self.mode = mode
        self._capacity = capacity_bytes
        self._patience = patience_seconds
        self._blocks: collections.deque[_Block] = collections.deque()
        self._changed = threading.Condition()
        self._state: Literal["new", "running", "finished"] = "new"
        self._last_read = -math.inf

    def dequeue(self, wait: bool = False) -> Any:
        """Return the elements that have arrived since the last call.

        In mode "all" they are stacked along a new leading dim. In mode "last" only the
        newest element is returned. None if there are none, as before the loop has started:
        a thread may poll from the beginning.

        Args:
            wait: Wait for the running loop to end first, if there is one.
        """
        with self._changed:
            while wait and self._state == "running":
                self._changed.wait()
            self._last_read = time.monotonic()
            blocks = list(self._blocks)
            if self.mode == "all":
                self._blocks.clear()
                self._changed.notify_all()
        if not blocks:
            return None
        if self.mode == "last":
            return blocks[-1].element(blocks[-1].stop - 1)
        parts = [block.rest() for block in blocks]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def __iter__(self) -> Iterator[Any]:
        """Yield elements as they arrive, until the loop ends.

        Iteration may start before the loop does. Use a new outfeed for every loop that is
        watched this way: iterating over one whose loop has ended does not wait.
        """
        if self.mode != "all":
            raise RuntimeError("Only an outfeed with mode 'all' can be iterated over.")
        while True:
            with self._changed:
                while not self._blocks and self._state != "finished":
                    self._changed.wait()
                if not self._blocks:
                    return
                self._last_read = time.monotonic()
                block = self._blocks[0]
                index = block.start
                block.start += 1
                if block.start == block.stop:
                    self._blocks.popleft()
                self._changed.notify_all()
            yield block.element(index)

    @contextlib.contextmanager
    def feeding(self) -> Iterator["Outfeed"]:
        """Mark the outfeed as running while a loop fills it."""
        with self._changed:
            if self._state == "running":
                raise RuntimeError("This outfeed is being filled by another loop.")
            self._state = "running"
        try:
            yield self
        finally:
            self.close()

    def close(self) -> None:
        """Release readers that wait for a loop that will not start or has ended."""
        with self._changed:
            self._state = "finished"
            self._changed.notify_all()

    def put(self, stack: Any, count: int) -> None:
        """Add the first `count` elements along dim 0 of every leaf of `stack`."""
        if count == 0:
            return
        stack = _trim(stack, count)
        # Loops run under a transfer guard, which would reject this copy.
        with jax.transfer_guard_device_to_host("allow"):
            jax.copy_to_host_async(stack)
        block = _Block(stack, count)
        with self._changed:
            if self.mode == "last":
                self._blocks.clear()
            self._wait_for_room(block.bytes)
            self._blocks.append(block)
            self._changed.notify_all()

    def _wait_for_room(self, size: int) -> None:
        warned, began = False, time.monotonic()
        held = sum(block.bytes for block in self._blocks)
        # A block that is larger than the buffer is let in when the buffer is empty.
        while self._blocks and held + size > self._capacity:
            if not warned:
                _log.warning(
                    "The outfeed is full (%s bytes); the loop waits for its reader.",
                    f"{self._capacity:,}",
                )
                warned = True
            deadline = max(began, self._last_read) + self._patience
            if not self._changed.wait(timeout=max(0.0, deadline - time.monotonic())):
                raise OutfeedFull(
                    f"The outfeed buffer of {self._capacity} bytes has been full for "
                    f"{self._patience:g} s and nobody reads it. Read it from another "
                    "thread, use mode='last', or increase capacity_bytes."
                )
            held = sum(block.bytes for block in self._blocks)


def _trim(stack: Any, count: int) -> Any:
    """Cut off padding, to a power of two: few shapes mean few compilations."""
    kept = 1 << (count - 1).bit_length()
    return jax.tree.map(
        lambda x: lax.slice_in_dim(x, 0, kept) if kept < x.shape[0] else x, stack
    )


class _Block:
    """Elements of one execution, copied from the device when first read."""

    def __init__(self, stack: Any, count: int) -> None:
        self._stack = stack
        self._fetched: Any = None
        self._lock = threading.Lock()
        self.start, self.stop = 0, count
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stack))
        """Bytes in the buffer until the last element is read."""

    def _numpy(self) -> Any:
        with self._lock:
            if self._fetched is None:
                # On a CPU, device_get returns a view that keeps the JAX array alive.
                self._fetched = jax.tree.map(np.array, jax.device_get(self._stack))
                self._stack = None
            return self._fetched

    def element(self, index: int) -> Any:
        return jax.tree.map(lambda x: x[index].copy(), self._numpy())

    def rest(self) -> Any:
        return jax.tree.map(lambda x: x[self.start : self.stop], self._numpy())
