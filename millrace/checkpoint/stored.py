"""Arrays of every type as arrays that orbax can write, and back."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_prng_key(leaf: Any) -> bool:
    """Whether an array, or its shape and type, holds typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def to_stored(leaf: Any) -> np.ndarray:
    """Convert an array to one that orbax can write; see ``from_stored``."""
    raw = np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
    if raw.size == 0:
        return np.zeros(1, np.uint8)  # orbax cannot write empty arrays
    return raw.view(_stored_type(raw.dtype))


def from_stored(stored: Any, like: Any) -> Any:
    """Undo ``to_stored``: return an array of the shape and type of `like`.

    It is a NumPy array, or a JAX array for typed random keys, which NumPy does not have.
    """
    raw = raw_spec(like)
    if math.prod(raw.shape) == 0:
        stored = np.empty(raw.shape, raw.dtype)
    stored = np.asarray(stored).view(raw.dtype).reshape(raw.shape)
    if not is_prng_key(like):
        return stored
    return jax.random.wrap_key_data(stored, impl=_key_impl(like))


def stored_like(like: Any) -> np.ndarray:
    """Return an array of the shape and type that ``to_stored`` would return.

    It takes no memory: all its elements are the same one.
    """
    raw = raw_spec(like)
    if math.prod(raw.shape) == 0:
        return np.zeros(1, np.uint8)
    return np.broadcast_to(np.zeros((), _stored_type(np.dtype(raw.dtype))), raw.shape)


def raw_spec(like: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and type of an array, or of the data of random keys."""
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return jax.eval_shape(jax.random.key_data, shape) if is_prng_key(like) else shape


def _key_impl(like: Any) -> Any:
    # jax.random.key_impl takes arrays only, so it is called while tracing one.
    impls = []
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), shape)
    return impls[0]


@functools.cache
def _stored_type(dtype: np.dtype) -> np.dtype:
    """Return `dtype`, or an unsigned type of its size if tensorstore does not know it."""
    import tensorstore

    try:
        tensorstore.dtype(dtype)
    except (TypeError, ValueError):
        return np.dtype(f"u{dtype.itemsize}")
    return dtype
