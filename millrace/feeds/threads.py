"""Threads with the settings of JAX that hold where they are started.

What a context manager such as ``jax.enable_x64`` sets, JAX keeps for its thread only.
"""

import contextlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")

_SETTINGS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_device": jax.default_device,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
}
"""Settings that change results, by the name under which they are read."""


def with_settings(function: Callable[Parameters, Value]) -> Callable[Parameters, Value]:
    """Return a function for another thread, which has the settings of this one there."""
    wanted = {name: getattr(jax.config, name) for name in _SETTINGS}

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Value:
        with contextlib.ExitStack() as stack:
            for name, value in wanted.items():
                if getattr(jax.config, name) != value:
                    stack.enter_context(_SETTINGS[name](value))
            return function(*args, **kwargs)

    return call
