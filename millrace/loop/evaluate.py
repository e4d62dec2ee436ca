"""Evaluate every sample of a dataset once, between updates or while training continues."""

import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from millrace.data.source import DatasetError, Source
from millrace.data.stream import EvaluationBatches
from millrace.distributed import coordination
from millrace.distributed.progress import count_step
from millrace.feeds.infeed import Infeed
from millrace.feeds.threads import with_settings
from millrace.loop.activity import report_progress, run_stoppable
from millrace.loop.pace import AgreedLength, Pace
from millrace.program.evaluate import EvaluationProgram

_MAX_CHUNK_BYTES = 64 << 20
"""Data staged at once; two more chunks may be read ahead."""
_MAX_BATCHES = 64
"""Batches staged at once, which is a call where the program does not run parts."""


def evaluate(
    program: EvaluationProgram,
    state: Any,
    source: Source,
    batch_size: int,
    *,
    single_process: bool = False,
) -> dict[str, float]:
    """Return the mean of each metric over `source`, counting every readable sample once.

    Several processes share the samples: each reads its part of every batch if the program
    spans all devices, and every n-th batch if each process has a program of its own.

    Args:
        program: The compiled evaluation loop.
        state: A training state, on any devices or as NumPy arrays.
        source: The samples.
        batch_size: Samples per step over all replicas.
        single_process: Whether only this process evaluates; it then reads all samples.
    """
    if batch_size % (replicas := len(program.devices)):
        raise ValueError(
            f"batch_size ({batch_size}) must be a multiple of the program's {replicas} "
            "replicas, which share every batch."
        )
    batches = EvaluationBatches(source, batch_size)
    batch_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(next(iter(batches))))
    is_local = program.chunk_sharding.is_fully_addressable
    if is_local and not single_process:
        step = coordination.num_processes()
        batches = batches.every(step, first=coordination.process_id())
    capacity = max(1, min(len(batches), _MAX_CHUNK_BYTES // batch_bytes, _MAX_BATCHES))
    placed = program.validate_state(state)
    sums = _sum_metrics(program, placed, batches, capacity, is_local=is_local)
    if is_local:
        assert sums["count"] == batches.num_valid, f"{sums} of {batches.num_valid} samples"
        if not single_process:
            sums = _add_up(coordination.gather("evaluation", sums))
    count = sums.pop("count")
    if not count:
        raise DatasetError("None of the samples to evaluate can be read.")
    return {name: total / count for name, total in sums.items()}


def _sum_metrics(
    program: EvaluationProgram,
    state: Any,
    batches: EvaluationBatches,
    capacity: int,
    *,
    is_local: bool,
) -> dict[str, float]:
    """Return the sums over all batches, which are added one by one in their order."""
    sums: dict[str, float] = {"count": 0.0}
    done, pace = 0, Pace()
    agreed = AgreedLength(pace, "batches-per-call")
    with Infeed(batches) as infeed:
        while (chunk := infeed.chunk(capacity, program.chunk_sharding)) is not None:
            report_progress(done, len(batches))
            part, count = None, chunk.stop - chunk.start
            if program.runs_parts:
                count = min(count, pace.updates if is_local else agreed.next())
                part = chunk.start, count
            if not is_local:
                count_step()
            pace.start()
            call = functools.partial(program.sum_batches, state, chunk.data, part)
            # The first call compiles, which may take long.
            for name, values in (call() if done else run_stoppable(call)).items():
                # Without parts, the last chunk is padded with zeros, which are not valid.
                for value in values.tolist():
                    sums[name] = sums.get(name, 0.0) + value
            if done:  # the first call compiles
                pace.add(count)
            infeed.took(count)
            done += count
    return sums


def _add_up(sums_per_process: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sums in sums_per_process for name in sums)
    return {name: sum(sums.get(name, 0.0) for sums in sums_per_process) for name in names}


class PendingValidation(NamedTuple):
    """A validation that has started."""

    update: int
    """The update after which the state was copied."""
    metrics: Future[dict[str, float]]


class AsyncValidation:
    """Validation that overlaps training, one at a time.

    Args:
        snapshot: Copies what `validate` needs from a state. The next update donates the
            state, so the copy must not share its buffers.
        validate: Returns the metrics of a snapshot.
    """

    def __init__(
        self,
        snapshot: Callable[[Any], Any],
        validate: Callable[[Any], dict[str, float]],
    ) -> None:
        self._snapshot = snapshot
        self._validate = validate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millrace-validation")
        self.pending: PendingValidation | None = None

    def start(self, state: Any, update: int) -> None:
        """Start validating a state; the previous validation must have been collected."""
        assert self.pending is None
        snapshot = self._snapshot(state)
        # The run keeps its compiler options, and the list of what it compiles, in context
        # variables, which a new thread would not see.
        context = contextvars.copy_context()
        validate = with_settings(self._validate)
        metrics = self._thread.submit(context.run, validate, snapshot)
        self.pending = PendingValidation(update, metrics)

    def collect(self, *, wait: bool) -> tuple[int, dict[str, float]] | None:
        """Return the update and metrics of the pending validation, or raise its error.

        Args:
            wait: Whether to wait for it; otherwise None is returned until it is done.
        """
        pending = self.pending
        if pending is None or not (wait or pending.metrics.done()):
            return None
        self.pending = None
        return pending.update, pending.metrics.result()

    def close(self) -> None:
        """End the thread; a pending result is dropped."""
        self._thread.shutdown()
