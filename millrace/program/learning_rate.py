"""Learning-rate schedules by name, as functions of the update number."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float32, Int32

from millrace.config import ConfigurationError, check_keys, number, one_of

_Rate = Callable[[Int32[Array, "*dims"]], Float32[Array, "*dims"]]
"""From the update number to the learning rate."""


def learning_rate_schedule(
    name: str,
    params: Mapping[str, Any],
    *,
    global_batch_size: int,
    updates_per_epoch: int,
    learning_rate: float | None = None,
    factor: float = 1.0,
    warmup: Mapping[str, Any] | None = None,
    staircase: bool = False,
) -> optax.Schedule:
    """Return the learning rate as a pure function of the update number.

    Args:
        name: const, cosine, stepped, polynomial or exponential.
        params: Exactly the keys that the schedule needs. All but stepped have
            ``initial_learning_rate``, per sample: it is multiplied by the global batch.

            - const: nothing else.
            - cosine: ``epochs_to_total_decay``. Half a cosine down to 0.
            - polynomial: ``epochs_to_total_decay``, ``end_learning_rate_ratio``,
              ``power``. Decays with a power of the remaining time, down to a fraction of
              the initial rate.
            - exponential: ``epochs_to_total_decay``, ``num_decays``, ``decay_rate``.
              Multiplied by the decay rate at the end of each of `num_decays` equal
              intervals. EfficientNet: 0.97, 146 times in 350 epochs.
            - stepped: ``boundaries`` in epochs, and ``values``, one more, which are not
              multiplied by the global batch. The update at a boundary has the old value.
        global_batch_size: Samples per update.
        updates_per_epoch: Converts epochs to updates, rounded down.
        learning_rate: The initial learning rate, whatever the global batch; replaces
            ``initial_learning_rate``. A stepped schedule has it in ``values``.
        factor: Multiplies every learning rate.
        warmup: ``warmup_epochs``, over which the rate rises linearly, and
            ``warmup_mode``: shift (the schedule starts afterwards) or mask (the rise
            multiplies the start of the schedule).
        staircase: Keep the rate of the first update of an epoch for the whole epoch. A
            stepped boundary on a whole epoch then takes effect one epoch later.
    """
    assert updates_per_epoch >= 1
    kind = one_of("--lr-schedule", name, _KINDS)
    keys = kind.keys
    if learning_rate is not None:
        number("--learning-rate", learning_rate)
        keys = tuple(key for key in keys if key != _INITIAL)
    check_keys(f"--lr-schedule-params of {name}", params, keys)
    units = _Units(global_batch_size, updates_per_epoch, factor, learning_rate)
    rate = kind.build(params, units)
    if warmup is not None:
        rate = _add_warmup(rate, warmup, updates_per_epoch)
    if staircase:
        rate = _hold_per_epoch(rate, updates_per_epoch)
    return lambda count: rate(jnp.asarray(count, jnp.int32))


class _Units(NamedTuple):
    """Converts a recipe to the batch size and epoch length of this run."""

    global_batch_size: int
    updates_per_epoch: int
    factor: float
    learning_rate: float | None

    def initial(self, params: Mapping[str, Any]) -> float:
        """Return the initial learning rate."""
        if self.learning_rate is not None:
            return self.learning_rate * self.factor
        per_sample = _number(params, "initial_learning_rate")
        return per_sample * self.global_batch_size * self.factor

    def decay_updates(self, params: Mapping[str, Any]) -> int:
        """Return the number of updates over which the learning rate decays: at least 1."""
        if (epochs := _number(params, "epochs_to_total_decay")) == 0:
            raise ConfigurationError(
                f"{_PARAMS}: epochs_to_total_decay must be more than 0, got 0."
            )
        # The rest of a run of few updates after its warmup may be less than one.
        return max(1, int(epochs * self.updates_per_epoch))


def _const(params: Mapping[str, Any], units: _Units) -> _Rate:
    initial = units.initial(params)
    return lambda update: jnp.full_like(update, initial, jnp.float32)


def _cosine(params: Mapping[str, Any], units: _Units) -> _Rate:
    initial, updates = units.initial(params), units.decay_updates(params)

    def rate(update: Int32[Array, "*dims"]) -> Float32[Array, "*dims"]:
        angle = math.pi * _fraction(jnp.minimum(update, updates), updates)
        return 0.5 * initial * (1.0 + jnp.cos(angle))

    return rate


def _polynomial(params: Mapping[str, Any], units: _Units) -> _Rate:
    initial, updates = units.initial(params), units.decay_updates(params)
    end = initial * _number(params, "end_learning_rate_ratio")
    power = _number(params, "power")

    def rate(update: Int32[Array, "*dims"]) -> Float32[Array, "*dims"]:
        remaining = _fraction(updates - jnp.minimum(update, updates), updates)
        return (initial - end) * remaining**power + end

    return rate


def _exponential(params: Mapping[str, Any], units: _Units) -> _Rate:
    initial, updates = units.initial(params), units.decay_updates(params)
    decay_rate = _number(params, "decay_rate")
    if (count := _number(params, "num_decays")) != int(count):
        raise ConfigurationError(
            f"{_PARAMS}: num_decays must be a whole number, got {count}."
        )
    decays = range(1, int(count) + 1)
    return _piecewise(
        [updates * decay // len(decays) for decay in decays],
        [initial] + [initial * decay_rate**decay for decay in decays],
    )


def _stepped(params: Mapping[str, Any], units: _Units) -> _Rate:
    boundaries, values = _numbers(params, "boundaries"), _numbers(params, "values")
    if len(values) != len(boundaries) + 1:
        raise ConfigurationError(
            f"{_PARAMS}: values must be one more than boundaries; got "
            f"{len(values)} values and {len(boundaries)} boundaries."
        )
    if boundaries != sorted(boundaries):
        raise ConfigurationError(
            f"{_PARAMS}: boundaries must not decrease, got {boundaries}."
        )
    return _piecewise(
        [int(epochs * units.updates_per_epoch) for epochs in boundaries],
        [value * units.factor for value in values],
    )


def _piecewise(boundaries: Sequence[int], values: Sequence[float]) -> _Rate:
    """Return a piecewise constant rate; the update at a boundary has the value before."""
    edges, rates = np.array(boundaries, np.int32), np.array(values, np.float32)

    def rate(update: Int32[Array, "*dims"]) -> Float32[Array, "*dims"]:
        passed = jnp.sum(update[..., None] > edges, axis=-1)
        return jnp.asarray(rates)[passed]

    return rate


class _Kind(NamedTuple):
    build: Callable[[Mapping[str, Any], _Units], _Rate]
    keys: tuple[str, ...]


_PARAMS = "--lr-schedule-params"
_INITIAL = "initial_learning_rate"
_DECAYING = (_INITIAL, "epochs_to_total_decay")
_KINDS = {
    "const": _Kind(_const, (_INITIAL,)),
    "cosine": _Kind(_cosine, _DECAYING),
    "stepped": _Kind(_stepped, ("boundaries", "values")),
    "polynomial": _Kind(_polynomial, (*_DECAYING, "end_learning_rate_ratio", "power")),
    "exponential": _Kind(_exponential, (*_DECAYING, "num_decays", "decay_rate")),
}


def _add_warmup(rate: _Rate, warmup: Mapping[str, Any], updates_per_epoch: int) -> _Rate:
    """Return a rate that rises linearly before (shift) or while (mask) `rate` starts."""
    option = "--lr-warmup-params"
    check_keys(option, warmup, ("warmup_mode", "warmup_epochs"))
    epochs = number(f"{option}: warmup_epochs", warmup["warmup_epochs"])
    updates = int(epochs * updates_per_epoch)
    delays = {"shift": updates, "mask": 0}
    delay = one_of(f"{option}: warmup_mode", warmup["warmup_mode"], delays)

    def warmed_up(update: Int32[Array, "*dims"]) -> Float32[Array, "*dims"]:
        full = rate(jnp.maximum(update - delay, 0))
        rising = full * _fraction(update + 1, updates + 1)
        return jnp.where(update < updates, rising, full)

    return warmed_up


def _hold_per_epoch(rate: _Rate, updates_per_epoch: int) -> _Rate:
    return lambda update: rate(update // updates_per_epoch * updates_per_epoch)


def _fraction(part: Int32[Array, "*dims"], whole: int) -> Float32[Array, "*dims"]:
    return part.astype(jnp.float32) / whole


def _number(params: Mapping[str, Any], key: str) -> float:
    return number(f"{_PARAMS}: {key}", params[key])


def _numbers(params: Mapping[str, Any], key: str) -> list[float]:
    values = params[key]
    if not isinstance(values, list | tuple):
        raise ConfigurationError(f"{_PARAMS}: {key} must be a list, got {values!r}.")
    return [number(f"{_PARAMS}: {key}", value) for value in values]
