"""The deep autoencoder: six dense layers that reconstruct all ratings of a row.

The decoder uses the transposed encoder weights in reverse order (a "constrained" decoder)
and has only its own biases, unless it is untied.

Ratings are written as rows of users by items. With rows of items, the two swap places.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from millrace.nn.dense_convolution import computed_once
from millrace.program.mixed_precision import random_bits

WIDTHS = {128: (128, 256, 256), 256: (256, 256, 512), 512: (512, 512, 1024)}
"""Widths of the encoder layers by the first one; the last is the code layer."""
DROPOUT_RATES = {128: 0.65, 256: 0.8, 512: 0.8}
"""Default dropout rate of the code layer by size."""

_LAYERS = ("fc_1", "fc_2", "fc_3")
_INPUT_KEY = 1
"""Folded into the key of input dropout, so that it differs from that of the code."""


class TracedRate(NamedTuple):
    """A dropout rate as arrays, which models that are trained together may differ in.

    It is never false: a rate of 0 draws a mask that keeps all.
    """

    largest_kept: jax.Array
    """Random bits up to this number keep a value."""
    kept: jax.Array
    """The fraction that is kept."""


def stack_rates(rates: Sequence[float]) -> TracedRate:
    """Return the dropout rates of several models along dim 0."""
    kept = 1 - np.array(rates, np.float64)
    largest = np.maximum(kept * 2.0**32 - 1, 0).astype(np.uint32)
    return TracedRate(jnp.asarray(largest), jnp.asarray(kept, jnp.float32))


class Model(NamedTuple):
    """Hyperparameters of the autoencoder."""

    num_items: int
    """Columns of a row: items, or users if rows are items."""
    size: int
    dropout_rate: float | TracedRate
    selu: bool = True
    """Whether layers, the last included, end in a SELU; otherwise all are linear."""
    linear_output: bool = False
    """Whether the last layer has no SELU, which cannot go below -1.76."""
    tied: bool = True
    input_dropout_rate: float | TracedRate = 0.0
    """Fraction of the known ratings that are hidden from the network in training."""
    input_offset: float = 0.0
    """Added to the known ratings that the network sees."""
    zero_output: bool = False
    """Whether the last layer of an untied decoder starts with zeros."""
    positive_from: float | None = None
    """The smallest rating of a liked item, if the model ranks items: its inputs are the
    liked items, its outputs the logits of all items. None if it predicts ratings."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the input and of the encoder layers."""
        return (self.num_items, *WIDTHS[self.size])


@functools.partial(jax.jit, static_argnums=0)
def init_params(model: Model, key: jax.Array) -> dict[str, Any]:
    """Draw Glorot-uniform kernels; biases are 0."""
    widths = model.widths
    encoder, decoder = {}, {}
    for number, name in enumerate(_LAYERS):
        before, after = widths[number : number + 2]
        layer_key = jax.random.fold_in(key, number)
        encoder[name] = {
            "kernel": _glorot_uniform(layer_key, before, after),
            "bias": jnp.zeros(after),
        }
        after, before = widths[-2 - number], widths[-1 - number]
        decoder[name] = {"bias": jnp.zeros(after)}
        if not model.tied:
            decoder_key = jax.random.fold_in(key, len(_LAYERS) + number)
            decoder[name]["kernel"] = _glorot_uniform(decoder_key, before, after)
    if model.zero_output:
        decoder[_LAYERS[-1]]["kernel"] = jnp.zeros((widths[1], widths[0]))
    return {"encoder": encoder, "decoder": decoder}


def _glorot_uniform(key: jax.Array, before: int, after: int) -> jax.Array:
    limit = (6 / (before + after)) ** 0.5
    return jax.random.uniform(key, (before, after), minval=-limit, maxval=limit)


def reconstruct(
    model: Model,
    params: Any,
    rows: jax.Array,  # (users, items), 0 where there is no rating
    mask: jax.Array | None = None,  # (users, code)
) -> jax.Array:  # (users, items)
    """Return the reconstruction of dense rows, computed in the dtype of the weights.

    `mask` is what dropout keeps of the codes; None keeps all, as in evaluation.
    """
    first = params["encoder"]["fc_1"]
    sums = rows @ first["kernel"] + first["bias"]
    output = get_output_layer(model, params)
    hidden = apply_hidden_layers(model, params, sums, mask)
    return activate_output(model, hidden @ output.kernel.T + output.bias)


