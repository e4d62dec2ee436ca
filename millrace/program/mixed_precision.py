"""16-bit training: casts, stochastic rounding and loss scaling.

Stochastic rounding goes up or down at random and is right on average. A bfloat16 weight of
1.0 cannot move by 0.001: the next value is 0.0078 away, and the nearest is always 1.0.
Rounding up with probability 0.001 / 0.0078 moves it on average.

Loss scaling keeps small float16 gradients from underflowing and large ones finite.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32, UInt32

# --- casts ---


def widen(tree: Any) -> Any:
    """Cast 16-bit floats to float32; leave everything else unchanged."""
    return cast_where(tree, jnp.float32, lambda x: jnp.dtype(x.dtype).itemsize == 2)


def narrow(tree: Any, dtype: str) -> Any:
    """Cast float32 to the compute dtype; leave integers, keys and other floats."""
    return cast_where(tree, jnp.dtype(dtype), lambda x: x.dtype == jnp.float32)


def cast_where(tree: Any, dtype: Any, predicate: Callable[[Any], bool]) -> Any:
    """Cast the floats of a tree for which `predicate` is true."""

    def cast(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating) and predicate(x):
            return x.astype(dtype)
        return x

    return jax.tree.map(cast, tree)


# --- stochastic rounding ---

_MANTISSA_BITS_DROPPED = {"bfloat16": 16, "float16": 13}
_FLOAT16_SMALLEST_NORMAL = 2.0**-14
_FLOAT16_SUBNORMAL_SPACING = 2.0**-24
_FLOAT16_LARGEST = 65504.0


def round_tree(tree: Any, like: Any, key: Array, *, stochastic: bool) -> Any:
    """Cast float32 leaves to the dtypes of `like`; round 16-bit ones at random if asked."""

    def round_leaf(path: Any, leaf: Array, old: Array) -> Array:
        if not stochastic or str(old.dtype) not in _MANTISSA_BITS_DROPPED:
            return leaf.astype(old.dtype)
        # Keyed by name, so that a bucket or stage rounds as the whole tree would.
        name = jax.tree_util.keystr(path)
        leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
        return stochastic_round(leaf, old.dtype, leaf_key)

    return jax.tree_util.tree_map_with_path(round_leaf, tree, like)


def stochastic_round(
    x: Float32[Array, "*dims"], dtype: Any, key: Array
) -> Float[Array, "*dims"]:
    """Round to bfloat16 or float16 without bias.

    Adds random bits below the last bit that is kept, then truncates. Numbers that `dtype`
    represents exactly never change, infinities and NaNs are kept, and float16 saturates
    instead of overflowing.
    """
    name = str(jnp.dtype(dtype))
    bits = random_bits(key, x.shape)
    if name == "float16":
        rounded, is_kept = _round_to_float16(x, bits), ~jnp.isfinite(x)
    elif name == "bfloat16":
        # The mantissa of infinity is zero, so adding bits and truncating keeps it.
        pattern = lax.bitcast_convert_type(x, jnp.uint32)
        rounded, is_kept = _add_and_truncate(pattern, bits, name), jnp.isnan(x)
    else:
        raise ValueError(f"Stochastic rounding needs bfloat16 or float16, got {name}.")
    return jnp.where(is_kept, x, rounded).astype(dtype)


def _add_and_truncate(
    pattern: UInt32[Array, "*dims"], bits: UInt32[Array, "*dims"], name: str
) -> Float32[Array, "*dims"]:
    dropped = (1 << _MANTISSA_BITS_DROPPED[name]) - 1
    cut = (pattern + (bits & jnp.uint32(dropped))) & jnp.uint32(0xFFFFFFFF ^ dropped)
    return lax.bitcast_convert_type(cut, jnp.float32)


def _round_to_float16(
    x: Float32[Array, "*dims"], bits: UInt32[Array, "*dims"]
) -> Float32[Array, "*dims"]:
    magnitude = jnp.abs(x)
    pattern = lax.bitcast_convert_type(magnitude, jnp.uint32)
    normal = _add_and_truncate(pattern, bits, "float16")
    # Subnormal float16 numbers are evenly spaced, so their mantissa cannot be truncated.
    uniform = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    spacing = jnp.float32(_FLOAT16_SUBNORMAL_SPACING)
    subnormal = jnp.floor(magnitude / spacing + uniform) * spacing
    is_subnormal = magnitude < jnp.float32(_FLOAT16_SMALLEST_NORMAL)
    rounded = jnp.where(is_subnormal, subnormal, normal)
    return jnp.copysign(jnp.minimum(rounded, jnp.float32(_FLOAT16_LARGEST)), x)


def random_bits(key: Array, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Return one random word per element, from a counter hash keyed by `key`.

    Rounding needs only uniform bits. An update of 25 million weights took at most 1.2
    times as long as with plain rounding; with JAX's threefry bits, 7.9 times. The key must
    have been folded or split: one made from a small seed has a word of 0.
    """
    words = jax.random.key_data(key).astype(jnp.uint32).ravel()
    word = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) ^ words[0]
    word = word * jnp.uint32(0x9E3779B9) + words[-1]
    # The rest is the hash "lowbias32".
    word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
    return word ^ (word >> 16)


# --- loss scaling ---

_INITIAL_FACTOR = 2.0**15
_MIN_FACTOR, _MAX_FACTOR = 1.0, 2.0**24
_GOOD_UPDATES_BEFORE_GROWTH = 2000  # as in torch.amp and NVIDIA's examples


class LossScale(NamedTuple):
    """The factor on the loss and its history."""

    factor: Float32[Array, ""]
    good_updates: Int32[Array, ""]
    """Updates without an overflow since the factor last changed."""
    skipped: Int32[Array, ""]
    """Updates of the whole run that overflowed and changed nothing."""


def init_loss_scale(setting: float | Literal["dynamic"]) -> LossScale:
    """Return the initial scale for ``Plan.loss_scaling``; 0 means a factor of 1."""
    factor = _INITIAL_FACTOR if setting == "dynamic" else setting or 1.0
    return LossScale(jnp.float32(factor), jnp.int32(0), jnp.int32(0))


def adjust_loss_scale(scale: LossScale, finite: Bool[Array, ""]) -> LossScale:
    """Halve the factor after an overflow; double it after 2,000 updates without one."""
    good = jnp.where(finite, scale.good_updates + 1, 0)
    grow = good >= _GOOD_UPDATES_BEFORE_GROWTH
    factor = jnp.where(finite, scale.factor, scale.factor / 2)
    factor = jnp.where(grow, factor * 2, factor)
    return LossScale(
        jnp.clip(factor, _MIN_FACTOR, _MAX_FACTOR),
        jnp.where(grow, 0, good),
        jnp.where(finite, scale.skipped, scale.skipped + 1),
    )


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every number in the tree is finite."""
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(leaves).all() if leaves else jnp.bool_(True)
