"""Optimizers by name, following the reference implementations or built by optax.

Each treats variables one by one, so that its state can be offloaded in buckets. Clipping by
the global norm combines gradients only.
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
from millrace.program.ema import with_ema

_OPTION = "--optimizer-params"

_PLAIN_NAMES = ("bias", "scale", "beta", "gamma")
"""Parts of names of variables that LARS updates like plain SGD."""

_KERAS_EPSILON = 1e-7
"""Stands for an epsilon of 0 in LARS, as in the references."""

_KERNEL_DIMS = 4
"""Dims of the kernel of a convolution."""

_ADAM_RMS = 0.2
"""The usual root mean square of an update of AdamW, divided by the learning rate."""


def build_optimizer(
    name: str,
    params: Mapping[str, Any],
    *,
    learning_rate: optax.Schedule,
    weight_decay: float = 0.0,
    l2_regularization: float = 0.0,
    decay_kernels_only: bool = False,
    global_batch_size: int | None = None,
    clip_norm: float | None = None,
    ema: float | None = None,
    scales: Mapping[str, float] | None = None,
    limits: Mapping[str, int] | None = None,
) -> optax.GradientTransformation:
    """Build an optimizer from its name and the parameters it needs.

    - sgd: ``momentum`` and optionally ``nesterov``.
    - lars: ``momentum``, ``weight_decay``, ``eeta`` and ``epsilon``; see `_lars`.
    - rmsprop: ``momentum``, ``base_decay_exponent``, ``epsilon`` and optionally
      ``initial_accumulator``; see `_rmsprop`.
    - adam, adamw, lamb: optionally ``b1``, ``b2`` and ``epsilon``, as in optax.
    - lion: optionally ``b1`` and ``b2``.
    - muon: optionally ``momentum``, ``b1``, ``b2`` and ``epsilon``; see `_muon`.
    - muon_sgd: optionally ``momentum``, ``sgd_momentum``, ``sgd_factor``, ``iterations``
      and ``epsilon``; see `_muon_sgd`.

    If an optimizer's update is ``-lr O(g)``, L2 regularization makes it ``-lr O(g + l2 w)``
    and weight decay ``-lr (O(g) + decay w)``; lamb scales the whole. A momentum of 0 keeps
    no velocity.

    Args:
        name: One of the names above.
        params: The optimizer's own parameters.
        learning_rate: A function of the number of updates, which the state counts.
        weight_decay: Decoupled: subtracted from the weights, not part of any velocity,
            and proportional to the learning rate.
        l2_regularization: Added to the gradient, after clipping.
        decay_kernels_only: Apply neither of the two to biases and scales.
        global_batch_size: Samples per update; the decay of rmsprop depends on it.
        clip_norm: Scale the gradients down if the norm of all of them together is larger.
        ema: Also keep a moving average of the weights with this decay; see `with_ema`.
        scales: Factors of the learning rate by the first key of a variable's path, its
            layer. With 0, the variable never changes.
        limits: Numbers of updates, in the same form, after which a variable does not change
            any more.
    """
    decay = number("--weight-decay", weight_decay)
    l2 = number("--l2-regularization", l2_regularization)
    kind = one_of("--optimizer", name, _KINDS)
    check_keys(f"{_OPTION} of {name}", params, kind.keys, kind.optional)
    mask = _kernel_mask if decay_kernels_only else None
    settings = _Settings(params, learning_rate, global_batch_size, decay, mask)
    adds_decay = decay > 0 and not kind.decays
    optimizer = optax.chain(
        *([] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]),
        optax.add_decayed_weights(l2, mask),
        kind.build(settings),
        optax.add_decayed_weights(
            (lambda count: -decay * learning_rate(count)) if adds_decay else 0.0, mask
        ),
        *([optax.stateless(_scale_updates(scales))] if scales else []),
        *([_stop_updates(limits)] if limits else []),
    )
    return optimizer if ema is None else with_ema(optimizer, ema)


def _scale_updates(scales: Mapping[str, float]) -> Callable[[Any, Any], Any]:
    """Return the function that multiplies the updates of layers.

    This equals another learning rate, because every update is proportional to it, weight
    decay and velocities that contain the rate included. (Only what `_keep_norms` adds is
    not: a kernel of `_muon_sgd` then comes to its norm more slowly, or faster.)
    """

    def scale(path: Any, update: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        factor = scales.get(path_name(path[:1]), 1.0)
        return update * factor if factor else jnp.zeros_like(update)

    return lambda updates, _: jax.tree_util.tree_map_with_path(scale, updates)


def _stop_updates(limits: Mapping[str, int]) -> optax.GradientTransformation:
    """Return a transformation that drops the updates of layers after their last one."""

    def init(params: Any) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params

        def stop(path: Any, update: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
            limit = limits.get(path_name(path[:1]))
            return update if limit is None else jnp.where(state.count < limit, update, 0)

        stopped = jax.tree_util.tree_map_with_path(stop, updates)
        return stopped, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


class _Settings(NamedTuple):
    """What the builders of optimizers get."""

    params: Mapping[str, Any]
    learning_rate: optax.Schedule
    global_batch_size: int | None
    weight_decay: float
    """Used by optimizers with a decay of their own only."""
    mask: Callable[[Any], Any] | None
    """Returns which variables decay; None for all."""

    def number(self, key: str, default: float | None = None, **limits: float) -> float:
        """Return a parameter of the optimizer."""
        value = self.params.get(key, default)
        return number(f"{_OPTION}: {key}", value, **limits)

    def momentum(self) -> float | None:
        # None instead of 0: optax then allocates no velocity.
        return self.number("momentum", below=1.0) or None

    def betas(self, b1: float, b2: float) -> dict[str, float]:
        """Return the decays of the moments, which have defaults."""
        return {
            "b1": self.number("b1", b1, below=1.0),
            "b2": self.number("b2", b2, below=1.0),
        }

    def decay(self) -> dict[str, Any]:
        """Return the arguments of optax optimizers for the weight decay."""
        return {"weight_decay": self.weight_decay, "mask": self.mask}


def _kernel_mask(params: Any) -> Any:
    """Return a tree of whether each variable is neither a bias nor a scale."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not _is_plain(path), params)


