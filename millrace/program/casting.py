"""Casts between 16-bit types and float32, for whole trees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def widened(tree: Any) -> Any:
    """Cast 16-bit floats to float32; leave everything else as it is."""
    return cast_where(tree, jnp.float32, lambda x: jnp.dtype(x.dtype).itemsize == 2)


def narrow(tree: Any, dtype: str) -> Any:
    """Cast float32 to the compute type; leave integers, keys and other floats."""
    return cast_where(tree, jnp.dtype(dtype), lambda x: x.dtype == jnp.float32)


def cast_where(tree: Any, dtype: Any, chosen: Callable[[Any], bool]) -> Any:
    """Cast those floats of a tree for which `chosen` is true."""

    def cast(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating) and chosen(x):
            return x.astype(dtype)
        return x

    return jax.tree.map(cast, tree)