def predict_rows(
    model: Model,
    params: Any,
    rows: jax.Array,  # (users, items), 0 where there is no rating
) -> jax.Array:  # (users, items)
    """Return what a trained model predicts from known ratings: ratings, or logits."""
    if model.positive_from is not None:
        liked = find_liked(model, rows).astype(rows.dtype)
        norm = _count_norm(widen(liked).sum(1)).astype(liked.dtype)
        return reconstruct(model, params, liked / norm[:, None])
    if model.input_offset:
        rows = jnp.where(
            rows == 0, rows, rows + jnp.asarray(model.input_offset, rows.dtype)
        )
    return reconstruct(model, params, rows)


def reconstruct_by_item(
    model: Model,
    params: Any,
    columns: jax.Array,  # (items, users)
    mask: jax.Array | None,  # (users, code)
) -> jax.Array:  # (items, users)
    """Return ``reconstruct`` with input and output transposed."""
    first = params["encoder"]["fc_1"]
    sums = _sum_over_items(columns, first["kernel"]) + first["bias"]
    hidden = apply_hidden_layers(model, params, sums, mask)
    return apply_output_layer_by_item(model, params, hidden)


def apply_output_layer_by_item(
    model: Model,
    params: Any,
    hidden: jax.Array,  # (users, width)
) -> jax.Array:  # (items, users)
    """Apply the last layer, with the result transposed.

    On a CPU this makes the products, and those of the gradients, faster: each of them has
    a result or an argument with many rows instead of many columns.
    """
    output = get_output_layer(model, params)
    sums = _multiply_by_item(output.kernel, hidden) + output.bias[:, None]
    return activate_output(model, sums)


@jax.custom_vjp
def _multiply_by_item(
    kernel: jax.Array,  # (items, width)
    hidden: jax.Array,  # (users, width)
) -> jax.Array:  # (items, users)
    return lax.dot_general(kernel, hidden, (((1,), (1,)), ((), ())))


@jax.custom_vjp
def _sum_over_items(
    columns: jax.Array,  # (items, users)
    kernel: jax.Array,  # (items, width)
) -> jax.Array:  # (users, width)
    # A sum over all items at once took 3.0 ms, four partial sums 2.6 ms (17,736 items, two
    # cores).
    parts = next(n for n in (4, 3, 2, 1) if kernel.shape[0] % n == 0)
    first, second = (x.reshape(parts, -1, x.shape[1]) for x in (columns, kernel))
    return lax.dot_general(first, second, (((1,), (1,)), ((0,), (0,)))).sum(0)


# The gradient of each needs the other: with the rules written out, every sum over items is
# done in parts.
_multiply_by_item.defvjp(
    lambda kernel, hidden: (_multiply_by_item(kernel, hidden), (kernel, hidden)),
    lambda saved, d: (d @ saved[1], _sum_over_items(d, saved[0])),
)
_sum_over_items.defvjp(
    lambda columns, kernel: (_sum_over_items(columns, kernel), (columns, kernel)),
    lambda saved, d: (_multiply_by_item(saved[1], d), saved[0] @ d),
)


class OutputLayer(NamedTuple):
    """The last layer, whose outputs are ratings."""

    kernel: jax.Array  # (items, width)
    bias: jax.Array  # (items,)


def get_output_layer(model: Model, params: Any) -> OutputLayer:
    """Return the last layer: the transposed first layer if tied, else its own weights."""
    last = params["decoder"]["fc_3"]
    tied = params["encoder"]["fc_1"]["kernel"]
    return OutputLayer(tied if model.tied else last["kernel"].T, last["bias"])


class KnownRatings(NamedTuple):
    """The known ratings of a batch as a flat list."""

    row: jax.Array  # (ratings,)
    """The row of each rating; one past the last row in padding."""
    item: jax.Array  # (ratings,)
    value: jax.Array  # (ratings,)


def get_known_ratings(batch: Any, prefix: str = "") -> KnownRatings:
    """Return the ratings of a batch as one flat list."""
    return KnownRatings(
        *(batch[prefix + name].reshape(-1) for name in KnownRatings._fields)
    )


