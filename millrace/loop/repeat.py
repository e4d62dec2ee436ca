"""``repeat`` and ``while_loop``: compiled loops with an infeed and an outfeed."""

import collections
import contextlib
import json
import operator
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from millrace.data.benchmark import epoch_stats
from millrace.feeds.infeed import DatasetEnded, Infeed
from millrace.feeds.outfeed import Outfeed
from millrace.feeds.stager import Chunk
from millrace.loop.staging import MAX_IN_FLIGHT
from millrace.program.loop import LoopBody, LoopResult, loop_program

_MAX_STEPS = 256
"""Steps per execution at most, unless steps_per_execution is given."""
_MAX_OUTPUT_BYTES = 16 << 20
"""Device memory for the outputs of one execution."""
_MIN_SECONDS, _MAX_SECONDS = 0.02, 0.1
"""Target time of an execution: long enough to hide the call, short enough that outputs
can be read soon."""


def repeat(
    n: int,
    body: Callable[..., tuple[Any, Any]],
    carry: Any,
    *,
    infeed: Infeed | None = None,
    outfeed: Outfeed | None = None,
    steps_per_execution: int | None = None,
) -> Any:
    """Run `body` `n` times on the device and return the final carry.

    Args:
        n: Number of steps.
        body: ``(carry, element) -> (carry, output)``, or ``(carry) -> (carry, output)``
            without an infeed. Traced once per shape, independent of `n`.
        carry: Any pytree of arrays or numbers.
        infeed: Supplies one element per step.
        outfeed: Receives the output of each step; without one, outputs are dropped.
        steps_per_execution: Steps the device makes without returning to the host. By
            default, the number that takes 20 to 100 ms, so that outputs can be read
            soon after they are computed.

    >>> import millrace as mr
    >>> int(mr.repeat(10, lambda carry: (carry + 1, None), 0))
    10
    """
    loop = LoopBody(body, None, infeed is not None, outfeed is not None)
    with filling(outfeed):
        check_infeed(infeed)
        n = check_count("n", n)
        if steps_per_execution is not None and steps_per_execution < 1:
            raise ValueError(
                f"steps_per_execution must be at least 1, got {steps_per_execution}."
            )
        return _Loop(loop, infeed, outfeed, steps_per_execution).run(carry, n)


def while_loop(
    condition: Callable[[Any], Any],
    body: Callable[..., tuple[Any, Any]],
    carry: Any,
    *,
    infeed: Infeed | None = None,
    outfeed: Outfeed | None = None,
    maximum_iterations: int | None = None,
) -> Any:
    """Run `body` on the device while ``condition(carry)`` holds; see ``repeat``.

    >>> import millrace as mr
    >>> int(mr.while_loop(lambda c: c < 100, lambda c: (c * 2, None), 1))
    128
    """
    loop = LoopBody(body, condition, infeed is not None, outfeed is not None)
    with filling(outfeed):
        check_infeed(infeed)
        if maximum_iterations is not None:
            maximum_iterations = check_count("maximum_iterations", maximum_iterations)
        return _Loop(loop, infeed, outfeed, None).run(carry, maximum_iterations)


