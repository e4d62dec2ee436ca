"""The joint loss in kernels of our own, for many small models at once on a GPU.

One small model is a chain of short kernels, whoever writes them. Sixteen at once are
bound by memory: XLA writes every reconstruction, and what is derived from it, and reads
it again in the next kernel. Here a kernel goes over the items once, tile by tile, and
does all that can be done while a tile is on the chip; four times in an update. Between
them, all inner layers of a few users are one kernel. Models are one more dim of the grid,
which ``jax.vmap`` adds.

With W the tied weights, c the last bias, g what enters the last layer and X the ratings,
all by item, the passes are

    y = selu(W g1' + c),  a = y' W          the reconstruction, and into the first layer
    z = selu(W g2' + c),  d = z - y         the same of the reconstruction

and the loss is the mean of (y - X)^2 over what is known plus the mean of d^2 over all.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from millrace.apps.autoencoder import inner
from millrace.apps.autoencoder.inner import LARGEST, dot, wide, wide_type
from millrace.apps.autoencoder.loss import known_ratings
from millrace.apps.autoencoder.model import (
    Model,
    kept_codes,
    selu_slope,
    selu_value,
    sums_of_known,
)
from millrace.program.step import LossFn


class _Tiling(NamedTuple):
    """How a kernel goes over the items, or the users."""

    tile: int = 64
    """Of them at a time."""
    parts: int = 16
    """Programs that share a model's items."""
    num_warps: int = 4
    num_stages: int = 2


def are_for(
    model: Model, num_users: int, num_models: int, compute: str, device: Any
) -> bool:
    """Whether the kernels can do it, and have been seen to do it faster.

    On an H200 sixteen models of size 128 with 64 users took 0.6 of XLA's time, one took
    1.3 of it. What a program keeps on the chip fits that GPU's, and not every other's.

    Args:
        model: The choices.
        num_users: In a batch.
        num_models: That are trained together.
        compute: The type of computation.
        device: Where.
    """
    is_hopper = getattr(device, "compute_capability", None) == "9.0"
    fits = num_users == 64 and model.size == 128 and compute != "float32"
    plain = model.selu and model.tied and not model.input_dropout_rate
    plain = plain and not model.linear_output
    return is_hopper and fits and plain and num_models >= 16


