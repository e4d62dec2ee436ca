"""Training as a library call: a program, a state, an infeed, a number of updates."""

import collections
from typing import Any

import jax

from millrace.feeds.infeed import DatasetEnded, Infeed
from millrace.feeds.outfeed import Outfeed
from millrace.loop.nan_guard import NonFiniteCheck
from millrace.loop.repeat import check_count, check_infeed, filling
from millrace.loop.staging import MAX_IN_FLIGHT, compile_calls, next_chunk
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram

_NUM_EXECUTIONS = 20
"""Executions per call of ``train``, if the plan does not give their length."""


def train(
    program: TrainingProgram,
    state: TrainState,
    *,
    infeed: Infeed,
    updates: int,
    outfeed: Outfeed | None = None,
) -> TrainState:
    """Make `updates` weight updates and return the new state; `state` is donated.

    If the dataset ends early, ``Infeed(..., on_end="stop")`` makes the updates for which
    there are whole batches. Otherwise ``DatasetEnded`` is raised; its attribute `state` is
    the state after the last update.

    Args:
        program: From ``training_program``.
        state: From ``program.init`` or an earlier call.
        infeed: Its elements are batches for all replicas: micro_batch_size x
            num_replicas samples along dim 0.
        updates: Number of updates.
        outfeed: Receives the info of every update after each call: at least every
            `plan.updates_per_execution` updates, or twenty times if that is not given.
    """
    with filling(outfeed):
        check_infeed(infeed)
        updates = check_count("updates", updates)
        if not isinstance(state, TrainState):
            raise TypeError(
                f"state must come from program.init or an earlier call, got a "
                f"{type(state).__name__}."
            )
        training = _Training(program, state, infeed, outfeed)
        try:
            execution = program.plan.updates_per_execution or -(-updates // _NUM_EXECUTIONS)
            training.make_updates(updates, execution)
        except DatasetEnded as error:
            if infeed.on_end != "stop":
                error.state = training.state
                raise
            training.make_remaining_updates()
        training.wait()
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
        update = int(jax.device_get(self.state.update))
        self._non_finite_check = NonFiniteCheck(program.plan, update)

    def make_updates(self, updates: int, execution: int) -> None:
        """Make updates in executions of the given length, and a shorter last one."""
        while updates:
            execution = min(execution, updates)
            capacities = compile_calls(self._program, self.state, self._infeed, execution)
            for _ in range(updates // execution):
                for _ in capacities:
                    self._call(capacities)
            updates %= execution

    def make_remaining_updates(self) -> None:
        """Make the updates for which the dataset, which has ended, has elements left."""
        left = self._infeed.elements_read - self._infeed.position
        updates = left // self._program.plan.batching.gradient_accumulation_count
        self.make_updates(updates, updates)

    def _call(self, capacities: tuple[int, ...]) -> None:
        chunk = next_chunk(self._program, self._infeed, capacities)
        self.state, info = self._program.run(self.state, chunk)
        if self._outfeed is not None:
            self._outfeed.put(info, info["loss"].shape[0])
        self._in_flight.append(info)
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._non_finite_check.check(self._in_flight.popleft())

    def wait(self) -> None:
        """Wait for all calls, so that repeated calls of ``train`` do not queue up."""
        while self._in_flight:
            self._non_finite_check.check(self._in_flight.popleft())
