"""Calls of a training program: how many updates each makes, and the data it takes.

A call lasts about a fifth of a second, so that the host can act, unless the plan gives the
length of an execution. Where one program makes any number of updates (`runs_parts`), many
batches are staged at once and each call uses some of them. Elsewhere, on a GPU, a program
is compiled for one number of updates and takes all that is staged. Its first length is a
guess, and it is compiled again only if the calls turn out to be much too long, or so short
that their overhead costs more than compiling.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.distributed import coordination
from millrace.distributed.progress import count_step, move
from millrace.feeds.infeed import DatasetEnded, Infeed
from millrace.feeds.stager import Chunk
from millrace.loop.activity import ActivityStopped, run_stoppable
from millrace.loop.pace import AgreedLength, Pace
from millrace.program.compiling import tree_bytes
from millrace.program.step import TrainState
from millrace.program.training import TrainingProgram

MAX_IN_FLIGHT = 2
"""Calls in flight at once: one runs while the next is queued, so the device never waits.

More would hold more staged data and delay reports for no gain. Stopping all processes at
the same update relies on them being at most two calls apart, and more than 32 calls with
collectives deadlock on CPU devices.
"""

_FIRST_LENGTH = 32
"""Updates of the first calls where a program is compiled for one number of updates."""
_LONGEST_CALL_SECONDS = 1.0
_CALL_OVERHEAD_SECONDS = 3e-4
_MIN_CALLS_MEASURED = 4


class Call(NamedTuple):
    """A call of the program whose info has not been fetched yet."""

    updates: int
    ends_execution: bool
    info: Any


class Calls:
    """Makes calls of a program over the elements of an infeed.

    Args:
        program: The program to call.
        infeed: Supplies the elements.
        execution: Updates between two points at which the run may have events.
        total: Number of updates of the run.
        max_staged: Updates whose data may be staged at once; by default as many as fit.
        fixed: Whether the host may act only after every `execution` updates, as the plan
            asks. Otherwise it may act after every call.
    """

    def __init__(
        self,
        program: TrainingProgram,
        infeed: Infeed,
        *,
        execution: int,
        total: int,
        max_staged: int | None = None,
        fixed: bool = False,
    ) -> None:
        self.pace = Pace()
        self._program = program
        self._infeed = infeed
        self._execution = execution
        self._total = total
        self._max_staged = max_staged or total
        self._fixed = fixed
        self._by_parts = program.runs_parts and not fixed
        self._length = None if fixed else _FIRST_LENGTH
        self._sizes: tuple[int, ...] = ()
        """Updates of the chunks up to the next end of an execution."""
        self._number = 0
        self._num_calls = 0
        self._agreed = AgreedLength(self.pace, "updates-per-call")

    @property
    def max_in_flight(self) -> int:
        """Number of calls that may be in flight."""
        return 1 if self.pace.is_slow else MAX_IN_FLIGHT

    def compile(self, state: TrainState, done: int = 0) -> None:
        """Compile for the calls that follow `done` updates."""
        element = self._infeed.peek()
        _check_element(element)
        num_bytes = tree_bytes(element)
        if self._by_parts:
            self._sizes = (self._program.updates_per_chunk(self._max_staged, num_bytes),)
        else:
            # A run may be resumed inside an execution; its rest comes first.
            stretch = -done % self._execution or self._execution
            self._sizes = _split(self._program, stretch, num_bytes, self._length)
        self._number = 0
        for size in sorted(set(self._sizes), reverse=True):
            capacity = size * self._micro_batches
            self._program.compile(state, _chunk_spec(self._program, element, capacity))

    def next_chunk(self, give_up: Callable[[], bool] | None = None) -> Chunk:
        """Wait for the data of the next call; raise an error if the dataset has ended.

        Args:
            give_up: Returns whether to stop waiting; ``GaveUp`` is raised then.
        """
        chunk = self._infeed.chunk(
            tuple(size * self._micro_batches for size in self._sizes),
            self._program.chunk_sharding,
            only_full=not self._by_parts,
            partial=self._micro_batches if self._accepts_partial_chunks else None,
            give_up=self._noticing_elements(give_up),
        )
        if chunk is None or chunk.stop - chunk.start < self._micro_batches:
            raise DatasetEnded(
                f"The dataset ended after {self._infeed.elements_read} elements, before "
                "the end of training. Repeat it without end, or use Infeed(..., "
                "on_end='stop') with millrace.train."
            )
        return chunk

    def _noticing_elements(self, give_up: Callable[[], bool] | None) -> Callable[[], bool]:
        """Return `give_up`, which is called while waiting, made to count as progress.

        A chunk of slow data may take long; only data that no longer comes is stuck.
        """
        num_read = self._infeed.elements_read

        def look() -> bool:
            nonlocal num_read
            if self._infeed.elements_read != num_read:
                num_read = self._infeed.elements_read
                move()
            return give_up is not None and give_up()

        return look

    def run(
        self, state: TrainState, chunk: Chunk, done: int, at_most: int
    ) -> tuple[TrainState, Call]:
        """Start a call after `done` updates that makes at most `at_most` more."""
        available = (chunk.stop - chunk.start) // self._micro_batches
        self._num_calls += 1
        if self._by_parts:
            updates = min(available, at_most, self._agreed.next())
            first = chunk.start // self._micro_batches
            state, info = self._program.run(state, chunk.data, (first, updates))
            call = Call(updates, True, info)
        else:
            updates = available
            state, info = self._program.run(state, chunk.data)
            call = Call(updates, self._advance(state, done + updates), info)
        self._infeed.took(updates * self._micro_batches)
        count_step()
        return state, call

    @property
    def _accepts_partial_chunks(self) -> bool:
        # With several processes, all must have chunks of the same size.
        return self._by_parts and coordination.num_processes() == 1

    @property
    def _micro_batches(self) -> int:
        return self._program.plan.batching.gradient_accumulation_count

    def _advance(self, state: TrainState, done: int) -> bool:
        """Choose the calls after `done` updates; return whether an execution has ended."""
        self._number += 1
        is_end = self._number == len(self._sizes)
        was_lead = sum(self._sizes) != self._execution
        if self._revise_length(done) or (is_end and was_lead):
            # If the run ends meanwhile, the weights of this call must not be lost.
            with contextlib.suppress(ActivityStopped):
                run_stoppable(lambda: self.compile(state, done))
        elif is_end:
            self._number = 0
        return is_end or not self._fixed

    def _revise_length(self, done: int) -> bool:
        """Whether to compile for another number of updates per call."""
        is_first = self._num_calls == _MIN_CALLS_MEASURED
        if self._length is None or not is_first or self._total - done < self._length:
            return False
        wanted = coordination.broadcast("updates-per-call", self._find_length(done))
        changed = wanted != self._length
        self._length = wanted
        return changed

    def _find_length(self, done: int) -> int:
        assert self._length is not None
        update = self.pace.seconds_per_update or 0.0
        call = update * max(self._sizes)
        wanted = self.pace.updates_wanted
        if call > _LONGEST_CALL_SECONDS:
            return wanted
        saved = (self._total - done) * _CALL_OVERHEAD_SECONDS / max(self._sizes)
        is_worth = saved > 2 * self._program.compile_seconds
        longer = min(wanted, self._execution)
        return longer if is_worth and longer > 2 * max(self._sizes) else self._length


def compile_calls(
    program: TrainingProgram, state: TrainState, infeed: Infeed, execution: int
) -> tuple[int, ...]:
    """Compile the program for every length of call in an execution of `execution` updates.

    An execution with more data than the program stages at once is split into several calls.

    Returns:
        For each call of an execution, the elements it takes from the infeed.
    """
    calls = Calls(program, infeed, execution=execution, total=execution, fixed=True)
    calls.compile(state)
    micro_batches = program.plan.batching.gradient_accumulation_count
    return tuple(size * micro_batches for size in calls._sizes)


def _check_element(element: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(element):
        if np.ndim(leaf) == 0:
            raise ValueError(
                f"Elements of the infeed must have samples along dim 0; "
                f"{jax.tree_util.keystr(path)} is a single number."
            )


def _split(
    program: TrainingProgram, updates: int, bytes_per_element: int, at_most: int | None
) -> tuple[int, ...]:
    """Split updates into calls of equal length, except perhaps the last."""
    per_call = program.updates_per_call(updates, bytes_per_element, at_most)
    rest = updates % per_call
    return (per_call,) * (updates // per_call) + ((rest,) if rest else ())


def _chunk_spec(program: TrainingProgram, element: Any, capacity: int) -> Any:
    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        array = np.asarray(leaf)
        return jax.ShapeDtypeStruct(
            (capacity, *array.shape),
            jax.dtypes.canonicalize_dtype(array.dtype),
            sharding=program.chunk_sharding,
        )

    return jax.tree.map(spec, element)
