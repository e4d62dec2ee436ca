"""Split an execution into calls of the program, and stage the data of each call."""

from typing import Any

import jax
import numpy as np

from millrace.distributed.heartbeat import count_step
from millrace.feeds.infeed import DatasetEnded, Infeed
from millrace.program.compiling import tree_bytes
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram

MAX_IN_FLIGHT = 2
"""Calls in flight at once: one runs while the next is queued, so the device never waits.

More would hold more staged data and delay reports for no gain. Stopping all processes at
the same update relies on them being at most two calls apart, and more than 32 calls with
collectives deadlock on CPU devices.
"""


def compile_calls(
    program: TrainingProgram, state: TrainState, infeed: Infeed, execution: int
) -> tuple[int, ...]:
    """Compile the program for every length of call in an execution of `execution` updates.

    An execution with more data than the program stages at once is split into several calls.

    Returns:
        For each call of an execution, the elements it takes from the infeed.
    """
    element = infeed.peek()
    for path, leaf in jax.tree_util.tree_leaves_with_path(element):
        if np.ndim(leaf) == 0:
            raise ValueError(
                f"Elements of the infeed must have samples along dim 0; "
                f"{jax.tree_util.keystr(path)} is a single number."
            )
    per_call = program.updates_per_call(execution, tree_bytes(element))
    calls = [per_call] * (execution // per_call)
    if rest := execution % per_call:
        calls.append(rest)
    micro_batches = program.plan.batching.gradient_accumulation_count
    capacities = tuple(updates * micro_batches for updates in calls)
    for capacity in sorted(set(capacities), reverse=True):
        program.compile(state, _chunk_spec(program, element, capacity))
    return capacities


def next_chunk(
    program: TrainingProgram, infeed: Infeed, capacities: tuple[int, ...]
) -> Any:
    """Return the next staged chunk of batches; raise an error if the dataset has ended."""
    chunk = infeed.chunk(capacities, program.chunk_sharding, only_full=True)
    if chunk is None:
        raise DatasetEnded(
            f"The dataset ended after {infeed.elements_read} elements, before the end of "
            "training. Repeat it without end, or use Infeed(..., on_end='stop') with "
            "millrace.train."
        )
    infeed.took(chunk.stop)
    count_step()
    return chunk.data


def _chunk_spec(program: TrainingProgram, element: Any, capacity: int) -> Any:
    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        array = np.asarray(leaf)
        return jax.ShapeDtypeStruct(
            (capacity, *array.shape),
            jax.dtypes.canonicalize_dtype(array.dtype),
            sharding=program.chunk_sharding,
        )

    return jax.tree.map(spec, element)
