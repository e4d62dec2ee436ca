"""Choose layers by patterns, to freeze them or to change their learning rate."""

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from millrace.config import ConfigurationError
from millrace.nn.layers import Call, Layer, Tree

_MAX_SHOWN = 8


def choose_layers(option: str, pattern: str, names: Sequence[str]) -> set[str]:
    """Return the layers whose name matches a pattern, such as ``b1/*``.

    Args:
        option: The option that has the pattern, for the error if nothing matches.
        pattern: A name with ``*``, ``?`` and ``[…]``, as in a shell; ``*`` matches ``/``.
        names: Names of the layers with weights.
    """
    chosen = set(fnmatch.filter(names, pattern))
    if not chosen:
        more = ", …" if len(names) > _MAX_SHOWN else ""
        raise ConfigurationError(
            f"{option}: no layer with weights has a name like {pattern}. The layers are "
            f"{', '.join(names[:_MAX_SHOWN])}{more}"
            f"{f' and {names[-1]}' if more else ''}."
        )
    return chosen


def choose_scales(
    frozen: Sequence[str], scales: Mapping[str, float], names: Sequence[str]
) -> dict[str, float]:
    """Return the factor of the learning rate of each layer that has one; 0 if frozen.

    Args:
        frozen: Patterns of layers that are not trained.
        scales: Factors by pattern; the last pattern that matches counts.
        names: Names of the layers with weights.
    """
    chosen: dict[str, float] = {}
    for pattern, factor in scales.items():
        chosen |= dict.fromkeys(choose_layers("--lr-scale", pattern, names), factor)
    for pattern in frozen:
        chosen |= dict.fromkeys(choose_layers("--freeze", pattern, names), 0.0)
    if names and all(chosen.get(name) == 0 for name in names):
        raise ConfigurationError(
            f"--freeze {' '.join(frozen)} freezes every layer: nothing is left to train."
        )
    return chosen


def freeze_layers(layers: Sequence[Layer], frozen: Collection[str]) -> list[Layer]:
    """Return a model whose frozen layers work in training as in validation.

    Their weights have no gradient, so that nothing is computed for it, and batch norm uses
    its moving statistics and does not change them.

    Args:
        layers: The model.
        frozen: Names of layers.
    """
    return [_freeze(layer, frozen) for layer in layers]


def frozen_state_reduction(frozen: Collection[str]) -> Callable[[str, Any], Any]:
    """Return the ``model_state_reduction`` that keeps the statistics of frozen layers.

    A mean of equal values over three micro-batches would round, and drift.
    """
    return lambda name, _: "once" if name.rpartition("/")[0] in frozen else None


def _freeze(layer: Layer, frozen: Collection[str]) -> Layer:
    if layer.branches:
        branches = tuple(tuple(freeze_layers(b, frozen)) for b in layer.branches)
        return layer._replace(branches=branches)
    if layer.name not in frozen:
        return layer

    def apply(params: Tree, model_state: Tree, x: Any, call: Call) -> tuple[Any, Tree]:
        constant = jax.lax.stop_gradient(params)
        y, _ = layer.apply(constant, model_state, x, call._replace(training=False))
        return y, model_state

    return layer._replace(apply=apply)