def reconstruct_known(
    model: Model,
    params: Any,
    known: KnownRatings,
    num_users: int,
    mask: jax.Array | None,  # (users, code)
) -> jax.Array:  # (ratings,)
    """Return ``reconstruct`` at the known ratings only, in time proportional to them.

    The two large products become sums over the weights of rated items. In the three-month
    Netflix data, a user has rated about 40 of 17,770 items.
    """
    hidden = compute_hidden(model, params, known, num_users, mask)[known.row]
    output = get_output_layer(model, params)
    products = jnp.einsum("ij,ij->i", hidden, output.kernel[known.item])
    return activate_output(model, products + output.bias[known.item])


def compute_hidden(
    model: Model,
    params: Any,
    known: KnownRatings,
    num_users: int,
    mask: jax.Array | None = None,  # (users, code)
) -> jax.Array:  # (users, width)
    """Return the input of the last layer, computed from the known ratings only."""
    first = params["encoder"]["fc_1"]
    sums = multiply_sparse(first["kernel"], known, num_users).astype(first["bias"].dtype)
    return apply_hidden_layers(model, params, sums + first["bias"], mask)


def multiply_sparse(
    kernel: jax.Array,  # (items, width)
    known: KnownRatings,
    num_users: int,
) -> jax.Array:  # (users, width)
    """Return the product of the sparse ratings and a kernel, in float32."""
    terms = kernel[known.item] * known.value[:, None]
    # In float32, because a dense product accumulates in float32 as well.
    sums = jnp.zeros((num_users, terms.shape[1]))
    return sums.at[known.row].add(terms, mode="drop")


def apply_hidden_layers(
    model: Model,
    params: Any,
    sums: jax.Array,  # (users, width)
    mask: jax.Array | None,  # (users, code)
) -> jax.Array:  # (users, width)
    """Go from the first layer, before its activation, to the input of the last layer."""
    hidden = activate(model, sums)
    for name in _LAYERS[1:]:
        layer = params["encoder"][name]
        hidden = activate(model, hidden @ layer["kernel"] + layer["bias"])
    if mask is not None:
        hidden = _apply_dropout(hidden, mask, model.dropout_rate)
    for name, mirrored in zip(_LAYERS[:-1], reversed(_LAYERS), strict=False):
        layer = params["decoder"][name]
        kernel = params["encoder"][mirrored]["kernel"].T if model.tied else layer["kernel"]
        hidden = activate(model, hidden @ kernel + layer["bias"])
    return hidden


def activate(model: Model, x: jax.Array) -> jax.Array:
    """Apply the activation of a hidden layer, if the model has one."""
    if not model.selu:
        return x
    return _selu(x) if x.dtype == jnp.float32 else saturate(jax.nn.selu(x))


def activate_output(model: Model, x: jax.Array) -> jax.Array:
    """Apply the activation of the last layer, whose outputs are ratings."""
    return x if model.linear_output else activate(model, x)


def saturate(x: jax.Array) -> jax.Array:
    """Limit float16 to its largest finite number, as the reference's hardware does.

    A reconstruction has hundreds of times more ratings than were known, and re-feeding
    sums over all of them: on the Netflix data these sums reach a thousand after one epoch
    and keep growing.
    """
    return jnp.minimum(x, jnp.finfo(x.dtype).max) if x.dtype == jnp.float16 else x


_SCALE, _ALPHA = 1.0507009873554805, 1.6732632423543772


@jax.custom_vjp
def _selu(x: jax.Array) -> jax.Array:
    """SELU that takes its gradient from its output alone.

    This saves memory and time on a CPU. In float32 it is as accurate as the usual
    gradient; a 16-bit output would be too coarse.
    """
    return computed_once(selu_value(x))


def selu_value(x: jax.Array) -> jax.Array:
    """Return SELU."""
    below = _ALPHA * (jnp.exp(jnp.minimum(x, 0)) - 1)
    return _SCALE * jnp.where(x > 0, x, below)


def selu_derivative(y: jax.Array) -> jax.Array:
    """Return the derivative of SELU where its output is `y`."""
    return jnp.where(y > 0, _SCALE, y + _SCALE * _ALPHA)


def _selu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (y := _selu(x)), y


