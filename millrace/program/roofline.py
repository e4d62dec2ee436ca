"""The measured roofline of a device: matrix products and memory bandwidth.

``millrace devices`` shows it, and benchmarks compare training with it. The best of several
timings counts, since the question is what the device can do.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_TIMINGS = 3
_MIN_SECONDS = 0.05
"""Work per timing, long enough to make the launch negligible."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulRate:
    """The measured rate of square matrix products."""

    dtype: str
    size: int
    """Rows and columns of the matrices."""
    flops_per_second: float
    """Multiplications and additions count separately."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyRates:
    """Measured bandwidths; None between host and device if they share their memory."""

    num_bytes: int
    """Size of the array that was copied."""
    on_device: float
    """Bytes per second, read and written."""
    to_device: float | None
    """Bytes per second from a NumPy array."""
    from_device: float | None
    """Bytes per second into a NumPy array."""


def measure_matmul(
    device: Any = None, *, dtype: str = "float32", size: int | None = None
) -> MatmulRate:
    """Measure square matrix products on `device` (default: the first).

    float32 uses JAX's default precision, which is TensorFloat-32 on recent GPUs.
    """
    device = device or jax.devices()[0]
    size = size or (1024 if device.platform == "cpu" else 8192)
    rng = np.random.default_rng(0)
    # Scaled so that repeated products neither overflow nor vanish.
    matrix = rng.standard_normal((size, size), np.float32) / np.float32(size) ** 0.5
    left = jax.device_put(matrix.astype(jnp.dtype(dtype)), device)

    def multiply(count: jax.Array, left: jax.Array) -> jax.Array:
        product = jax.lax.fori_loop(0, count, lambda _, x: x @ left, left)
        return product[0, 0]

    seconds = _time_repetition(multiply, left, device)
    return MatmulRate(dtype=dtype, size=size, flops_per_second=2 * size**3 / seconds)


def measure_copy(device: Any = None, *, num_bytes: int | None = None) -> CopyRates:
    """Measure copies of an array on `device`, and to and from the host."""
    device = device or jax.devices()[0]
    separate = device.platform != "cpu"
    num_bytes = num_bytes or (2**28 if separate else 2**26)
    host = np.ones(num_bytes // 4, np.float32)
    there = jax.device_put(host, device)

    def copy(count: jax.Array, array: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, x: x + 1, array)[0]

    on_device = 2 * num_bytes / _time_repetition(copy, there, device)
    to_device = from_device = None
    if separate:
        to_device = num_bytes / _time_best(lambda: jax.device_put(host, device))
        # An array caches its host copy, so each timing needs a new array.
        fresh = iter([jax.device_put(host, device) for _ in range(_TIMINGS + 1)])
        from_device = num_bytes / _time_best(lambda: jax.device_get(next(fresh)))
    return CopyRates(
        num_bytes=num_bytes,
        on_device=on_device,
        to_device=to_device,
        from_device=from_device,
    )


def _time_repetition(
    repeat: Callable[[jax.Array, jax.Array], jax.Array], array: jax.Array, device: Any
) -> float:
    """Return the seconds of one repetition; repeat until a timing is long enough."""
    compiled = jax.jit(repeat)

    def measure(count: int) -> float:
        number = jax.device_put(np.int32(count), device)
        return _time_best(lambda: compiled(number, array))

    count = 8  # the first repetition may copy its input
    while (seconds := measure(count)) < _MIN_SECONDS and count < 2**20:
        count *= max(2, min(64, round(_MIN_SECONDS / max(seconds, 1e-6))))
    return seconds / count


def _time_best(function: Callable[[], Any]) -> float:
    """Return the shortest of a few timings, after a first call to warm up."""
    jax.block_until_ready(function())
    timings = []
    for _ in range(_TIMINGS):
        started = time.perf_counter()
        jax.block_until_ready(function())
        timings.append(time.perf_counter() - started)
    return min(timings)