def joint_loss(model: Model, *, interpret: bool = False) -> LossFn:
    """Return ``loss.loss_of(model, "joint")`` for one replica.

    Args:
        model: Tied, with SELU everywhere, and all of its ratings seen.
        interpret: Whether to do without a GPU, slowly: for tests.
    """
    over_items = functools.partial(_over_items, interpret=interpret)
    over_users = functools.partial(_over_users, interpret=interpret)
    enlarged = 1 / (1 - model.dropout_rate)

    def loss_fn(params: Any, carried: Any, batch: Any, key: jax.Array) -> Any:
        num_users = batch["user"].shape[0]
        known = known_ratings(batch)
        nothing = jnp.zeros((model.num_items, num_users), known.value.dtype)
        ratings = nothing.at[known.item, known.row].set(known.value, mode="drop")
        count = jnp.maximum((known.row < num_users).sum(), 1).astype(wide_type(nothing))
        all_places = num_users * model.num_items
        scales = [
            None if kept is None else jnp.where(kept, enlarged, 0.0)
            for kept in kept_codes(model, key, 2, num_users)
        ]
        # How much less an error of re-feeding weighs than one of a known rating, which is
        # the unit that gradients are computed in.
        share = count / all_places

        @jax.custom_vjp
        def joint(params: Any) -> tuple[jax.Array, jax.Array]:
            return forward(params)[0]

        def forward(params: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
            kernel = params["encoder"]["fc_1"]["kernel"]
            bias = params["decoder"]["fc_3"]["bias"]
            weights = inner.weights_of(params)
            sums = sums_of_known(kernel, known, num_users)

            def forth(sums: jax.Array, scale: jax.Array | None) -> inner.Pass:
                return inner.Pass.of(over_users(inner.forward, (sums, scale), weights))

            def back(gradient: jax.Array, passed: inner.Pass) -> list[jax.Array]:
                given = (gradient, passed.slopes)
                return over_users(inner.backward, given, weights)[::-1]

            first = forth(sums, scales[0])
            (y,), (a,) = over_items(_first, (kernel, bias), (first.values[-1],))
            second = forth(a, scales[1])
            whole = (second.values[-1],)
            (d,), (dg2, refed) = over_items(_second, (kernel, bias, y), whole)
            second_errors = back(dg2 * share, second)
            whole = (second_errors[0], share)
            (p,), (dg1, squares) = over_items(_back, (kernel, y, d, ratings), whole)
            errors = back(dg1, first), second_errors
            error = squares / count
            return (error + refed / all_places, error), (y, d, p, (first, second), errors)

        def backward(saved: Any, given: tuple[jax.Array, jax.Array]) -> tuple[Any]:
            y, d, p, passes, errors = saved
            factor = given[0] * 2 / count
            (dsums, *_), (da, *_) = errors
            g1, g2 = (each.values[-1] for each in passes)
            whole = (da, g1, g2, dsums, share, factor)
            (d_kernel, d_bias), _ = over_items(_weights, (y, d, p, ratings), whole)
            grads = inner.gradients(passes, errors, factor)
            grads["encoder"]["fc_1"]["kernel"] = d_kernel
            grads["decoder"]["fc_3"] = {"bias": d_bias}
            return (grads,)

        joint.defvjp(forward, backward)
        loss, error = joint(params)
        return loss, (carried, {"rmse": jnp.sqrt(lax.stop_gradient(error))})

    return loss_fn


def _first(items: Any, whole: Any) -> Any:
    """Reconstruct, and add up what enters the first layer again."""
    (w, c), (g,) = items, whole
    y = _activated(dot(w, g, 1, 1) + wide(c)[:, None], w.dtype).astype(w.dtype)
    return [y], [dot(y, w, 0, 0)]


def _second(items: Any, whole: Any) -> Any:
    """Reconstruct the reconstruction; add up its gradient to what entered, and errors."""
    (w, c, y), (g,) = items, whole
    z = _activated(dot(w, g, 1, 1) + wide(c)[:, None], w.dtype)
    exact = z - wide(y)
    d = exact.astype(w.dtype)
    e = _refed_gradient(d, y).astype(w.dtype)
    return [d], [dot(e, w, 0, 0), jnp.square(exact).sum(1)]


def _back(items: Any, whole: Any) -> Any:
    """Find the gradient of what the first reconstruction's SELU got; add up its errors."""
    (w, y, d, x), (da, share) = items, whole
    y = wide(y)
    known = jnp.where(x != 0, y - wide(x), 0)
    p = (known - wide(d) * share + dot(w, da, 1, 1)) * _slope(y, w.dtype)
    p = p.astype(w.dtype)
    return [p], [dot(p, w, 0, 0), jnp.square(known).sum(1)]


def _weights(items: Any, whole: Any) -> Any:
    """Add up the gradient of the tied weights' four uses, and of the last bias's two."""
    (y, d, p, x), (da, g1, g2, dsums, share, factor) = items, whole
    e = _refed_gradient(d, y) * share
    w = dot(y, da, 1, 0) + dot(p, g1, 1, 0) + dot(x, dsums, 1, 0)
    w += dot(e.astype(y.dtype), g2, 1, 0)
    bias = (wide(p) + e).sum(1)
    return [(w * factor).astype(y.dtype), (bias * factor).astype(y.dtype)], []


def _refed_gradient(d: jax.Array, y: jax.Array) -> jax.Array:
    return wide(d) * _slope(wide(d) + wide(y), y.dtype)


_TILINGS: dict[Callable[..., Any], _Tiling] = {
    _first: _Tiling(parts=24, num_stages=1),
    _second: _Tiling(num_stages=1),
    _back: _Tiling(),
    _weights: _Tiling(),
}
"""The fastest of some twenty for sixteen models in bfloat16 on an H200. Tiles of 32 or 128
items, or 8 warps, took longer, up to three times as long."""
_USERS = _Tiling(tile=16, num_warps=16, num_stages=1)
"""How the inner layers' kernels go over the users. In 8 warps an update of sixteen models
took 495 us, with 64 users at a time 688; in 4 warps 566 (H200)."""


def _activated(x: jax.Array, kind: Any) -> jax.Array:
    y = selu_value(x)
    return jnp.minimum(y, LARGEST) if kind == jnp.float16 else y


def _slope(y: jax.Array, kind: Any) -> jax.Array:
    slope = selu_slope(y)
    # What is a sum of two numbers of that type may miss its largest by a rounding or two.
    return jnp.where(y < LARGEST - 64, slope, 0) if kind == jnp.float16 else slope


def _over_users(
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
    num_users, width = arrays[0].shape[0], _USERS.tile

    def results(given: Sequence[Any]) -> Iterator[jax.Array]:
        blocks, rest = jax.tree.unflatten(structure, given)
        return function(*blocks, rest)

    def kernel(*refs: Any) -> None:
        blocks = [ref[...] for ref in refs[:num_blocked]]
        given = [*blocks, *refs[num_blocked : len(arrays)]]
        for ref, value in zip(refs[len(arrays) :], results(given), strict=True):
            ref[...] = value

    def block(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((width, shape[1]), lambda number: (number, 0))

    def all_of(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda _: (0,) * len(shape))

    shapes = jax.eval_shape(lambda given: list(results(given)), arrays)
    _, _, num_warps, num_stages = _USERS
    options = triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    return pl.pallas_call(
        kernel,
        grid=(num_users // width,),
        in_specs=[block(x.shape) for x in arrays[:num_blocked]]
        + [all_of(x.shape) for x in arrays[num_blocked:]],
        out_specs=[block(x.shape) for x in shapes],
        out_shape=shapes,
        interpret=interpret,
        compiler_params=None if interpret else options,
    )(*arrays)


def _over_items(
    function: Callable[[Any, Any], tuple[list[jax.Array], list[jax.Array]]],
    by_item: Sequence[jax.Array],
    whole: Sequence[jax.Array],
    *,
    interpret: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Run a function of tiles of items in one kernel.

    Args:
        function: From tiles of `by_item`, and `whole`, to tiles of results by item, and
            to what is added up over all of them; of vectors all values are.
        by_item: Arrays whose dim 0 is the items.
        whole: Numbers and small arrays that every tile needs.
        interpret: Whether to do without a GPU.
    """
    tile_size, most_parts, num_warps, num_stages = _TILINGS[function]
    num_items = by_item[0].shape[0]
    num_tiles = pl.cdiv(num_items, tile_size)
    parts = min(most_parts, num_tiles)
    steps = pl.cdiv(num_tiles, parts)
    tiles = [jax.ShapeDtypeStruct((tile_size, *x.shape[1:]), x.dtype) for x in by_item]
    made, added = jax.eval_shape(function, tiles, whole)
    arrays = [*by_item, *(x if x.ndim else x[None] for x in whole)]
    shapes = [(num_items, *x.shape[1:]) for x in made] + [(parts, *x.shape) for x in added]
    kinds = [x.dtype for x in (*made, *added)]
    ends = [len(by_item), len(by_item) + len(whole)]
    ends.append(ends[-1] + len(made))

    def kernel(*refs: Any) -> None:
        given, others = refs[: ends[0]], refs[ends[0] : ends[1]]
        results, totals = refs[ends[1] : ends[2]], refs[ends[2] :]
        values = [
            ref[...] if x.ndim else ref[0] for ref, x in zip(others, whole, strict=True)
        ]
        part = pl.program_id(0)

        def step(number: jax.Array, sums: Any) -> Any:
            start = (part * steps + number) * tile_size

            def place(ref: Any) -> tuple[Any, jax.Array]:
                """Return a tile of it, and which of it there are."""
                shape = (tile_size, *ref.shape[1:])
                item = start + lax.broadcasted_iota(jnp.int32, shape, 0)
                return ref.at[pl.ds(start, tile_size)], item < num_items

            tiles = []
            for ref in given:
                tile, exists = place(ref)
                tiles.append(triton.load(tile, mask=exists, other=0))
            made, added = function(tiles, values)
            for ref, value in zip(results, made, strict=True):
                tile, exists = place(ref)
                triton.store(tile, value, mask=exists)
            return [x + y for x, y in zip(sums, added, strict=True)]

        sums = [jnp.zeros(x.shape, x.dtype) for x in added]
        for ref, value in zip(totals, lax.fori_loop(0, steps, step, sums), strict=True):
            ref[0] = value

    def block(shape: tuple[int, ...], by_part: bool) -> pl.BlockSpec:
        rest = (0,) * (len(shape) - 1)
        if by_part:
            return pl.BlockSpec((1, *shape[1:]), lambda part: (part, *rest))
        return pl.BlockSpec(shape, lambda part: (0, *rest))

    options = triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    outputs = pl.pallas_call(
        kernel,
        grid=(parts,),
        in_specs=[block(x.shape, by_part=False) for x in arrays],
        out_specs=[block(s, by_part=n >= len(made)) for n, s in enumerate(shapes)],
        out_shape=[jax.ShapeDtypeStruct(*each) for each in zip(shapes, kinds, strict=True)],
        interpret=interpret,
        compiler_params=None if interpret else options,
    )(*arrays)
    sums = [x.sum(0) if x.ndim > 2 else x.sum() for x in outputs[len(made) :]]
    return outputs[: len(made)], sums
