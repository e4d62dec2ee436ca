"""Training as a library call: a program, a state, an infeed, a number of updates."""

import collections

import jax

from millrace.feeds.infeed import DatasetEnded, Infeed
from millrace.feeds.outfeed import Outfeed
from millrace.loop.nan_guard import NonFiniteCheck
from millrace.loop.repeat import check_count, check_infeed, filling
from millrace.loop.staging import Call, Calls
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram
from millrace.user_code import noting_user_line

_NUM_CHUNKS = 20
"""Chunks per call of ``train``, so that it does not read much further than it needs."""


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
        outfeed: Receives the info of every update after each call: every
            `plan.updates_per_execution` updates, or several times per second if that is
            not given.
    """
    with filling(outfeed), noting_user_line():
        check_infeed(infeed)
        updates = check_count("updates", updates)
        if not isinstance(state, TrainState):
            raise TypeError(
                f"state must come from program.init or an earlier call, got a "
                f"{type(state).__name__}."
            )
        training = _Training(program, state, infeed, outfeed)
        try:
            training.make_updates(updates, program.plan.updates_per_execution)
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
        self._in_flight: collections.deque[Call] = collections.deque()
        update = int(jax.device_get(self.state.update))
        self._non_finite_check = NonFiniteCheck(program.plan, update)

    def make_updates(self, updates: int, execution: int | None) -> None:
        """Make updates in executions of the given length, and a shorter last one."""
        while updates:
            length = min(execution or updates, updates)
            calls = Calls(
                self._program,
                self._infeed,
                execution=length,
                total=updates,
                max_staged=-(-updates // _NUM_CHUNKS),
                fixed=execution is not None,
            )
            calls.compile(self.state)
            calls.pace.start()
            self._make_calls(calls, updates - updates % length)
            updates %= length

    def make_remaining_updates(self) -> None:
        """Make the updates for which the dataset, which has ended, has elements left."""
        left = self._infeed.elements_read - self._infeed.position
        updates = left // self._program.plan.batching.gradient_accumulation_count
        self.make_updates(updates, updates)

    def _make_calls(self, calls: Calls, updates: int) -> None:
        done = 0
        while done < updates:
            chunk = calls.next_chunk()
            self.state, call = calls.run(self.state, chunk, done, updates - done)
            done += call.updates
            if self._outfeed is not None:
                self._outfeed.put(call.info, call.updates)
            self._in_flight.append(call)
            while len(self._in_flight) >= calls.max_in_flight:
                calls.pace.add(self._check_oldest())

    def wait(self) -> None:
        """Wait for all calls, so that repeated calls of ``train`` do not queue up."""
        while self._in_flight:
            self._check_oldest()

    def _check_oldest(self) -> int:
        """Wait for the oldest call in flight; return the number of its updates."""
        call = self._in_flight.popleft()
        self._non_finite_check.check(call.info, call.updates)
        return call.updates
