"""The deep autoencoder: six dense layers that reconstruct all of a user's ratings.

The decoder uses the encoder's weights, transposed, in reverse order ("constrained"), and
has only biases of its own, unless it is untied.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from millrace.nn.dense_convolution import computed_once
from millrace.program.mixed_precision import random_bits

WIDTHS = {128: (128, 256, 256), 256: (256, 256, 512), 512: (512, 512, 1024)}
"""Of the encoder's layers, by the first one's; the last is the code."""
DROPOUT_RATES = {128: 0.65, 256: 0.8, 512: 0.8}
"""Share of the code that is dropped in training."""

_LAYERS = ("fc_1", "fc_2", "fc_3")
_INPUT = 1
"""Sets the key of what is dropped from the input apart from that of the code."""


class Model(NamedTuple):
    """The choices that make up a model."""

    num_items: int
    """Columns of a row: where rows are items, these are the users."""
    size: int
    dropout_rate: float
    """0 for none."""
    selu: bool = True
    """Whether every layer, the last included, ends in a SELU; if not, all is linear."""
    linear_output: bool = False
    """Whether the last layer does not: SELU foretells nothing below -1.76."""
    tied: bool = True
    input_dropout_rate: float = 0.0
    """The share of a user's ratings that are hidden from the network in training."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the input and of the encoder's layers."""
        return (self.num_items, *WIDTHS[self.size])


@functools.partial(jax.jit, static_argnums=0)
def init_params(model: Model, key: jax.Array) -> dict[str, Any]:
    """Draw weights evenly from Glorot's interval; biases are 0."""
    widths = model.widths
    encoder, decoder = {}, {}
    for number, name in enumerate(_LAYERS):
        before, after = widths[number : number + 2]
        layer_key = jax.random.fold_in(key, number)
        encoder[name] = {
            "kernel": _glorot(layer_key, before, after),
            "bias": jnp.zeros(after),
        }
        after, before = widths[-2 - number], widths[-1 - number]
        decoder[name] = {"bias": jnp.zeros(after)}
        if not model.tied:
            decoder_key = jax.random.fold_in(key, len(_LAYERS) + number)
            decoder[name]["kernel"] = _glorot(decoder_key, before, after)
    return {"encoder": encoder, "decoder": decoder}


def _glorot(key: jax.Array, before: int, after: int) -> jax.Array:
    limit = (6 / (before + after)) ** 0.5
    return jax.random.uniform(key, (before, after), minval=-limit, maxval=limit)


def reconstruct(
    model: Model, params: Any, rows: jax.Array, kept: jax.Array | None = None
) -> jax.Array:
    """Return what the network makes of dense rows of ratings.

    Args:
        model: The choices.
        params: The weights, in the type to compute in.
        rows: (users, items), 0 where there is no rating.
        kept: What dropout keeps of the codes; None for all, as outside training.
    """
    first = params["encoder"]["fc_1"]
    hidden = inner_layers(model, params, rows @ first["kernel"] + first["bias"], kept)
    return ratings_of(model, params, hidden)


def ratings_of(model: Model, params: Any, hidden: jax.Array) -> jax.Array:
    """Return what the last layer makes of what enters it: (users, items)."""
    last = last_layer(model, params)
    return activate_output(model, hidden @ last.kernel.T + last.bias)


def ratings_by_item(model: Model, params: Any, hidden: jax.Array) -> jax.Array:
    """Return ``ratings_of`` transposed: (items, users).

    On a CPU its products, and those of its gradients, are faster: every one of them has
    a result or an argument of many rows instead of many columns.
    """
    last = last_layer(model, params)
    return activate_output(model, _by_item(last.kernel, hidden) + last.bias[:, None])


def reconstruct_by_item(
    model: Model, params: Any, columns: jax.Array, kept: jax.Array | None
) -> jax.Array:
    """Return ``reconstruct`` of (items, users), the same way round."""
    first = params["encoder"]["fc_1"]
    sums = _over_items(columns, first["kernel"]) + first["bias"]
    return ratings_by_item(model, params, inner_layers(model, params, sums, kept))


@jax.custom_vjp
def _by_item(kernel: jax.Array, hidden: jax.Array) -> jax.Array:
    """Multiply (items, width) and (users, width) to (items, users)."""
    return lax.dot_general(kernel, hidden, (((1,), (1,)), ((), ())))


