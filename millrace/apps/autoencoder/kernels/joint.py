"""The joint loss in hand-written GPU kernels, for many small models at once.

The update of one small model is a chain of short kernels, however it is written. Sixteen
models at once are bound by memory bandwidth: XLA writes every reconstruction, and every
array derived from it, to memory and reads it again in the next kernel. Here, a kernel goes
over the items once, tile by tile, and does everything that it can while a tile is on the
chip. An update takes four such kernels; between them, all hidden layers of a few users run
in one kernel. ``jax.vmap`` adds the models as one more dim of the grid.

With W the tied kernel (items, width), c the last bias, g the input of the last layer and X
the ratings (users, items), the two passes are

    y = selu(g1 W' + c),  a = y W           the reconstruction, into the first layer again
    z = selu(g2 W' + c),  d = z - y         the reconstruction of the reconstruction

and the loss is the mean of (y - X)^2 over known ratings plus the mean of d^2 over all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from millrace.apps.autoencoder.kernels import hidden, tiles
from millrace.apps.autoencoder.kernels.hidden import LARGEST, HiddenPass, dot
from millrace.apps.autoencoder.kernels.tiles import Tiling
from millrace.apps.autoencoder.model import (
    Model,
    draw_dropout_masks,
    get_known_ratings,
    selu_derivative,
    selu_value,
    wide_dtype,
    widen,
)
from millrace.program.step import LossFn


def is_supported(
    model: Model, num_users: int, num_models: int, compute_dtype: str, device: Any
) -> bool:
    """Whether the kernels support this case and were measured to be faster than XLA.

    On an H200, sixteen models of size 128 with 64 users took 0.6 of the time of XLA (before
    a further tenth was saved), and one model took 1.3 of it. What a program keeps on the
    chip fits an H200, but not every other GPU.
    """
    is_hopper = getattr(device, "compute_capability", None) == "9.0"
    fits = num_users == 64 and model.size == 128 and compute_dtype != "float32"
    plain = model.selu and model.tied and not model.input_dropout_rate
    plain = plain and not model.linear_output
    return is_hopper and fits and plain and num_models >= 16


def build_joint_loss(model: Model, *, interpret: bool = False) -> LossFn:
    """Return ``loss.build_loss(model, "joint")`` for one replica of a supported model.

    With `interpret`, the kernels run without a GPU, slowly, as in tests.
    """

    def call_over_items(function: Callable[..., Any], *arrays: Sequence[jax.Array]) -> Any:
        tiling = _TILINGS[function]
        return tiles.call_over_items(
            function, tiling, *arrays, num_items=model.num_items, interpret=interpret
        )

    def call_over_users(function: Callable[..., Any], *arrays: Any) -> list[jax.Array]:
        return tiles.call_over_users(function, *arrays, interpret=interpret)

    rate = model.dropout_rate
    assert isinstance(rate, float | int), "models with their own rates have no kernel"
    dropout_scale = 1 / (1 - rate)

    def loss_fn(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        num_users = batch["user"].shape[0]
        known = get_known_ratings(batch)
        ratings = tiles.to_dense_tiles(known, num_users, model.num_items)
        count = jnp.maximum((known.row < num_users).sum(), 1).astype(wide_dtype(ratings))
        num_entries = num_users * model.num_items
        scales = [
            None if mask is None else jnp.where(mask, dropout_scale, 0.0)
            for mask in draw_dropout_masks(model, key, 2, num_users)
        ]
        # The unit of gradients is the error of a known rating, which keeps 16-bit
        # intermediates at the size of errors; the factor 2 / count comes at the end. This
        # is the weight of a re-feeding error in that unit.
        share = count / num_entries

        @jax.custom_vjp
        def joint(params: Any) -> tuple[jax.Array, jax.Array]:
            return forward(params)[0]

        def forward(params: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
            kernel = params["encoder"]["fc_1"]["kernel"]
            bias = params["decoder"]["fc_3"]["bias"]
            weights = hidden.get_hidden_weights(params)
            sums = tiles.multiply_sparse(kernel, known, num_users, interpret=interpret)

            def go_forward(sums: jax.Array, scale: jax.Array | None) -> HiddenPass:
                results = call_over_users(hidden.forward, (sums, scale), weights)
                return HiddenPass.from_results(results)

            def go_backward(gradient: jax.Array, forward: HiddenPass) -> list[jax.Array]:
                by_user = (gradient, forward.derivatives)
                return call_over_users(hidden.backward, by_user, weights)[::-1]

            first = go_forward(sums, scales[0])
            output = (kernel, bias)
            _, (y,), (a,) = call_over_items(_first_pass, output, (), (first.values[-1],))
            second = go_forward(a, scales[1])
            shared = (second.values[-1], share)
            _, (d,), (dg2, refed) = call_over_items(_second_pass, output, (y,), shared)
            second_errors = go_backward(dg2, second)
            shared = (second_errors[0], share)
            _, (p,), (dg1, squares) = call_over_items(
                _first_gradient, (kernel,), (y, d, ratings), shared
            )
            errors = go_backward(dg1, first), second_errors
            error = squares / count
            loss = error + refed / num_entries
            return (loss, error), (y, d, p, (first, second), errors)

        def backward(saved: Any, given: tuple[jax.Array, jax.Array]) -> tuple[Any]:
            y, d, p, passes, errors = saved
            factor = given[0] * 2 / count
            (dsums, *_), (da, *_) = errors
            g1, g2 = (each.values[-1] for each in passes)
            shared = (da, g1, g2, dsums, share, factor)
            (d_kernel, d_bias), *_ = call_over_items(
                _weight_gradients, (), (y, d, p, ratings), shared
            )
            gradients = hidden.compute_gradients(passes, errors, factor)
            gradients["encoder"]["fc_1"]["kernel"] = d_kernel
            gradients["decoder"]["fc_3"] = {"bias": d_bias}
            return (gradients,)

        joint.defvjp(forward, backward)
        loss, error = joint(params)
        return loss, (model_state, {"rmse": jnp.sqrt(lax.stop_gradient(error))})

    return loss_fn


# The functions below run on one tile of items; ``tiles.call_over_items`` says what they
# take and return. Shapes: w is (tile, width), c is (tile,), g is (users, width), and
# ratings are (users, tile).


def _first_pass(weights: Any, ratings: Any, shared: Any) -> Any:
    """Reconstruct a tile; sum up what enters the first layer again."""
    del ratings
    (w, c), (g,) = weights, shared
    y = _activate(dot(g, w, 1, 1) + widen(c)[None, :], w.dtype).astype(w.dtype)
    return [], [y], [dot(y, w, 1, 0)]


def _second_pass(weights: Any, ratings: Any, shared: Any) -> Any:
    """Reconstruct the reconstruction; sum up the gradient of g and the squared errors."""
    (w, c), (y,), (g, share) = weights, ratings, shared
    z = _activate(dot(g, w, 1, 1) + widen(c)[None, :], w.dtype)
    exact = z - widen(y)
    d = exact.astype(w.dtype)
    e = _refed_gradient(d, y).astype(w.dtype)
    return [], [d], [dot(e, w, 1, 0) * share, jnp.square(exact).sum(1)]


def _first_gradient(weights: Any, ratings: Any, shared: Any) -> Any:
    """Return the gradient of what enters the SELU of y; sum up that of g and the errors."""
    (w,), (y, d, x), (da, share) = weights, ratings, shared
    y = widen(y)
    known = jnp.where(x != 0, y - widen(x), 0)
    p = (known - widen(d) * share + dot(da, w, 1, 1)) * _derivative(y, w.dtype)
    p = p.astype(w.dtype)
    return [], [p], [dot(p, w, 1, 0), jnp.square(known).sum(1)]


def _weight_gradients(weights: Any, ratings: Any, shared: Any) -> Any:
    """Add the gradients of the four uses of the tied kernel, and of two uses of c."""
    del weights
    (y, d, p, x), (da, g1, g2, dsums, share, factor) = ratings, shared
    e = _refed_gradient(d, y) * share
    w = dot(y, da, 0, 0) + dot(p, g1, 0, 0) + dot(x, dsums, 0, 0)
    w += dot(e.astype(y.dtype), g2, 0, 0)
    bias = (widen(p) + e).sum(0)
    return [(w * factor).astype(y.dtype), (bias * factor).astype(y.dtype)], [], []


def _refed_gradient(d: jax.Array, y: jax.Array) -> jax.Array:
    """Return the gradient of what enters the SELU of z, without storing z = d + y."""
    return widen(d) * _derivative(widen(d) + widen(y), y.dtype)


_TILINGS: dict[Callable[..., Any], Tiling] = {
    _first_pass: Tiling(16, reads_ahead=True),
    _second_pass: Tiling(16, num_stages=3),
    _first_gradient: Tiling(16, reads_ahead=True),
    _weight_gradients: Tiling(8, num_stages=3),
}
"""The fastest of about thirty variants for sixteen models in bfloat16 on an H200. Tiles of
32 or 128 items, or 8 warps, took up to twice as long, except for `_first_gradient`."""


def _activate(x: jax.Array, dtype: Any) -> jax.Array:
    y = selu_value(x)
    return jnp.minimum(y, LARGEST) if dtype == jnp.float16 else y


def _derivative(y: jax.Array, dtype: Any) -> jax.Array:
    derivative = selu_derivative(y)
    if dtype != jnp.float16:
        return derivative
    # z = d + y is a sum of two rounded numbers: a saturated one may miss the largest number
    # by two roundings, which are 32 each.
    return jnp.where(y < LARGEST - 64, derivative, 0)