def check_count(name: str, value: Any) -> int:
    """Return a number of steps as an int; refuse fractions and negative numbers."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}.") from None
    if count < 0:
        raise ValueError(f"{name} must not be negative, got {count}.")
    return count


def filling(outfeed: Outfeed | None) -> contextlib.AbstractContextManager[Any]:
    """Mark the outfeed, if there is one, as being filled by a loop."""
    return outfeed.feeding() if outfeed is not None else contextlib.nullcontext()


def check_infeed(infeed: Any) -> None:
    """Refuse a dataset passed in place of an infeed, the most likely mistake."""
    if infeed is not None and not isinstance(infeed, Infeed):
        raise TypeError(
            f"infeed must be a millrace.Infeed, got {type(infeed).__name__}. Wrap the "
            "dataset: Infeed(dataset)."
        )


class _Loop:
    """One call of ``repeat`` or ``while_loop``."""

    def __init__(
        self,
        body: LoopBody,
        infeed: Infeed | None,
        outfeed: Outfeed | None,
        steps_per_execution: int | None,
    ) -> None:
        self._body = body
        self._program = loop_program(body)
        self._programs: dict[int | None, Any] = {}
        self._infeed = infeed
        self._outfeed = outfeed
        self._length = steps_per_execution
        self._pace = _Pace()
        self._capacity = _MAX_STEPS
        self._in_flight: collections.deque[jax.Array] = collections.deque()

    def run(self, carry: Any, limit: int | None) -> Any:
        _check_not_traced(carry)
        self._sharding = _find_sharding(carry)
        carry = jax.tree.map(lambda leaf: _own_array(leaf, self._sharding), carry)
        # Again: inside a jit, copies of concrete arrays are tracers.
        _check_not_traced(carry)
        done, more = 0, True
        if self._body.condition is not None:
            more = bool(jax.device_get(self._program.holds(carry)(carry)))
        while more and (limit is None or done < limit):
            chunk = None
            if self._infeed is not None:
                chunk = self._infeed.chunk(self._length, self._sharding)
                if chunk is None:
                    self._check_end(done, limit)
                    break
            self._limit_outputs(carry, chunk)
            steps = self._choose_steps(chunk, None if limit is None else limit - done)
            result = self._execute(carry, chunk, steps)
            carry = result.carry
            done += self._settle(steps, result)
            if self._body.condition is not None:
                more = bool(jax.device_get(result.more))
        return carry

    def _limit_outputs(self, carry: Any, chunk: Chunk | None) -> None:
        """Before the first step, limit the steps per execution by their outputs."""
        if self._outfeed is not None and self._length is None and not self._in_flight:
            data = None if chunk is None else chunk.data
            size = self._program.output_bytes(carry, data)
            self._capacity = max(1, min(_MAX_STEPS, _MAX_OUTPUT_BYTES // max(1, size)))

    def _choose_steps(self, chunk: Chunk | None, left: int | None) -> int:
        steps = self._length or min(self._pace.count, self._capacity)
        if chunk is not None:
            steps = min(steps, chunk.stop - chunk.start)
        return steps if left is None else min(steps, left)

    def _execute(self, carry: Any, chunk: Chunk | None, count: int) -> LoopResult:
        data = None if chunk is None else chunk.data
        start = self._number(0 if chunk is None else chunk.start)
        execute = self._compiled(carry, data, start, count)
        count_argument = () if self._length is not None else (self._number(count),)
        with jax.transfer_guard("disallow"):
            return execute(carry, data, start, *count_argument)

    def _compiled(self, carry: Any, data: Any, start: jax.Array, count: int) -> Any:
        """Return the program for an execution of `count` steps.

        Cached per loop: shapes and placement of carry and chunks do not change in it.
        """
        length = None if self._length is None else count
        if length not in self._programs:
            if length is not None:
                program = self._program.exactly(carry, data, start, length)
            else:
                capacity = self._capacity if self._outfeed is not None else 1
                program = self._program.up_to(carry, data, start, capacity)
            self._programs[length] = program
        return self._programs[length]

    def _number(self, value: int) -> jax.Array:
        return jax.device_put(np.int32(value), self._sharding)

    def _settle(self, steps: int, result: LoopResult) -> int:
        """Pass on the outputs of an execution; wait if enough of them are in flight."""
        if self._body.condition is not None:  # it may have ended the loop early
            steps = int(jax.device_get(result.steps))
        if self._infeed is not None:
            self._infeed.took(steps)
        if self._outfeed is not None:
            self._outfeed.put(result.outputs, steps)
        self._in_flight.append(result.steps)
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()
            self._pace.finished()
        return steps

    def _check_end(self, done: int, limit: int | None) -> None:
        """Raise an error about a dataset that ended too early, unless that is allowed."""
        assert self._infeed is not None
        if self._infeed.on_end == "stop":
            return
        steps = f"{done} steps" if limit is None else f"{done} of {limit} steps"
        raise DatasetEnded(
            f"The dataset ended after {self._infeed.position} elements; the loop has made "
            f"{steps}. Repeat the dataset, ask for fewer steps, or use "
            "Infeed(..., on_end='stop')."
        )


class _Pace:
    """Chooses the number of steps per execution by the time they take."""

    def __init__(self) -> None:
        self.count = 1
        self._last: float | None = None

    def finished(self) -> None:
        """Record that an execution has ended, and adjust the next one."""
        now = time.perf_counter()
        if self._last is not None:
            if now - self._last < _MIN_SECONDS:
                self.count = min(self.count * 2, _MAX_STEPS)
            elif now - self._last > _MAX_SECONDS:
                self.count = max(self.count // 2, 1)
        self._last = now


def _find_sharding(carry: Any) -> Sharding | None:
    """Return where numbers and elements go: to all devices of the carry.

    If it is committed to none, that is the current default device, which is thread-local
    and so unknown to the thread of the infeed. None leaves the choice to JAX.
    """
    for leaf in jax.tree.leaves(carry):
        if isinstance(leaf, jax.Array) and leaf.committed:
            return _on_all_devices(leaf)
    chosen = getattr(jax.config, "jax_default_device", None)
    return SingleDeviceSharding(chosen) if isinstance(chosen, jax.Device) else None


def _on_all_devices(array: jax.Array) -> Sharding:
    """Return the sharding of a full copy on every device of an array."""
    if len(array.devices()) == 1:
        return SingleDeviceSharding(next(iter(array.devices())))
    if isinstance(array.sharding, NamedSharding):
        return NamedSharding(array.sharding.mesh, PartitionSpec())
    devices = list(array.sharding.devices_indices_map(array.shape))
    return NamedSharding(Mesh(devices, ("device",)), PartitionSpec())


def _own_array(leaf: Any, sharding: Sharding | None) -> jax.Array:
    """Return a copy: the loop donates its carry, and the caller keeps the original."""
    if isinstance(leaf, jax.Array):
        copied = jnp.copy(leaf)
        if leaf.committed or sharding is None:
            return copied
        return jax.device_put(copied, sharding)
    array = np.asarray(leaf)
    array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    return jax.device_put(array, sharding)


def _check_not_traced(carry: Any) -> None:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(carry)):
        raise TypeError(
            "repeat and while_loop run compiled loops from the host and cannot be called "
            "inside jax.jit, jax.grad or jax.vmap. Call them outside, or use jax.lax.scan, "
            "jax.lax.fori_loop or jax.lax.while_loop there."
        )


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