@jax.custom_vjp
def _over_items(columns: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply (items, users) and (items, width) to (users, width).

    Items are added up in parts first: a sum over all of them at once took 3.0 ms, four
    took 2.6 (17,736 items, two cores).
    """
    parts = next(n for n in (4, 3, 2, 1) if kernel.shape[0] % n == 0)
    first, second = (x.reshape(parts, -1, x.shape[1]) for x in (columns, kernel))
    return lax.dot_general(first, second, (((1,), (1,)), ((0,), (0,)))).sum(0)


# The gradients of each are written out, so that a sum over items is the other's.
_by_item.defvjp(
    lambda kernel, hidden: (_by_item(kernel, hidden), (kernel, hidden)),
    lambda saved, d: (d @ saved[1], _over_items(d, saved[0])),
)
_over_items.defvjp(
    lambda columns, kernel: (_over_items(columns, kernel), (columns, kernel)),
    lambda saved, d: (_by_item(saved[1], d), saved[0] @ d),
)


class LastLayer(NamedTuple):
    """The layer whose outputs are ratings."""

    kernel: jax.Array
    """(items, width of what enters it)"""
    bias: jax.Array


def last_layer(model: Model, params: Any) -> LastLayer:
    """Return the last layer, be it the first one's transpose or the decoder's own."""
    last = params["decoder"]["fc_3"]
    tied = params["encoder"]["fc_1"]["kernel"]
    return LastLayer(tied if model.tied else last["kernel"].T, last["bias"])


class Known(NamedTuple):
    """The known ratings of some users, one after the other."""

    row: jax.Array
    """Of each rating, its user's; past the end where there is only filling."""
    item: jax.Array
    value: jax.Array


def reconstruct_known(
    model: Model, params: Any, known: Known, num_users: int, kept: jax.Array | None
) -> jax.Array:
    """Return ``reconstruct`` for the known ratings alone, in time in proportion to them.

    The two large products become sums over the weights of what is rated: of 17,770 items
    a user of Netflix has rated some forty in three months.
    """
    hidden = hidden_of_known(model, params, known, num_users, kept)[known.row]
    last = last_layer(model, params)
    products = jnp.einsum("ij,ij->i", hidden, last.kernel[known.item])
    return activate_output(model, products + last.bias[known.item])


def hidden_of_known(
    model: Model, params: Any, known: Known, num_users: int, kept: jax.Array | None = None
) -> jax.Array:
    """Return what enters the last layer, from the known ratings alone."""
    first = params["encoder"]["fc_1"]
    sums = sums_of_known(first["kernel"], known, num_users).astype(first["bias"].dtype)
    return inner_layers(model, params, sums + first["bias"], kept)


def sums_of_known(kernel: jax.Array, known: Known, num_users: int) -> jax.Array:
    """Return the product of dense ratings and the first layer's weights, in float32."""
    terms = kernel[known.item] * known.value[:, None]
    # In float32, as a product of matrices would add them up.
    sums = jnp.zeros((num_users, terms.shape[1]))
    return sums.at[known.row].add(terms, mode="drop")


def inner_layers(
    model: Model, params: Any, sums: jax.Array, kept: jax.Array | None
) -> jax.Array:
    """From what enters the first layer's activation to what enters the last layer."""
    hidden = activate(model, sums)
    for name in _LAYERS[1:]:
        layer = params["encoder"][name]
        hidden = activate(model, hidden @ layer["kernel"] + layer["bias"])
    if kept is not None:
        hidden = _dropout(hidden, kept, model.dropout_rate)
    for name, mirrored in zip(_LAYERS[:-1], reversed(_LAYERS), strict=False):
        layer = params["decoder"][name]
        kernel = params["encoder"][mirrored]["kernel"].T if model.tied else layer["kernel"]
        hidden = activate(model, hidden @ kernel + layer["bias"])
    return hidden


def activate(model: Model, x: jax.Array) -> jax.Array:
    """Return the activation, or `x` itself where all is linear."""
    if not model.selu:
        return x
    return _selu(x) if x.dtype == jnp.float32 else saturated(jax.nn.selu(x))


def activate_output(model: Model, x: jax.Array) -> jax.Array:
    """Return the activation of the last layer, whose results are ratings."""
    return x if model.linear_output else activate(model, x)


def saturated(x: jax.Array) -> jax.Array:
    """Stop at float16's largest number, as the reference's hardware does.

    A reconstruction has hundreds of times the ratings that were known, and re-feeding adds
    all of them up: after an epoch of Netflix' ratings to a thousand, and they grow.
    """
    return jnp.minimum(x, jnp.finfo(x.dtype).max) if x.dtype == jnp.float16 else x


_SCALE, _ALPHA = 1.0507009873554805, 1.6732632423543772


@jax.custom_vjp
def _selu(x: jax.Array) -> jax.Array:
    """SELU, for less memory and time on a CPU: its gradient needs nothing but its result.

    In float32 that is as exact; in 16 bits the result is too coarse.
    """
    return computed_once(selu_value(x))


def selu_value(x: jax.Array) -> jax.Array:
    """Return SELU itself."""
    below = _ALPHA * (jnp.exp(jnp.minimum(x, 0)) - 1)
    return _SCALE * jnp.where(x > 0, x, below)


def selu_slope(y: jax.Array) -> jax.Array:
    """Return SELU's derivative where its result is `y`."""
    return jnp.where(y > 0, _SCALE, y + _SCALE * _ALPHA)


def _selu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (y := _selu(x)), y


def _selu_backward(y: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    return (dy * selu_slope(y),)


_selu.defvjp(_selu_forward, _selu_backward)


def kept_codes(
    model: Model, key: jax.Array, num_passes: int, num_users: int
) -> Sequence[jax.Array | None]:
    """Draw, for each pass of a batch through the network, what dropout keeps of its codes.

    None keeps all. The bits are those of stochastic rounding: on CPU JAX's own took a third
    of the time to compile the whole update.
    """
    if not model.dropout_rate:
        return [None] * num_passes
    bits = random_bits(key, (num_passes, num_users, model.widths[-1]))
    kept = _is_kept(bits, model.dropout_rate)
    return [kept[number] for number in range(num_passes)]


def hidden_ratings(model: Model, known: Known, key: jax.Array) -> Known:
    """Draw which ratings the network gets to see; the others are 0, as if not known.

    What is seen is enlarged, so that the mean of what enters the first layer stays.
    """
    rate = model.input_dropout_rate
    if not rate:
        return known
    bits = random_bits(jax.random.fold_in(key, _INPUT), known.value.shape)
    seen = _dropout(known.value, _is_kept(bits, rate), rate)
    return known._replace(value=seen)


def _is_kept(bits: jax.Array, rate: float) -> jax.Array:
    return bits < jnp.uint32((1 - rate) * 2.0**32)


def _dropout(x: jax.Array, kept: jax.Array, rate: float) -> jax.Array:
    """Set the others to 0 and enlarge what is kept, so that the mean stays."""
    return jnp.where(kept, saturated(x / (1 - rate)), jnp.zeros((), x.dtype))
