"""The optimizers of the references, chosen by name.

Each works variable by variable, so that its state can be offloaded in buckets.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from millrace.config import ConfigurationError, check_keys, number, one_of
from millrace.program.accumulate import path_name

_OPTION = "--optimizer-params"

_NEITHER_SCALED_NOR_DECAYED = ("bias", "scale", "beta", "gamma")
"""Parts of the names of variables that LARS treats as plain SGD does."""

_KERAS_EPSILON = 1e-7
"""What LARS takes for an epsilon of 0, as the references do."""


def build_optimizer(
    name: str,
    params: Mapping[str, Any],
    *,
    learning_rate: optax.Schedule,
    weight_decay: float = 0.0,
    l2_regularization: float = 0.0,
    decay_kernels_only: bool = False,
    global_batch_size: int | None = None,
) -> optax.GradientTransformation:
    """Make an optimizer from its name and its parameters, no key more or less.

    - sgd: ``momentum``.
    - lars: ``momentum``, ``weight_decay``, ``eeta`` and ``epsilon``; see `_lars`.
    - rmsprop: ``momentum``, ``base_decay_exponent``, ``epsilon``, and if it is not 0
      ``initial_accumulator``; see `_rmsprop`.

    Where an update of the optimizer is ``-lr O(g)``, L2 regularization makes it
    ``-lr O(g + l2 w)`` and weight decay ``-lr (O(g) + decay w)``. Both reach every
    variable, biases and norms included unless told. A momentum of 0 keeps no velocity.

    Args:
        name: sgd, lars or rmsprop.
        params: The optimizer's own numbers.
        learning_rate: From the update's number, which the optimizer's state counts.
        weight_decay: Decoupled: taken off the weights beside any velocity, in
            proportion to the learning rate.
        l2_regularization: Added to the gradient before anything else looks at it.
        decay_kernels_only: Neither of the two reaches what is named bias or scale.
        global_batch_size: Samples per update; rmsprop's decay depends on it.
    """
    decay = number("--weight-decay", weight_decay)
    l2 = number("--l2-regularization", l2_regularization)
    kind = one_of("--optimizer", name, _KINDS)
    check_keys(
        f"{_OPTION} of {name}",
        {key: value for key, value in params.items() if key not in kind.optional},
        kind.keys,
    )
    chosen = _are_kernels if decay_kernels_only else None
    return optax.chain(
        optax.add_decayed_weights(l2, chosen),
        kind.make(params, learning_rate, global_batch_size),
        optax.add_decayed_weights(
            (lambda count: -decay * learning_rate(count)) if decay else 0.0, chosen
        ),
    )


def _are_kernels(params: Any) -> Any:
    """Tell of each variable whether it is neither a bias nor a norm's scale."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not _is_plain(path), params)


def _is_plain(path: Any) -> bool:
    name = path_name(path[-1:])
    return any(part in name for part in _NEITHER_SCALED_NOR_DECAYED)


def _sgd(
    params: Mapping[str, Any], learning_rate: optax.Schedule, _: int | None
) -> optax.GradientTransformation:
    """Momentum over gradients: ``v <- momentum v + g; w <- w - lr v``.

    TF1, PyTorch and optax do this. Keras has the learning rate inside the velocity,
    where a change of it takes ``1 / (1 - momentum)`` updates to show; while it is
    constant the two are the same.
    """
    return optax.sgd(learning_rate, momentum=_momentum(params))


def _lars(
    params: Mapping[str, Any], learning_rate: optax.Schedule, _: int | None
) -> optax.GradientTransformation:
    """Layer-wise adaptive rates: ``v <- momentum v + lr ratio (g + wd w); w <- w - v``.

    The trust ratio is ``eeta |w| / (|g| + wd |w| + epsilon)``, and 1 where either norm
    is 0; an epsilon of 0 stands for 1e-7. Variables named bias, scale, beta or gamma
    have ratio 1 and no decay. Unlike in `_sgd`, the learning rate is in the velocity.
    """
    weight_decay = _number(params, "weight_decay")
    eeta = _number(params, "eeta")
    epsilon = _number(params, "epsilon") or _KERAS_EPSILON
    momentum = _momentum(params)

    def adapt(path: Any, gradient: jax.Array, weight: jax.Array) -> jax.Array:
        if _is_plain(path):
            return gradient
        size, slope = jnp.linalg.norm(weight), jnp.linalg.norm(gradient)
        ratio = eeta * size / (slope + weight_decay * size + epsilon)
        ratio = jnp.where((size > 0) & (slope > 0), ratio, 1.0)
        return ratio * (gradient + weight_decay * weight)

    return optax.chain(
        optax.stateless(lambda g, w: jax.tree_util.tree_map_with_path(adapt, g, w)),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(momentum) if momentum else optax.identity(),
    )


def _rmsprop(
    params: Mapping[str, Any],
    learning_rate: optax.Schedule,
    global_batch_size: int | None,
) -> optax.GradientTransformation:
    """Steps divided by the root of a moving mean ``m`` of squared gradients.

    ``m <- rho m + (1 - rho) g^2; v <- momentum v + lr g / sqrt(m + epsilon); w <- w - v``
    with ``rho = 1 - 2^base_decay_exponent * global batch``: the mean spans the same
    number of samples whatever the batch.

    The references differ. Epsilon is inside the root in TF1 and in Keras with momentum,
    and here always; Keras without momentum and PyTorch add it outside. ``m`` starts at
    ``initial_accumulator``: 0, as in Keras, unless given; in TF1 it is 1, which makes the
    first steps smaller.
    """
    exponent = _number(params, "base_decay_exponent", at_least=-math.inf)
    epsilon = _number(params, "epsilon")
    if epsilon == 0:
        raise ConfigurationError(
            f"{_OPTION}: epsilon must be more than 0 for rmsprop, got 0. A gradient that "
            "has always been 0 would be divided by 0."
        )
    if global_batch_size is None:
        raise ValueError("rmsprop needs global_batch_size, on which its decay depends.")
    if exponent > (largest := -math.log2(global_batch_size)):
        raise ConfigurationError(
            f"{_OPTION}: base_decay_exponent must be at most {largest:.4g} for a global "
            f"batch of {global_batch_size}, got {exponent:g}. The decay, "
            "1 - 2^base_decay_exponent * global batch, would be negative."
        )
    return optax.rmsprop(
        learning_rate,
        decay=1.0 - 2.0**exponent * global_batch_size,
        eps=epsilon,
        eps_in_sqrt=True,
        initial_scale=_number(params, "initial_accumulator", default=0.0),
        momentum=_momentum(params),
    )


class _Kind(NamedTuple):
    make: Callable[
        [Mapping[str, Any], optax.Schedule, int | None], optax.GradientTransformation
    ]
    keys: tuple[str, ...]
    optional: tuple[str, ...] = ()


_KINDS = {
    "sgd": _Kind(_sgd, ("momentum",)),
    "lars": _Kind(_lars, ("momentum", "weight_decay", "eeta", "epsilon")),
    "rmsprop": _Kind(
        _rmsprop, ("momentum", "base_decay_exponent", "epsilon"), ("initial_accumulator",)
    ),
}


def _momentum(params: Mapping[str, Any]) -> float | None:
    """Return the momentum, or None for 0: no velocity has to be kept."""
    return _number(params, "momentum", below=1.0) or None


def _number(
    params: Mapping[str, Any], key: str, default: float | None = None, **limits: float
) -> float:
    return number(f"{_OPTION}: {key}", params.get(key, default), **limits)
