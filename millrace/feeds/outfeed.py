"""The queue out: results reach the host while the loop still runs."""

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
    """The outfeed's buffer is full and nobody reads it."""


class Outfeed:
    """Collects one element per step of a compiled loop, in order.

    Read it from the thread that ran the loop, afterwards, or from another thread while
    the loop runs. Nothing is lost: when the buffer is full the loop waits for the
    reader, and says so.

    Args:
        mode: "all" keeps every element, "last" only the newest.
        capacity_bytes: Size of the buffer.
        patience_seconds: How long a loop waits for a reader of a full buffer before it
            fails, since it began to wait or since something was last read.
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
        """Return what has arrived since the last call.

        In mode "all" the elements are stacked along a new leading dim, and None means
        that nothing has arrived. In mode "last" it is the newest element.

        Args:
            wait: Wait for the loop that is running to end first.
        """
        with self._changed:
            while wait and self._state == "running":
                self._changed.wait()
            if self._state == "new":
                raise ValueError(
                    "No loop has filled this outfeed. Pass it to repeat, while_loop or "
                    "train first."
                )
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
        """Yield elements as they arrive, until the loop that fills it has ended.

        Started before the loop, this waits for it. To watch a second loop, make a
        second outfeed: one whose loop has ended has nothing more to wait for.
        """
        if self.mode != "all":
            raise RuntimeError("Only an outfeed of mode 'all' can be iterated.")
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
        """Mark the time in which a loop fills this outfeed."""
        with self._changed:
            if self._state == "running":
                raise RuntimeError("This outfeed is being filled by another loop.")
            self._state = "running"
        try:
            yield self
        finally:
            self.close()

    def close(self) -> None:
        """Let readers go whose loop will never start."""
        with self._changed:
            self._state = "finished"
            self._changed.notify_all()

    def put(self, stack: Any, count: int) -> None:
        """Add `count` elements, the first ones along dim 0 of every leaf of `stack`."""
        if count == 0:
            return
        stack = _trimmed(stack, count)
        # The caller's transfer guard would take this copy for one that nobody asked for.
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
        said, began = False, time.monotonic()
        held = sum(block.bytes for block in self._blocks)
        # A block larger than the buffer still passes, alone.
        while self._blocks and held + size > self._capacity:
            if not said:
                _log.warning(
                    "The outfeed is full (%s bytes); the loop waits for its reader.",
                    f"{self._capacity:,}",
                )
                said = True
            deadline = max(began, self._last_read) + self._patience
            if not self._changed.wait(timeout=max(0.0, deadline - time.monotonic())):
                raise OutfeedFull(
                    f"The outfeed's buffer of {self._capacity} bytes has been full for "
                    f"{self._patience:g} s and nobody reads it. Read it from another "
                    "thread, use mode='last', or raise capacity_bytes."
                )
            held = sum(block.bytes for block in self._blocks)


def _trimmed(stack: Any, count: int) -> Any:
    """Leave out what is padding, to a power of two: few shapes, so few compilations."""
    kept = 1 << (count - 1).bit_length()
    return jax.tree.map(
        lambda x: lax.slice_in_dim(x, 0, kept) if kept < x.shape[0] else x, stack
    )


class _Block:
    """Elements of one execution, fetched from the device when first read."""

    def __init__(self, stack: Any, count: int) -> None:
        self._stack = stack
        self._fetched: Any = None
        self._lock = threading.Lock()
        self.start, self.stop = 0, count
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stack))
        """Held until its last element is read."""

    def _numpy(self) -> Any:
        with self._lock:
            if self._fetched is None:
                # Copied, so that an element does not keep the whole block alive.
                self._fetched = jax.tree.map(np.array, jax.device_get(self._stack))
                self._stack = None
            return self._fetched

    def element(self, index: int) -> Any:
        return jax.tree.map(lambda x: x[index].copy(), self._numpy())

    def rest(self) -> Any:
        return jax.tree.map(lambda x: x[self.start : self.stop], self._numpy())
