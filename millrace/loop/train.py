"""Training as a library call: a program, a state, an infeed, a number of updates."""

import collections
from typing import Any

import jax

from millrace.feeds.infeed import DatasetEnded, Infeed
from millrace.feeds.outfeed import Outfeed
from millrace.loop.nan_guard import NonFiniteCheck
from millrace.loop.repeat import check_infeed, filling, whole_number
from millrace.loop.staging import MAX_IN_FLIGHT, compile_calls, next_chunk
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

    Where the dataset ends too early, ``Infeed(..., on_end="stop")`` makes the updates for
    which there are whole batches and returns what they reached. Otherwise ``DatasetEnded``
    is raised; its attribute `state` is the state after the last update that was made.

    Args:
        program: From ``training_program``.
        state: From ``program.init`` or an earlier call.
        infeed: Its elements are batches for all replicas: micro_batch_size x
            num_replicas samples along dim 0.
        updates: How many.
        outfeed: Receives every update's info after each call: at the latest every
            `plan.updates_per_execution` updates, or twenty times if that is not given.
    """
    with filling(outfeed):
        check_infeed(infeed)
        updates = whole_number("updates", updates)
        if not isinstance(state, TrainState):
            raise TypeError(
                f"state must come from program.init or an earlier call, got a "
                f"{type(state).__name__}."
            )
        training = _Training(program, state, infeed, outfeed)
        try:
            execution = program.plan.updates_per_execution or -(-updates // _EXECUTIONS)
            training.make(updates, execution)
        except DatasetEnded as error:
            if infeed.on_end != "stop":
                error.state = training.state
                raise
            training.make_last()
        training.settle()
    return training.state


class _Training:
    """One call of ``train``."""

    def __init__(
        self,
        program: TrainingProgram,
        state: TrainState,
        infeed: Infeed,
        outfeed: Outfeed | None,
    ) -> None:
        self.state = program.validate_state(state)
        self._program = program
        self._infeed = infeed
        self._outfeed = outfeed
        self._in_flight: collections.deque[Any] = collections.deque()
        self._watch = NonFiniteCheck(program.plan, int(jax.device_get(self.state.update)))

    def make(self, updates: int, execution: int) -> None:
        """Make updates, so many in an execution."""
        while updates:
            execution = min(execution, updates)
            capacities = compile_calls(self._program, self.state, self._infeed, execution)
            for _ in range(updates // execution):
                for _ in capacities:
                    self._call(capacities)
            updates %= execution

    def make_last(self) -> None:
        """Make the updates for which a dataset that has ended has elements left."""
        left = self._infeed.elements_read - self._infeed.position
        updates = left // self._program.plan.batching.gradient_accumulation_count
        self.make(updates, updates)

    def _call(self, capacities: tuple[int, ...]) -> None:
        chunk = next_chunk(self._program, self._infeed, capacities)
        self.state, info = self._program.run(self.state, chunk)
        if self._outfeed is not None:
            self._outfeed.put(info, info["loss"].shape[0])
        self._in_flight.append(info)
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._watch.check(self._in_flight.popleft())

    def settle(self) -> None:
        """Wait for all calls: who calls ``train`` again and again must not run ahead."""
        while self._in_flight:
            self._watch.check(self._in_flight.popleft())