def _is_plain(path: Any) -> bool:
    name = path_name(path[-1:])
    return any(part in name for part in _PLAIN_NAMES)


def _sgd(settings: _Settings) -> optax.GradientTransformation:
    """Build SGD with momentum: ``v <- momentum v + g; w <- w - lr v``.

    With ``nesterov``, the step is ``lr (g + momentum v)``.

    TF1, PyTorch and optax do this. Keras has the learning rate inside the velocity, so
    that a change of it takes ``1 / (1 - momentum)`` updates to show. With a constant
    learning rate, the two are the same.
    """
    nesterov = settings.params.get("nesterov", False)
    if nesterov not in (True, False):
        raise ConfigurationError(
            f"{_OPTION}: nesterov must be true or false, got {nesterov!r}."
        )
    momentum = settings.momentum()
    return optax.sgd(settings.learning_rate, momentum=momentum, nesterov=bool(nesterov))


def _lars(settings: _Settings) -> optax.GradientTransformation:
    """Build LARS: ``v <- momentum v + lr ratio (g + wd w); w <- w - v``.

    The trust ratio is ``eeta |w| / (|g| + wd |w| + epsilon)``, and 1 if either norm is 0;
    an epsilon of 0 stands for 1e-7. Variables named bias, scale, beta or gamma have ratio
    1 and no decay. Unlike in `_sgd`, the learning rate is inside the velocity.
    """
    weight_decay = settings.number("weight_decay")
    eeta = settings.number("eeta")
    epsilon = settings.number("epsilon") or _KERAS_EPSILON
    momentum = settings.momentum()

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
        optax.scale_by_learning_rate(settings.learning_rate),
        optax.trace(momentum) if momentum else optax.identity(),
    )


def _rmsprop(settings: _Settings) -> optax.GradientTransformation:
    """Build RMSprop with a moving mean ``m`` of squared gradients.

    ``m <- rho m + (1 - rho) g^2; v <- momentum v + lr g / sqrt(m + epsilon); w <- w - v``
    with ``rho = 1 - 2^base_decay_exponent * global batch``, so that the mean covers the
    same number of samples for any batch size.

    The references differ. Epsilon is inside the root in TF1, in Keras with momentum, and
    here; Keras without momentum and PyTorch add it outside. ``m`` starts at
    ``initial_accumulator``, by default 0 as in Keras; in TF1 it is 1, which makes the
    first steps smaller.
    """
    exponent = settings.number("base_decay_exponent", at_least=-math.inf)
    epsilon = settings.number("epsilon")
    global_batch_size = settings.global_batch_size
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
        settings.learning_rate,
        decay=1.0 - 2.0**exponent * global_batch_size,
        eps=epsilon,
        eps_in_sqrt=True,
        initial_scale=settings.number("initial_accumulator", 0.0),
        momentum=settings.momentum(),
    )


def _adam(settings: _Settings) -> optax.GradientTransformation:
    """Build Adam; weight decay makes it AdamW."""
    betas, epsilon = settings.betas(0.9, 0.999), _epsilon(settings, 1e-8)
    return optax.adam(settings.learning_rate, betas["b1"], betas["b2"], epsilon)


def _adamw(settings: _Settings) -> optax.GradientTransformation:
    """Build AdamW: ``w <- w - lr (Adam(g) + decay w)``."""
    betas, decay = settings.betas(0.9, 0.999), settings.decay()
    epsilon = _epsilon(settings, 1e-8)
    return optax.adamw(settings.learning_rate, **betas, eps=epsilon, **decay)


def _lamb(settings: _Settings) -> optax.GradientTransformation:
    """Build LAMB: the update of AdamW, scaled to the norm of each variable."""
    betas, decay = settings.betas(0.9, 0.999), settings.decay()
    epsilon = _epsilon(settings, 1e-6)
    return optax.lamb(settings.learning_rate, **betas, eps=epsilon, **decay)


