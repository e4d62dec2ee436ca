"""Leapfrog steps of the chains as one GPU kernel each, in Pallas for Triton.

XLA needs about ten kernels for a step, each too small to fill a GPU: starting them is
what takes the time. Here every program of a kernel takes some chains and some pixels. It
finishes the step before (adds up the gradient, moves momentum and position), decodes its
pixels, and goes back to z with what they alone contribute to the gradient: behind the
pixels the backward pass is linear, so that its parts need to be added up only in z, by
the next kernel. The hidden layers are computed again for every group of pixels, which
costs less than a kernel more.

For jax 0.10 and 0.11; the latter announces the end of Pallas for Triton, and what follows
it, Mosaic, needs this kernel written anew.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from millrace.apps.vcd.model import Tree, log_prior
from millrace.apps.vcd.sampler import Chain, Follow

_CHAINS, _PIXELS, _CHUNK = 64, 32, 64
"""Of a program: chains, pixels, and hidden units at a time. Powers of two, as everything
in Triton. 64 chains are what Hopper's matrix units take at least; with 64 pixels, 32-bit
weights would need more shared memory than there is (238 of 227 KiB)."""
_NEVER = -1e4
"""The logit of pixels that are there only to fill up: 0 with certainty."""
_WARPS = 4
MOST_HIDDEN, MOST_DIMS = 256, 64
"""What a program can hold."""


class _Padded(NamedTuple):
    """The decoder and pictures, filled up to powers of two."""

    w1: jax.Array
    b1: jax.Array
    w2: jax.Array
    b2: jax.Array
    w3: jax.Array
    b3: jax.Array
    x: jax.Array

    @property
    def tiles(self) -> int:
        return self.w3.shape[1] // _PIXELS


def follower(num_steps: int, *, interpret: bool = False) -> Callable[..., Follow]:
    """Return ``(decoder, x) -> follow``, which does what ``sampler.leapfrog`` does.

    Args:
        num_steps: Leapfrog steps of a trajectory.
        interpret: Run the kernel's operations one by one on any device, to test them.
    """

    def prepare(decoder: Tree, x: jax.Array) -> Follow:
        padded = _pad(decoder, x)
        move = functools.partial(_move, padded, interpret=interpret)

        def follow(
            chain: Chain, momentum: jax.Array, step_size: jax.Array
        ) -> tuple[Chain, jax.Array]:
            num_chains, z_dim = chain.position.shape
            shape = padded.x.shape[0], padded.w1.shape[0]
            z, r = _fill(chain.position, shape), _fill(momentum, shape)
            # The gradient at the start as if all pixels but the first had no part in it.
            first = _fill(chain.gradient + chain.position, shape)
            parts = jnp.zeros((padded.tiles, *shape)).at[0].set(first)
            likelihood = parts
            for number in range(num_steps):
                kick = 0.5 if number == 0 else 1.0
                z, r, parts, likelihood = move(z, r, parts, step_size, kick)
            position = z[:num_chains, :z_dim]
            gradient = parts.sum(0)[:num_chains, :z_dim] - position
            log_density = likelihood.sum(0)[:num_chains] + log_prior(position)
            momentum = r[:num_chains, :z_dim] + 0.5 * step_size * gradient
            return Chain(position, log_density, gradient), momentum

        return follow

    return prepare


def _pad(decoder: Tree, x: jax.Array) -> _Padded:
    first, second, last = decoder["hidden1"], decoder["hidden2"], decoder["output"]
    z_dim = _power_of_two(first["kernel"].shape[0])
    units = first["kernel"].shape[1]
    rest = units % _CHUNK
    wide = units - rest + (_power_of_two(rest) if rest else 0)
    chains, pixels = _multiple(x.shape[0], _CHAINS), _multiple(x.shape[1], _PIXELS)
    return _Padded(
        _fill(first["kernel"], (z_dim, wide)),
        _fill(first["bias"].astype(jnp.float32), (wide,)),
        _fill(second["kernel"], (wide, wide)),
        _fill(second["bias"].astype(jnp.float32), (wide,)),
        _fill(last["kernel"], (wide, pixels)),
        _fill(last["bias"].astype(jnp.float32), (pixels,), _NEVER),
        _fill(x, (chains, pixels)),
    )


def _move(
    padded: _Padded,
    z: jax.Array,
    r: jax.Array,
    parts: jax.Array,
    step_size: jax.Array,
    kick: float,
    *,
    interpret: bool,
) -> Any:
    """Finish the step before; decode where it leads: new z, r, and the pixels' parts."""
    (num_chains, z_dim), tiles = z.shape, padded.tiles
    wide = padded.w1.shape[1]
    whole = functools.partial(pl.BlockSpec, index_map=lambda tile, block: (0, 0))
    vector = pl.BlockSpec((wide,), lambda tile, block: (0,))
    of_chains = pl.BlockSpec((_CHAINS, z_dim), lambda tile, block: (block, 0))
    call = pl.pallas_call(
        functools.partial(_kernel, kick=kick, tiles=tiles),
        grid=(tiles, num_chains // _CHAINS),
        in_specs=[
            of_chains,
            of_chains,
            pl.BlockSpec((tiles, _CHAINS, z_dim), lambda tile, block: (0, block, 0)),
            pl.BlockSpec((1,), lambda tile, block: (0,)),
            whole((z_dim, wide)),
            vector,
            whole((wide, wide)),
            vector,
            pl.BlockSpec((wide, _PIXELS), lambda tile, block: (0, tile)),
            pl.BlockSpec((_PIXELS,), lambda tile, block: (tile,)),
            pl.BlockSpec((_CHAINS, _PIXELS), lambda tile, block: (block, tile)),
        ],
        out_specs=[
            of_chains,
            of_chains,
            pl.BlockSpec((None, _CHAINS, z_dim), lambda tile, block: (tile, block, 0)),
            pl.BlockSpec((None, _CHAINS), lambda tile, block: (tile, block)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(z.shape, jnp.float32),
            jax.ShapeDtypeStruct(z.shape, jnp.float32),
            jax.ShapeDtypeStruct((tiles, *z.shape), jnp.float32),
            jax.ShapeDtypeStruct((tiles, num_chains), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2),
        interpret=interpret,
        name="leapfrog",
    )
    return call(z, r, parts, step_size.reshape(1), *padded)


def _kernel(
    z_ref: Any,
    r_ref: Any,
    parts_ref: Any,
    step_size_ref: Any,
    w1_ref: Any,
    b1_ref: Any,
    w2_ref: Any,
    b2_ref: Any,
    w3_ref: Any,
    b3_ref: Any,
    x_ref: Any,
    new_z_ref: Any,
    new_r_ref: Any,
    new_parts_ref: Any,
    likelihood_ref: Any,
    *,
    kick: float,
    tiles: int,
) -> None:
    z, r, step_size = z_ref[...], r_ref[...], step_size_ref[0]
    gradient = -z
    for tile in range(tiles):
        gradient += parts_ref[tile]
    r = r + kick * step_size * gradient
    z = z + step_size * r
    chunks = _chunks(w1_ref.shape[1])

    def hidden1(k: Any) -> jax.Array:
        return jnp.maximum(_dot(z, w1_ref[:, k]) + b1_ref[k][None], 0.0)

    # In chunks of units, so that registers hold them; only the second layer's stay.
    x = x_ref[...]
    logits = jnp.broadcast_to(b3_ref[...][None], x.shape)
    second = []
    for j in chunks:
        a2 = jnp.broadcast_to(b2_ref[j][None], (_CHAINS, j.size))
        for k in chunks:
            a2 += _dot(hidden1(k), w2_ref[k, j])
        logits += _dot(jnp.maximum(a2, 0.0), w3_ref[j, :])
        second.append(a2)
    # exp of what is not positive: it cannot overflow.
    small = jnp.exp(-jnp.abs(logits))
    slope = x - jnp.where(logits > 0, 1.0, small) / (1 + small)
    g2 = [
        jnp.where(a2 > 0, _dot(slope, w3_ref[j, :].T), 0.0)
        for j, a2 in zip(chunks, second, strict=True)
    ]
    part = jnp.zeros_like(z)
    for k in chunks:
        g1 = jnp.zeros((_CHAINS, k.size), jnp.float32)
        for j, g in zip(chunks, g2, strict=True):
            g1 += _dot(g, w2_ref[k, j].T)
        part += _dot(jnp.where(hidden1(k) > 0, g1, 0.0), w1_ref[:, k].T)
    new_parts_ref[...] = part
    likelihood = x * logits - jnp.maximum(logits, 0.0) - jnp.log(1 + small)
    likelihood_ref[...] = likelihood.sum(1)

    # All groups of pixels have moved alike; one of them says where to.
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        new_z_ref[...] = z
        new_r_ref[...] = r


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply in the weights' type; the result is float32."""
    return jnp.dot(x.astype(w.dtype), w, preferred_element_type=jnp.float32)


def _fill(x: jax.Array, shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
    widths = [(0, wanted - size) for wanted, size in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, widths, constant_values=value)


def _chunks(size: int) -> list[Any]:
    """Cut hidden units into chunks of 64 and, for the rest, a smaller power of two."""
    firsts = range(0, size, _CHUNK)
    return [pl.ds(first, min(_CHUNK, size - first)) for first in firsts]


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of
