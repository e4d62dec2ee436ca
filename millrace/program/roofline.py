"""What a device can do at most: the rate of a product, and of moving bytes.

``millrace devices`` shows these, and benchmarks compare what training reaches with them.
The best of several timings counts, since the question is what the device can do.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_TIMINGS = 3
_LONG_ENOUGH = 0.05
"""Seconds of work per timing, beside which starting it is nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulRate:
    """How fast square matrices are multiplied."""

    dtype: str
    size: int
    """Rows and columns of the matrices."""
    flops_per_second: float
    """Multiplications and additions, counted apart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyRates:
    """How fast bytes move; between host and device only where these are two memories."""

    num_bytes: int
    """Of the array that was moved."""
    on_device: float
    """Bytes per second, those read and those written both counted."""
    to_device: float | None
    """Bytes per second from a NumPy array."""
    from_device: float | None
    """Bytes per second into a NumPy array."""


def measure_matmul(
    device: Any = None, *, dtype: str = "float32", size: int | None = None
) -> MatmulRate:
    """Multiply square matrices on `device` (default: the first) many times in one call.

    float32 is computed as JAX does by default, on recent GPUs with TensorFloat-32.
    """
    device = device or jax.devices()[0]
    size = size or (1024 if device.platform == "cpu" else 8192)
    rng = np.random.default_rng(0)
    # Products of such matrices neither grow nor vanish.
    matrix = rng.standard_normal((size, size), np.float32) / np.float32(size) ** 0.5
    left = jax.device_put(matrix.astype(jnp.dtype(dtype)), device)

    def multiply(count: jax.Array, left: jax.Array) -> jax.Array:
        product = jax.lax.fori_loop(0, count, lambda _, x: x @ left, left)
        return product[0, 0]

    seconds = _seconds_each(multiply, left, device)
    return MatmulRate(dtype=dtype, size=size, flops_per_second=2 * size**3 / seconds)


def measure_copy(device: Any = None, *, num_bytes: int | None = None) -> CopyRates:
    """Read and write an array on `device`, and move it to and from the host."""
    device = device or jax.devices()[0]
    separate = device.platform != "cpu"
    num_bytes = num_bytes or (2**28 if separate else 2**26)
    host = np.ones(num_bytes // 4, np.float32)
    there = jax.device_put(host, device)

    def copy(count: jax.Array, array: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: x + 1, array)[0]

    on_device = 2 * num_bytes / _seconds_each(copy, there, device)
    to_device = from_device = None
    if separate:
        to_device = num_bytes / _best(lambda: jax.device_put(host, device))
        # A copy is kept with the array once made, so each timing needs a new one.
        fresh = iter([jax.device_put(host, device) for _ in range(_TIMINGS + 1)])
        from_device = num_bytes / _best(lambda: jax.device_get(next(fresh)))
    return CopyRates(
        num_bytes=num_bytes,
        on_device=on_device,
        to_device=to_device,
        from_device=from_device,
    )


def _seconds_each(
    repeat: Callable[[jax.Array, jax.Array], jax.Array], array: jax.Array, device: Any
) -> float:
    """Time one of `count` repetitions, so many that a timing is long enough."""
    compiled = jax.jit(repeat)

    def timed(count: int) -> float:
        number = jax.device_put(np.int32(count), device)
        return _best(lambda: compiled(number, array))

    count = 8  # the first repetition may copy what it is given
    while (seconds := timed(count)) < _LONG_ENOUGH and count < 2**20:
        count *= max(2, min(64, round(_LONG_ENOUGH / max(seconds, 1e-6))))
    return seconds / count


def _best(function: Callable[[], Any]) -> float:
    """Return the shortest of a few timings; the first call is not one of them."""
    jax.block_until_ready(function())
    timings = []
    for _ in range(_TIMINGS):
        started = time.perf_counter()
        jax.block_until_ready(function())
        timings.append(time.perf_counter() - started)
    return min(timings)
