"""Pallas kernels that go over the items tile by tile, or over a few users at a time.

Each takes a plain function of arrays, loads its arguments and stores its results.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from millrace.apps.autoencoder.model import KnownRatings, wide_dtype, widen

TILE = 64
"""Items per tile."""
_USERS = 16
"""Users per program of a kernel over users, the fewest rows that Triton multiplies."""
_COUNTED, _GATHERED = 1024, 32
"""Known ratings per block when counting them by user, and when gathering their weights."""
_WARPS, _USER_WARPS = 4, 8
"""Warps per program over items, and over users. With 16 over users, an update of sixteen
models took 455 us instead of 451 (H200)."""


class Tiling(NamedTuple):
    """How a kernel goes over the items."""

    num_parts: int
    """Programs that share the items of a model; their sums are added outside the kernel."""
    num_stages: int = 1
    """Depth of Triton's own prefetching of operands of products; 1 for none."""
    reads_ahead: bool = False
    """Whether to load the next tile before computing with the current one."""


def to_dense_tiles(
    known: KnownRatings, num_users: int, num_items: int
) -> jax.Array:  # (tiles, users, tile)
    """Return dense ratings by tile, 0 where there is no rating.

    A tile is contiguous in memory, so a program loads it in one piece.
    """
    shape = (pl.cdiv(num_items, TILE), num_users, TILE)
    place = (known.item // TILE, known.row, known.item % TILE)
    return jnp.zeros(shape, known.value.dtype).at[place].set(known.value, mode="drop")


def multiply_sparse(
    weights: jax.Array,  # (items, width)
    known: KnownRatings,
    num_users: int,
    *,
    interpret: bool,
) -> jax.Array:  # (users, width)
    """Return the product of the sparse ratings and the first kernel, in float32.

    A program computes one user. The ratings are sorted by user, so the program counts the
    ratings before and up to its user to find its own, and keeps the sum in registers.
    """
    num_known, width = len(known.row), weights.shape[1]

    def kernel(rows: Any, items: Any, values: Any, weights: Any, sums: Any) -> None:
        user = pl.program_id(0)

        def count(number: jax.Array, counts: Any) -> Any:
            place = number * _COUNTED + lax.iota(jnp.int32, _COUNTED)
            row = triton.load(rows.at[place], mask=place < num_known, other=num_users)
            before, until = counts
            return before + (row < user).sum(), until + (row <= user).sum()

        zero = jnp.int32(0)
        blocks = pl.cdiv(num_known, _COUNTED)
        first, end = lax.fori_loop(0, blocks, count, (zero, zero))

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            place = first + number * _GATHERED + lax.iota(jnp.int32, _GATHERED)
            exists = place < end
            item = triton.load(items.at[place], mask=exists, other=0)
            value = triton.load(values.at[place], mask=exists, other=0)
            terms = widen(weights[item, :]) * widen(value)[:, None]
            return total + jnp.where(exists[:, None], terms, 0).sum(0)

        zeros = jnp.zeros(width, wide_dtype(values))
        blocks = pl.cdiv(end - first, _GATHERED)
        sums[0] = lax.fori_loop(0, blocks, add, zeros)

    arrays = (*known, weights)
    options = triton.CompilerParams(num_warps=_WARPS, num_stages=1)
    return pl.pallas_call(
        kernel,
        grid=(num_users,),
        in_specs=[pl.BlockSpec(x.shape, lambda _, n=x.ndim: (0,) * n) for x in arrays],
        out_specs=pl.BlockSpec((1, width), lambda user: (user, 0)),
        out_shape=jax.ShapeDtypeStruct((num_users, width), wide_dtype(weights)),
        interpret=interpret,
        compiler_params=None if interpret else options,
    )(*arrays)


def call_over_users(
    function: Callable[..., Iterator[jax.Array]],
    by_user: Any,
    shared: Any,
    *,
    interpret: bool,
) -> list[jax.Array]:
    """Run a function on blocks of users in one kernel.

    Args:
        function: Takes the blocks of `by_user` as separate arguments, then references to
            `shared`; yields blocks of results. The kernel stores each result before
            `function` loads more of `shared`, because all of it does not fit on the chip.
        by_user: Arrays (users, width).
        shared: Arrays that every block needs, such as weights.
        interpret: Whether to interpret the kernel without a GPU.
    """
    arrays, structure = jax.tree.flatten((by_user, shared))
    num_blocked = len(jax.tree.leaves(by_user))
    num_users = arrays[0].shape[0]

    def call(arguments: Sequence[Any]) -> Iterator[jax.Array]:
        blocks, rest = jax.tree.unflatten(structure, arguments)
        return function(*blocks, rest)

    def kernel(*refs: Any) -> None:
        blocks = [ref[...] for ref in refs[:num_blocked]]
        arguments = [*blocks, *refs[num_blocked : len(arrays)]]
        for ref, value in zip(refs[len(arrays) :], call(arguments), strict=True):
            ref[...] = value

    def block(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((_USERS, shape[1]), lambda number: (number, 0))

    def all_of(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda _: (0,) * len(shape))

    results = jax.eval_shape(lambda arguments: list(call(arguments)), arrays)
    options = triton.CompilerParams(num_warps=_USER_WARPS, num_stages=1)
    return pl.pallas_call(
        kernel,
        grid=(num_users // _USERS,),
        in_specs=[block(x.shape) for x in arrays[:num_blocked]]
        + [all_of(x.shape) for x in arrays[num_blocked:]],
        out_specs=[block(x.shape) for x in results],
        out_shape=results,
        interpret=interpret,
        compiler_params=None if interpret else options,
    )(*arrays)


def call_over_items(
    function: Callable[[Any, Any, Any], Any],
    tiling: Tiling,
    weights: Sequence[jax.Array],  # (items, ...) each
    ratings: Sequence[jax.Array],  # (tiles, users, tile) each
    shared: Sequence[jax.Array],
    *,
    num_items: int,
    interpret: bool,
) -> tuple[list[jax.Array], ...]:
    """Run a function on tiles of items in one kernel.

    A model has `tiling.num_parts` programs. Each goes over its share of the tiles in
    order, keeps its sums in registers, and writes them once at the end.

    Args:
        function: ``(weights, ratings, shared) -> (weights, ratings, sums)``, three lists of
            tiles in and out; sums are added up over all tiles, and vectors to one number.
        tiling: How to go over the items.
        weights: Arrays with items along dim 0.
        ratings: Arrays by tile.
        shared: Scalars and small arrays that every tile needs.
        num_items: Number of items; the last tile may extend past them.
        interpret: Whether to interpret the kernel without a GPU.
    """
    most_parts, num_stages, reads_ahead = tiling
    num_tiles = pl.cdiv(num_items, TILE)
    num_parts = min(most_parts, num_tiles)
    arrays = [*weights, *ratings, *(x if x.ndim else x[None] for x in shared)]
    inputs = [jax.ShapeDtypeStruct((TILE, *x.shape[1:]), x.dtype) for x in weights]
    inputs += [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in ratings]
    made = jax.eval_shape(function, inputs[: len(weights)], inputs[len(weights) :], shared)
    lengths = [len(each) for each in made]
    outputs = [(num_items, *x.shape[1:]) for x in made[0]]
    outputs += [(num_tiles, *x.shape) for x in made[1]]
    outputs += [(num_parts, *x.shape) for x in made[2]]

    def kernel(*refs: Any) -> None:
        tiled, others, results = _split(refs, [len(inputs), len(shared)])
        results, totals = _split(results, [lengths[0] + lengths[1]])
        values = [
            ref[...] if x.ndim else ref[0] for ref, x in zip(others, shared, strict=True)
        ]

        def locate(ref: Any, is_weights: bool, number: Any) -> tuple[Any, Any]:
            """Return a reference to a tile, and the mask of its existing items."""
            if not is_weights:
                return ref.at[number], None
            start = number * TILE
            shape = (TILE, *ref.shape[1:])
            item = start + lax.broadcasted_iota(jnp.int32, shape, 0)
            return ref.at[pl.ds(start, TILE)], item < num_items

        def load(number: Any) -> list[jax.Array]:
            loaded = []
            for n, ref in enumerate(tiled):
                tile, exists = locate(ref, n < len(weights), number)
                other = None if exists is None else 0
                loaded.append(triton.load(tile, mask=exists, other=other))
            return loaded

        def step(number: jax.Array, carry: Any) -> Any:
            sums, loaded = carry
            loaded = loaded or load(number)
            # Issued before the products, so that loading overlaps with computing.
            after = jnp.minimum(number + 1, num_tiles - 1)
            following = load(after) if reads_ahead else []
            *made, added = function(loaded[: len(weights)], loaded[len(weights) :], values)
            for n, (ref, value) in enumerate(
                zip(results, itertools.chain(*made), strict=True)
            ):
                tile, exists = locate(ref, n < lengths[0], number)
                triton.store(tile, value, mask=exists)
            return [x + y for x, y in zip(sums, added, strict=True)], following

        part = pl.program_id(0)
        first, end = part * num_tiles // num_parts, (part + 1) * num_tiles // num_parts
        sums = [jnp.zeros(x.shape, x.dtype) for x in made[2]]
        sums, _ = lax.fori_loop(
            first, end, step, (sums, load(first) if reads_ahead else [])
        )
        for ref, value in zip(totals, sums, strict=True):
            ref[0] = value

    def block(shape: tuple[int, ...], by_part: bool) -> pl.BlockSpec:
        rest = (0,) * (len(shape) - 1)
        if by_part:
            return pl.BlockSpec((1, *shape[1:]), lambda part: (part, *rest))
        return pl.BlockSpec(shape, lambda part: (0, *rest))

    options = triton.CompilerParams(num_warps=_WARPS, num_stages=num_stages)
    dtypes = [x.dtype for x in itertools.chain(*made)]
    found = pl.pallas_call(
        kernel,
        grid=(num_parts,),
        in_specs=[block(x.shape, by_part=False) for x in arrays],
        out_specs=[
            block(shape, by_part=n >= lengths[0] + lengths[1])
            for n, shape in enumerate(outputs)
        ],
        out_shape=list(map(jax.ShapeDtypeStruct, outputs, dtypes)),
        interpret=interpret,
        compiler_params=None if interpret else options,
    )(*arrays)
    *results, sums = _split(found, lengths[:2])
    # The programs of a model write their sums separately, without atomics.
    return *results, [x.sum(0) if x.ndim > 2 else x.sum() for x in sums]


def _split(values: Sequence[Any], lengths: Sequence[int]) -> tuple[list[Any], ...]:
    """Split a sequence into pieces of these lengths, and the rest."""
    ends = list(itertools.accumulate(lengths, initial=0))
    pieces = [list(values[a:b]) for a, b in itertools.pairwise(ends)]
    return (*pieces, list(values[ends[-1] :]))
