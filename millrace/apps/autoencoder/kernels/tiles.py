"""Kernels that go over the items tile by tile, or over a few users at a time.

Each gets a plain function of arrays, and reads and writes what it takes and returns.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from millrace.apps.autoencoder.kernels.hidden import wide, wide_type
from millrace.apps.autoencoder.model import Known

TILE = 64
"""Items at a time."""
_USERS = 16
"""Users at a time."""
_COUNTED, _GATHERED = 1024, 32
"""Known ratings at a time: whose users are looked at; whose weights are added up."""
_WARPS, _USER_WARPS = 4, 8
"""Of a program over items, and over users: in 16 warps an update of sixteen models took
455 us instead of 451 (H200)."""


class Tiling(NamedTuple):
    """How a kernel goes over the items."""

    parts: int
    """Programs that share a model's items."""
    num_stages: int = 1
    """Of the compiler's own reading ahead, of what enters a product; 1 for none."""
    reads_ahead: bool = False
    """Whether the next tile is read before one is computed with."""


def dense_tiles(known: Known, num_users: int, num_items: int) -> jax.Array:
    """Return ratings as (tiles, users, items of a tile), 0 where there is none."""
    shape = (pl.cdiv(num_items, TILE), num_users, TILE)
    place = (known.item // TILE, known.row, known.item % TILE)
    return jnp.zeros(shape, known.value.dtype).at[place].set(known.value, mode="drop")


def sums_of_known(
    weights: jax.Array, known: Known, num_users: int, *, interpret: bool
) -> jax.Array:
    """Return the product of dense ratings and the first layer's weights, in float32.

    Args:
        weights: (items, width)
        known: Of one user after the other, filling at the end.
        num_users: In the batch.
        interpret: Whether to do without a GPU.
    """
    num_known, width = len(known.row), weights.shape[1]

    def kernel(rows: Any, items: Any, values: Any, weights: Any, sums: Any) -> None:
        user = pl.program_id(0)

        def count(number: jax.Array, counts: Any) -> Any:
            place = number * _COUNTED + lax.iota(jnp.int32, _COUNTED)
            row = triton.load(rows.at[place], mask=place < num_known, other=num_users)
            before, until = counts
            return before + (row < user).sum(), until + (row <= user).sum()

        none = jnp.int32(0)
        blocks = pl.cdiv(num_known, _COUNTED)
        first, end = lax.fori_loop(0, blocks, count, (none, none))

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            place = first + number * _GATHERED + lax.iota(jnp.int32, _GATHERED)
            exists = place < end
            item = triton.load(items.at[place], mask=exists, other=0)
            value = triton.load(values.at[place], mask=exists, other=0)
            terms = wide(weights[item, :]) * wide(value)[:, None]
            return total + jnp.where(exists[:, None], terms, 0).sum(0)

        nothing = jnp.zeros(width, wide_type(values))
        blocks = pl.cdiv(end - first, _GATHERED)
        sums[0] = lax.fori_loop(0, blocks, add, nothing)

    arrays = (*known, weights)
    options = triton.CompilerParams(num_warps=_WARPS, num_stages=1)
    return pl.pallas_call(
        kernel,
        grid=(num_users,),
        in_specs=[pl.BlockSpec(x.shape, lambda _, n=x.ndim: (0,) * n) for x in arrays],
        out_specs=pl.BlockSpec((1, width), lambda user: (user, 0)),
        out_shape=jax.ShapeDtypeStruct((num_users, width), wide_type(weights)),
        interpret=interpret,
        compiler_params=None if interpret else options,
    )(*arrays)


def over_users(
    function: Callable[..., Iterator[jax.Array]],
    by_user: Any,
    whole: Any,
    *,
    interpret: bool,
) -> list[jax.Array]:
    """Run a function of a few users in one kernel.

    Args:
        function: From blocks of `by_user`, one by one, and references to `whole` to blocks
            of results. Each is written when it comes, before `whole` is read again: all of
            it at once would not fit.
        by_user: Arrays (users, width).
        whole: Arrays that every block needs.
        interpret: Whether to do without a GPU.
    """
    arrays, structure = jax.tree.flatten((by_user, whole))
    num_blocked = len(jax.tree.leaves(by_user))
    num_users = arrays[0].shape[0]

    def results(given: Sequence[Any]) -> Iterator[jax.Array]:
        blocks, rest = jax.tree.unflatten(structure, given)
        return function(*blocks, rest)

    def kernel(*refs: Any) -> None:
        blocks = [ref[...] for ref in refs[:num_blocked]]
        given = [*blocks, *refs[num_blocked : len(arrays)]]
        for ref, value in zip(refs[len(arrays) :], results(given), strict=True):
            ref[...] = value

    def block(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((_USERS, shape[1]), lambda number: (number, 0))

    def all_of(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda _: (0,) * len(shape))

    shapes = jax.eval_shape(lambda given: list(results(given)), arrays)
    options = triton.CompilerParams(num_warps=_USER_WARPS, num_stages=1)
    return pl.pallas_call(
        kernel,
        grid=(num_users // _USERS,),
        in_specs=[block(x.shape) for x in arrays[:num_blocked]]
        + [all_of(x.shape) for x in arrays[num_blocked:]],
        out_specs=[block(x.shape) for x in shapes],
        out_shape=shapes,
        interpret=interpret,
        compiler_params=None if interpret else options,
    )(*arrays)


def over_items(
    function: Callable[[Any, Any, Any], Any],
    tiling: Tiling,
    weights: Sequence[jax.Array],
    ratings: Sequence[jax.Array],
    whole: Sequence[jax.Array],
    *,
    num_items: int,
    interpret: bool,
) -> tuple[list[jax.Array], ...]:
    """Run a function of tiles of items in one kernel.

    Args:
        function: From tiles of `weights` and of `ratings`, and `whole`, to tiles of
            results of these two kinds, and to what is added up over the items; of vectors
            all values are.
        tiling: How.
        weights: Arrays whose dim 0 is the items.
        ratings: Arrays (tiles, users, items of a tile).
        whole: Numbers and small arrays that every tile needs.
        num_items: The last tile may have more.
        interpret: Whether to do without a GPU.
    """
    most_parts, num_stages, reads_ahead = tiling
    num_tiles = pl.cdiv(num_items, TILE)
    parts = min(most_parts, num_tiles)
    arrays = [*weights, *ratings, *(x if x.ndim else x[None] for x in whole)]
    given = [jax.ShapeDtypeStruct((TILE, *x.shape[1:]), x.dtype) for x in weights]
    given += [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in ratings]
    made = jax.eval_shape(function, given[: len(weights)], given[len(weights) :], whole)
    lengths = [len(each) for each in made]
    outputs = [(num_items, *x.shape[1:]) for x in made[0]]
    outputs += [(num_tiles, *x.shape) for x in made[1]]
    outputs += [(parts, *x.shape) for x in made[2]]

    def kernel(*refs: Any) -> None:
        own, others, results = _split(refs, [len(given), len(whole)])
        results, totals = _split(results, [lengths[0] + lengths[1]])
        values = [
            ref[...] if x.ndim else ref[0] for ref, x in zip(others, whole, strict=True)
        ]

        def place(ref: Any, is_weights: bool, number: Any) -> tuple[Any, Any]:
            """Return a tile of it, and which of it there are."""
            if not is_weights:
                return ref.at[number], None
            start = number * TILE
            shape = (TILE, *ref.shape[1:])
            item = start + lax.broadcasted_iota(jnp.int32, shape, 0)
            return ref.at[pl.ds(start, TILE)], item < num_items

        def load(number: Any) -> list[jax.Array]:
            tiles = []
            for n, ref in enumerate(own):
                tile, exists = place(ref, n < len(weights), number)
                other = None if exists is None else 0
                tiles.append(triton.load(tile, mask=exists, other=other))
            return tiles

        def step(number: jax.Array, model_state: Any) -> Any:
            sums, tiles = model_state
            tiles = tiles or load(number)
            after = jnp.minimum(number + 1, num_tiles - 1)
            following = load(after) if reads_ahead else []
            *made, added = function(tiles[: len(weights)], tiles[len(weights) :], values)
            for n, (ref, value) in enumerate(
                zip(results, itertools.chain(*made), strict=True)
            ):
                tile, exists = place(ref, n < lengths[0], number)
                triton.store(tile, value, mask=exists)
            return [x + y for x, y in zip(sums, added, strict=True)], following

        part = pl.program_id(0)
        first, end = part * num_tiles // parts, (part + 1) * num_tiles // parts
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
    kinds = [x.dtype for x in itertools.chain(*made)]
    found = pl.pallas_call(
        kernel,
        grid=(parts,),
        in_specs=[block(x.shape, by_part=False) for x in arrays],
        out_specs=[
            block(shape, by_part=n >= lengths[0] + lengths[1])
            for n, shape in enumerate(outputs)
        ],
        out_shape=list(map(jax.ShapeDtypeStruct, outputs, kinds)),
        interpret=interpret,
        compiler_params=None if interpret else options,
    )(*arrays)
    *results, sums = _split(found, lengths[:2])
    return *results, [x.sum(0) if x.ndim > 2 else x.sum() for x in sums]


def _split(values: Sequence[Any], lengths: Sequence[int]) -> tuple[list[Any], ...]:
    """Cut a sequence into pieces of these lengths, and the rest."""
    ends = list(itertools.accumulate(lengths, initial=0))
    pieces = [list(values[a:b]) for a, b in itertools.pairwise(ends)]
    return (*pieces, list(values[ends[-1] :]))
