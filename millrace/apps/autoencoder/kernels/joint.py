"""The joint loss in kernels of our own, for many small models at once on a GPU.

One small model is a chain of short kernels, whoever writes them. Sixteen at once are
bound by memory: XLA writes every reconstruction, and what is derived from it, and reads
it again in the next kernel. Here a kernel goes over the items once, tile by tile, and
does all that can be done while a tile is on the chip; four times in an update. Between
them, all inner layers of a few users are one kernel. Models are one more dim of the grid,
which ``jax.vmap`` adds.

With W the tied weights by item, c the last bias, g what enters the last layer and X the
ratings by user, the passes are

    y = selu(g1 W' + c),  a = y W           the reconstruction, and into the first layer
    z = selu(g2 W' + c),  d = z - y         the same of the reconstruction

and the loss is the mean of (y - X)^2 over what is known plus the mean of d^2 over all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from millrace.apps.autoencoder.kernels import hidden, tiles
from millrace.apps.autoencoder.kernels.hidden import LARGEST, dot, wide, wide_type
from millrace.apps.autoencoder.kernels.tiles import Tiling
from millrace.apps.autoencoder.loss import known_ratings
from millrace.apps.autoencoder.model import Model, kept_codes, selu_slope, selu_value
from millrace.program.step import LossFn


def are_for(
    model: Model, num_users: int, num_models: int, compute: str, device: Any
) -> bool:
    """Whether the kernels can do it, and have been seen to do it faster.

    On an H200 sixteen models of size 128 with 64 users took 0.6 of XLA's time, and one 1.3
    of it, before the sixteen took a tenth less still. What a program keeps on the chip
    fits that GPU's, and not every other's.

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

    def over_items(function: Callable[..., Any], *arrays: Sequence[jax.Array]) -> Any:
        tiling = _TILINGS[function]
        return tiles.over_items(
            function, tiling, *arrays, num_items=model.num_items, interpret=interpret
        )

    def over_users(function: Callable[..., Any], *arrays: Any) -> list[jax.Array]:
        return tiles.over_users(function, *arrays, interpret=interpret)

    enlarged = 1 / (1 - model.dropout_rate)

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        num_users = batch["user"].shape[0]
        known = known_ratings(batch)
        ratings = tiles.dense_tiles(known, num_users, model.num_items)
        count = jnp.maximum((known.row < num_users).sum(), 1).astype(wide_type(ratings))
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
            weights = hidden.weights_of(params)
            sums = tiles.sums_of_known(kernel, known, num_users, interpret=interpret)

            def forth(sums: jax.Array, scale: jax.Array | None) -> hidden.Pass:
                return hidden.Pass.of(over_users(hidden.forward, (sums, scale), weights))

            def back(gradient: jax.Array, passed: hidden.Pass) -> list[jax.Array]:
                given = (gradient, passed.slopes)
                return over_users(hidden.backward, given, weights)[::-1]

            first = forth(sums, scales[0])
            both = (kernel, bias)
            _, (y,), (a,) = over_items(_first, both, (), (first.values[-1],))
            second = forth(a, scales[1])
            whole = (second.values[-1], share)
            _, (d,), (dg2, refed) = over_items(_second, both, (y,), whole)
            second_errors = back(dg2, second)
            whole = (second_errors[0], share)
            _, (p,), (dg1, squares) = over_items(_back, (kernel,), (y, d, ratings), whole)
            errors = back(dg1, first), second_errors
            error = squares / count
            loss = error + refed / all_places
            return (loss, error), (y, d, p, (first, second), errors)

        def backward(saved: Any, given: tuple[jax.Array, jax.Array]) -> tuple[Any]:
            y, d, p, passes, errors = saved
            factor = given[0] * 2 / count
            (dsums, *_), (da, *_) = errors
            g1, g2 = (each.values[-1] for each in passes)
            whole = (da, g1, g2, dsums, share, factor)
            (d_kernel, d_bias), *_ = over_items(_weights, (), (y, d, p, ratings), whole)
            grads = hidden.gradients(passes, errors, factor)
            grads["encoder"]["fc_1"]["kernel"] = d_kernel
            grads["decoder"]["fc_3"] = {"bias": d_bias}
            return (grads,)

        joint.defvjp(forward, backward)
        loss, error = joint(params)
        return loss, (model_state, {"rmse": jnp.sqrt(lax.stop_gradient(error))})

    return loss_fn


def _first(weights: Any, ratings: Any, whole: Any) -> Any:
    """Reconstruct, and add up what enters the first layer again."""
    del ratings
    (w, c), (g,) = weights, whole
    y = _activated(dot(g, w, 1, 1) + wide(c)[None, :], w.dtype).astype(w.dtype)
    return [], [y], [dot(y, w, 1, 0)]


def _second(weights: Any, ratings: Any, whole: Any) -> Any:
    """Reconstruct the reconstruction; add up its gradient to what entered, and errors."""
    (w, c), (y,), (g, share) = weights, ratings, whole
    z = _activated(dot(g, w, 1, 1) + wide(c)[None, :], w.dtype)
    exact = z - wide(y)
    d = exact.astype(w.dtype)
    e = _refed_gradient(d, y).astype(w.dtype)
    return [], [d], [dot(e, w, 1, 0) * share, jnp.square(exact).sum(1)]


def _back(weights: Any, ratings: Any, whole: Any) -> Any:
    """Find the gradient of what the first reconstruction's SELU got; add up its errors."""
    (w,), (y, d, x), (da, share) = weights, ratings, whole
    y = wide(y)
    known = jnp.where(x != 0, y - wide(x), 0)
    p = (known - wide(d) * share + dot(da, w, 1, 1)) * _slope(y, w.dtype)
    p = p.astype(w.dtype)
    return [], [p], [dot(p, w, 1, 0), jnp.square(known).sum(1)]


def _weights(weights: Any, ratings: Any, whole: Any) -> Any:
    """Add up the gradient of the tied weights' four uses, and of the last bias's two."""
    del weights
    (y, d, p, x), (da, g1, g2, dsums, share, factor) = ratings, whole
    e = _refed_gradient(d, y) * share
    w = dot(y, da, 0, 0) + dot(p, g1, 0, 0) + dot(x, dsums, 0, 0)
    w += dot(e.astype(y.dtype), g2, 0, 0)
    bias = (wide(p) + e).sum(0)
    return [(w * factor).astype(y.dtype), (bias * factor).astype(y.dtype)], [], []


def _refed_gradient(d: jax.Array, y: jax.Array) -> jax.Array:
    return wide(d) * _slope(wide(d) + wide(y), y.dtype)


_TILINGS: dict[Callable[..., Any], Tiling] = {
    _first: Tiling(16, reads_ahead=True),
    _second: Tiling(16, num_stages=3),
    _back: Tiling(16, reads_ahead=True),
    _weights: Tiling(8, num_stages=3),
}
"""The fastest of some thirty for sixteen models in bfloat16 on an H200. Tiles of 32 or 128
items, or 8 warps, took longer but for `_back`, up to twice as long."""


def _activated(x: jax.Array, kind: Any) -> jax.Array:
    y = selu_value(x)
    return jnp.minimum(y, LARGEST) if kind == jnp.float16 else y


def _slope(y: jax.Array, kind: Any) -> jax.Array:
    slope = selu_slope(y)
    # What is a sum of two numbers of that type may miss its largest by a rounding or two.
    return jnp.where(y < LARGEST - 64, slope, 0) if kind == jnp.float16 else slope
