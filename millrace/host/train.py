"""Training as a library call: a program, a state, an infeed, a number of updates."""

import collections
from typing import Any

from millrace.feeds.infeed import Infeed
from millrace.feeds.outfeed import Outfeed
from millrace.host.finite import FiniteWatch
from millrace.host.loops import check_infeed, filling
from millrace.host.staging import MAX_IN_FLIGHT, compile_calls, next_chunk
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram

_EXECUTIONS = 20


def train(
    program: TrainingProgram,
    state: TrainState,
    *,
    infeed: Infeed,
    updates: int,
    outfeed: Outfeed | None = None,
) -> TrainState:
    """Make `updates` weight updates and return the new state; `state` is used up.

    Args:
        program: From ``training_program``.
        state: From ``program.init`` or an earlier call.
        infeed: Its elements are batches for all replicas: micro_batch_size x
            num_replicas samples along dim 0.
        updates: How many.
        outfeed: Receives every update's info after each call: at the latest every
            `plan.updates_per_execution` updates, or twenty times if that is not given.
    """
    in_flight: collections.deque[Any] = collections.deque()
    state = program.usable(state)
    watch = FiniteWatch(program.plan, int(state.update))
    with filling(outfeed):
        check_infeed(infeed)
        if updates < 0:
            raise ValueError(f"updates must not be negative, got {updates}.")
        execution = program.plan.updates_per_execution or -(-updates // _EXECUTIONS)
        while updates:
            execution = min(execution, updates)
            capacities = compile_calls(program, state, infeed, execution)
            for _ in range(updates // execution):
                for _ in capacities:
                    chunk = next_chunk(program, infeed, capacities)
                    state, info = program.run(state, chunk)
                    if outfeed is not None:
                        outfeed.put(info, info["loss"].shape[0])
                    in_flight.append(info)
                    if len(in_flight) >= MAX_IN_FLIGHT:
                        watch.check(in_flight.popleft())
            updates %= execution
        while in_flight:  # a caller may call again and again, and must not run ahead
            watch.check(in_flight.popleft())
    return state
