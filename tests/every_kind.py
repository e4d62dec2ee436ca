"""Arrays of every type that a state may have."""

import jax
import jax.numpy as jnp
import numpy as np


def every_kind() -> dict:
    return {
        **{f"{name} key": jax.random.key(3, impl=name) for name in ("threefry2x32", "rbg")},
        "keys": jax.random.split(jax.random.key(4), (2, 3)),
        "no keys": jax.random.split(jax.random.key(4), 0),
        "nothing": np.zeros((3, 0), np.float32),
        "no truth": np.zeros((0,), bool),
        "truth": np.array([True, False]),
        "scalar": np.float64(0.1),
        **{
            name: np.arange(6).reshape(2, 3).astype(jnp.dtype(name))
            for name in (
                *("int8", "uint16", "int4", "uint4", "bfloat16", "complex64"),
                *("float8_e4m3fn", "float8_e5m2", "float8_e4m3"),
            )
        },
    }


def exact_value(leaf) -> tuple:
    is_prng_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    raw = jax.random.key_data(leaf) if is_prng_key else leaf
    return str(leaf.dtype), leaf.shape, np.asarray(raw).tobytes()