def _lion(settings: _Settings) -> optax.GradientTransformation:
    """Build Lion: the sign of a momentum. Its learning rate is a tenth of Adam's."""
    betas, decay = settings.betas(0.9, 0.99), settings.decay()
    return optax.lion(settings.learning_rate, **betas, **decay)


def _muon(settings: _Settings) -> optax.GradientTransformation:
    """Build Muon: kernels move by an orthogonalized momentum, all else by AdamW.

    The kernel of a convolution counts as a matrix with one column per output channel.
    Updates are scaled to the usual size of Adam's (arXiv 2502.16982), so that both share
    a learning rate.
    """
    betas, decay = settings.betas(0.9, 0.999), settings.weight_decay
    return optax.contrib.muon(
        settings.learning_rate,
        beta=settings.number("momentum", 0.95, below=1.0),
        eps=_epsilon(settings, 1e-8),
        weight_decay=decay,
        adam_b1=betas["b1"],
        adam_b2=betas["b2"],
        adam_weight_decay=decay if settings.mask is None else 0.0,
        muon_weight_dimension_numbers=_matrices,
        consistent_rms=_ADAM_RMS,
    )


def _matrices(params: Any) -> Any:
    """Return how Muon reads each variable as a matrix; None for one that Adam updates."""
    return jax.tree.map(lambda x: None if x.ndim < 2 else _as_matrix(x), params)


def _as_matrix(variable: Any) -> optax.contrib.MuonDimensionNumbers:
    """Return that the last dim is the output of a matrix."""
    *inputs, output = range(variable.ndim)
    return optax.contrib.MuonDimensionNumbers(tuple(inputs), output)


def _muon_sgd(settings: _Settings) -> optax.GradientTransformation:
    """Build Muon for the kernels of convolutions, and Nesterov's SGD for all else.

    The norm of a kernel is kept at the root of its number of output channels, which is
    that of an orthogonalized momentum. So the learning rate is the relative change of a
    kernel, and weight decay has no meaning for it; batch norm makes its norm irrelevant.
    SGD has `sgd_factor` times the learning rate, and the weight decay. `iterations` are
    those of Newton and Schulz in Muon, 5 by default.
    """
    rate = settings.learning_rate
    factor = settings.number("sgd_factor", 2.0)
    decay = settings.weight_decay
    muon = optax.chain(
        optax.contrib.scale_by_muon(
            ns_steps=int(settings.number("iterations", 5, at_least=1)),
            beta=settings.number("momentum", 0.6, below=1.0),
            eps=_epsilon(settings, 1e-8),
            weight_dimension_numbers=lambda updates: jax.tree.map(_as_matrix, updates),
        ),
        optax.scale_by_learning_rate(rate),
        optax.stateless(_keep_norms),
    )
    sgd = optax.chain(
        optax.trace(settings.number("sgd_momentum", 0.9, below=1.0), nesterov=True),
        optax.add_decayed_weights(decay, settings.mask),
        optax.scale_by_learning_rate(lambda count: factor * rate(count)),
    )
    return optax.partition({"muon": muon, "sgd": sgd}, _label_kernels)


def _label_kernels(params: Any) -> Any:
    return jax.tree.map(lambda x: "muon" if x.ndim == _KERNEL_DIMS else "sgd", params)


def _keep_norms(updates: Any, params: Any) -> Any:
    """Add to each update what scales the old kernel to the root of its output channels."""

    def scale(update: Float[Array, "*dims"], kernel: Float[Array, "*dims"]) -> Any:
        norm = jnp.linalg.norm(kernel.ravel())
        factor = jnp.where(norm > 0, kernel.shape[-1] ** 0.5 / norm, 1.0)
        return update + (factor - 1) * kernel

    return jax.tree.map(scale, updates, params)


def _epsilon(settings: _Settings, default: float) -> float:
    if (epsilon := settings.number("epsilon", default)) == 0:
        raise ConfigurationError(
            f"{_OPTION}: epsilon must be more than 0, got 0. A gradient that has always "
            "been 0 would be divided by 0."
        )
    return epsilon


class _Kind(NamedTuple):
    build: Callable[[_Settings], optax.GradientTransformation]
    keys: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    decays: bool = False
    """Whether it applies the weight decay itself."""


_MOMENTS = ("b1", "b2", "epsilon")
_KINDS = {
    "sgd": _Kind(_sgd, ("momentum",), ("nesterov",)),
    "lars": _Kind(_lars, ("momentum", "weight_decay", "eeta", "epsilon")),
    "rmsprop": _Kind(
        _rmsprop, ("momentum", "base_decay_exponent", "epsilon"), ("initial_accumulator",)
    ),
    "adam": _Kind(_adam, (), _MOMENTS),
    "adamw": _Kind(_adamw, (), _MOMENTS, decays=True),
    "lamb": _Kind(_lamb, (), _MOMENTS, decays=True),
    "lion": _Kind(_lion, (), ("b1", "b2"), decays=True),
    "muon": _Kind(_muon, (), ("momentum", *_MOMENTS), decays=True),
    "muon_sgd": _Kind(
        _muon_sgd,
        (),
        ("momentum", "sgd_momentum", "sgd_factor", "iterations", "epsilon"),
        decays=True,
    ),
}