def _selu_backward(y: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    return (dy * selu_derivative(y),)


_selu.defvjp(_selu_forward, _selu_backward)


def draw_dropout_masks(
    model: Model, key: jax.Array, num_passes: int, num_users: int
) -> Sequence[jax.Array | None]:  # (users, code) each
    """Draw a dropout mask of the codes for each pass of a batch; None keeps all."""
    if not model.dropout_rate:
        return [None] * num_passes
    # The generator of stochastic rounding: with jax.random, a third of the time to compile
    # a whole update on CPU went into these bits.
    bits = random_bits(key, (num_passes, num_users, model.widths[-1]))
    masks = _draw_kept(bits, model.dropout_rate)
    return [masks[number] for number in range(num_passes)]


def add_input_offset(model: Model, known: KnownRatings) -> KnownRatings:
    """Return the ratings as the network sees them."""
    if not model.input_offset:
        return known
    offset = jnp.asarray(model.input_offset, known.value.dtype)
    return known._replace(value=known.value + offset)


def drop_input_ratings(model: Model, known: KnownRatings, key: jax.Array) -> KnownRatings:
    """Return the ratings as the network sees them, a random part of them as 0: hidden."""
    known = add_input_offset(model, known)
    rate = model.input_dropout_rate
    if not rate:
        return known
    bits = random_bits(jax.random.fold_in(key, _INPUT_KEY), known.value.shape)
    return known._replace(value=_apply_dropout(known.value, _draw_kept(bits, rate), rate))


def find_liked(model: Model, values: jax.Array) -> jax.Array:
    """Return which ratings are those of items that a user likes; 0 is no rating."""
    assert model.positive_from is not None
    return (values >= jnp.asarray(model.positive_from, values.dtype)) & (values != 0)


class LikedItems(NamedTuple):
    """What a model that ranks items sees of a batch, and what it has to find."""

    inputs: KnownRatings
    """The items that the network sees, scaled to an L2 norm of 1 in each row."""
    is_input: jax.Array  # (ratings,)
    is_target: jax.Array  # (ratings,)
    """The liked items that are hidden from the network."""


def split_liked(
    model: Model, known: KnownRatings, num_users: int, key: jax.Array
) -> LikedItems:
    """Hide a random part of the liked items, which the network has to find.

    Without input dropout, the network sees all of them and has to find all of them.
    """
    is_liked = find_liked(model, known.value) & (known.row < num_users)
    is_input = is_target = is_liked
    if rate := model.input_dropout_rate:
        bits = random_bits(jax.random.fold_in(key, _INPUT_KEY), known.value.shape)
        is_kept = _draw_kept(bits, rate)
        is_input, is_target = is_liked & is_kept, is_liked & ~is_kept
    seen = is_input.astype(known.value.dtype)
    # Counted in float32: bfloat16 cannot count beyond 256.
    zeros = jnp.zeros(num_users, wide_dtype(seen))
    norm = _count_norm(zeros.at[known.row].add(widen(seen), mode="drop"))
    norm = norm.astype(seen.dtype).at[known.row].get(mode="fill", fill_value=1)
    return LikedItems(known._replace(value=seen / norm), is_input, is_target)


def _count_norm(count: jax.Array) -> jax.Array:
    """Return the L2 norm of rows with this many ones; 1 for an empty row."""
    return jnp.sqrt(jnp.maximum(count, 1))


def _draw_kept(bits: jax.Array, rate: float | TracedRate) -> jax.Array:
    if isinstance(rate, TracedRate):
        return bits <= rate.largest_kept
    return bits < jnp.uint32((1 - rate) * 2.0**32)


def _apply_dropout(x: jax.Array, mask: jax.Array, rate: float | TracedRate) -> jax.Array:
    """Zero what is dropped and scale up what is kept, so that the mean stays the same."""
    kept = rate.kept.astype(x.dtype) if isinstance(rate, TracedRate) else 1 - rate
    return jnp.where(mask, saturate(x / kept), jnp.zeros((), x.dtype))


def widen(x: jax.Array) -> jax.Array:
    """Cast to the dtype in which to accumulate: float32, or float64 if `x` has it."""
    return x.astype(wide_dtype(x))


def wide_dtype(x: jax.Array) -> Any:
    """Return the dtype in which to accumulate."""
    return jnp.promote_types(x.dtype, jnp.float32)
