"""Optimizers by name, following the reference implementations.

Each treats variables one by one, so that its state can be offloaded in buckets.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float

from millrace.config import ConfigurationError, check_keys, number, one_of
from millrace.program.accumulate import path_name

_OPTION = "--optimizer-params"

_PLAIN_NAMES = ("bias", "scale", "beta", "gamma")
"""Parts of names of variables that LARS updates like plain SGD."""

_KERAS_EPSILON = 1e-7
"""Stands for an epsilon of 0 in LARS, as in the references."""


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
    """Build an optimizer from its name and exactly the parameters it needs.

    - sgd: ``momentum``.
    - lars: ``momentum``, ``weight_decay``, ``eeta`` and ``epsilon``; see `_lars`.
    - rmsprop: ``momentum``, ``base_decay_exponent``, ``epsilon`` and optionally
      ``initial_accumulator``; see `_rmsprop`.

    If an optimizer's update is ``-lr O(g)``, L2 regularization makes it ``-lr O(g + l2 w)``
    and weight decay ``-lr (O(g) + decay w)``. A momentum of 0 keeps no velocity.

    Args:
        name: sgd, lars or rmsprop.
        params: The optimizer's own parameters.
        learning_rate: A function of the number of updates, which the state counts.
        weight_decay: Decoupled: subtracted from the weights, not part of any velocity,
            and proportional to the learning rate.
        l2_regularization: Added to the gradient first of all.
        decay_kernels_only: Apply neither of the two to biases and scales.
        global_batch_size: Samples per update; the decay of rmsprop depends on it.
    """
    decay = number("--weight-decay", weight_decay)
    l2 = number("--l2-regularization", l2_regularization)
    kind = one_of("--optimizer", name, _KINDS)
    check_keys(
        f"{_OPTION} of {name}",
        {key: value for key, value in params.items() if key not in kind.optional},
        kind.keys,
    )
    mask = _kernel_mask if decay_kernels_only else None
    return optax.chain(
        optax.add_decayed_weights(l2, mask),
        kind.build(params, learning_rate, global_batch_size),
        optax.add_decayed_weights(
            (lambda count: -decay * learning_rate(count)) if decay else 0.0, mask
        ),
    )


def _kernel_mask(params: Any) -> Any:
    """Return a tree of whether each variable is neither a bias nor a scale."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not _is_plain(path), params)


def _is_plain(path: Any) -> bool:
    name = path_name(path[-1:])
    return any(part in name for part in _PLAIN_NAMES)


def _sgd(
    params: Mapping[str, Any], learning_rate: optax.Schedule, _: int | None
) -> optax.GradientTransformation:
    """Build SGD with momentum: ``v <- momentum v + g; w <- w - lr v``.

    TF1, PyTorch and optax do this. Keras has the learning rate inside the velocity, so
    that a change of it takes ``1 / (1 - momentum)`` updates to show. With a constant
    learning rate, the two are the same.
    """
    return optax.sgd(learning_rate, momentum=_momentum(params))


def _lars(
    params: Mapping[str, Any], learning_rate: optax.Schedule, _: int | None
) -> optax.GradientTransformation:
    """Build LARS: ``v <- momentum v + lr ratio (g + wd w); w <- w - v``.

    The trust ratio is ``eeta |w| / (|g| + wd |w| + epsilon)``, and 1 if either norm is 0;
    an epsilon of 0 stands for 1e-7. Variables named bias, scale, beta or gamma have ratio
    1 and no decay. Unlike in `_sgd`, the learning rate is inside the velocity.
    """
    weight_decay = _number(params, "weight_decay")
    eeta = _number(params, "eeta")
    epsilon = _number(params, "epsilon") or _KERAS_EPSILON
    momentum = _momentum(params)

    def adapt(
        path: Any, gradient: Float[Array, "*dims"], weight: Float[Array, "*dims"]
    ) -> Float[Array, "*dims"]:
        if _is_plain(path):
            return gradient
        weight_norm, gradient_norm = jnp.linalg.norm(weight), jnp.linalg.norm(gradient)
        ratio = eeta * weight_norm / (gradient_norm + weight_decay * weight_norm + epsilon)
        ratio = jnp.where((weight_norm > 0) & (gradient_norm > 0), ratio, 1.0)
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
    """Build RMSprop with a moving mean ``m`` of squared gradients.

    ``m <- rho m + (1 - rho) g^2; v <- momentum v + lr g / sqrt(m + epsilon); w <- w - v``
    with ``rho = 1 - 2^base_decay_exponent * global batch``, so that the mean covers the
    same number of samples for any batch size.

    The references differ. Epsilon is inside the root in TF1, in Keras with momentum, and
    here; Keras without momentum and PyTorch add it outside. ``m`` starts at
    ``initial_accumulator``, by default 0 as in Keras; in TF1 it is 1, which makes the
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
    build: Callable[
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
    # None instead of 0: optax then allocates no velocity.
    return _number(params, "momentum", below=1.0) or None


def _number(
    params: Mapping[str, Any], key: str, default: float | None = None, **limits: float
) -> float:
    return number(f"{_OPTION}: {key}", params.get(key, default), **limits)
