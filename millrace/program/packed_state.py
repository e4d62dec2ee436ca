"""A pipeline's training state: rows of numbers, one for each device.

``Arrangement`` says what lies where in a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from millrace.program.packing import Buffers
from millrace.program.replicas import STAGE_AXIS
from millrace.program.step import TrainState


class OptimizerRows(NamedTuple):
    """The optimizer's state as a pipeline's program holds it."""

    buckets: tuple[Buffers, ...]
    """One or, where it is streamed, several; (devices, numbers)."""
    shared: tuple[Any, ...]
    """What belongs to no layer, such as counts: the same on every device."""


ROW, SAME = PartitionSpec(STAGE_AXIS), PartitionSpec()
_OPTIMIZER: Any = OptimizerRows._make((ROW, SAME))
STATE: Any = TrainState._make((SAME, ROW, ROW, _OPTIMIZER, SAME, SAME))
"""How a packed state is split over the devices."""


def is_packed(state: TrainState) -> bool:
    """Tell a pipeline's own state from one of trees over the whole model."""
    return isinstance(state.optimizer_state, OptimizerRows)


def without_optimizer(state: TrainState) -> TrainState:
    """Return a state without the optimizer's."""
    return state._replace(optimizer_state=OptimizerRows((), ()))


def without_buckets(state: TrainState) -> TrainState:
    """Return a state without what is updated in buckets."""
    shared = state.optimizer_state.shared
    return state._replace(params=None, optimizer_state=OptimizerRows((), shared))


def own_row(state: TrainState) -> TrainState:
    """Return a device's own part of a state, without the dim of devices."""
    return _map_rows(first_row, state)


def as_row(state: TrainState) -> TrainState:
    """Return a device's own part as a row of the whole state."""
    return _map_rows(row, state)


def first_row(tree: Any) -> Any:
    """Drop the dim of devices."""
    return jax.tree.map(lambda x: x[0], tree)


def row(tree: Any) -> Any:
    """Add the dim of devices."""
    return jax.tree.map(lambda x: x[None], tree)


def _map_rows(function: Callable[[Any], Any], state: TrainState) -> TrainState:
    """Apply a function to what has a row for every device."""
    optimizer = state.optimizer_state
    params, model_state, buckets = function(
        (state.params, state.model_state, optimizer.buckets)
    )
    return state._replace(
        params=params,
        model_state=model_state,
        optimizer_state=optimizer._replace(buckets=buckets),
    )
