"""Validation: the mean of each metric over every sample of a dataset."""

from typing import Any

import jax
import numpy as np

from millrace.data.source import DatasetError, Source
from millrace.data.stream import EvaluationBatches
from millrace.distributed import coordination
from millrace.feeds.infeed import Infeed
from millrace.program.evaluate import EvaluationProgram

_STAGED_BYTES = 64 << 20


def evaluate(
    program: EvaluationProgram,
    state: Any,
    source: Source,
    batch_size: int,
    *,
    by_itself: bool = False,
) -> dict[str, float]:
    """Return the mean of each metric over `source`, every readable sample counted once.

    Of several processes, each reads a share of the samples: of every batch, where the
    program's devices are everybody's, and else every so many-th batch.

    Args:
        program: The compiled evaluation loop.
        state: A training state, on any devices or of NumPy arrays.
        source: The samples.
        batch_size: Samples per step over all replicas.
        by_itself: Whether this process alone asks, and reads all samples.
    """
    if batch_size % (replicas := len(program.devices)):
        raise ValueError(
            f"batch_size ({batch_size}) must be a multiple of the program's {replicas} "
            "replicas, which share every batch."
        )
    batches = EvaluationBatches(source, batch_size)
    size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(next(iter(batches))))
    alone = program.chunk_sharding.is_fully_addressable
    if alone and not by_itself:
        batches = batches.every(
            coordination.num_processes(), first=coordination.process_id()
        )
    capacity = max(1, min(len(batches), _STAGED_BYTES // size))
    sums = _sums(program, program.validate_state(state), batches, capacity)
    if alone:
        assert sums["count"] == batches.num_valid, f"{sums} of {batches.num_valid} samples"
        sums = sums if by_itself else _added(coordination.gather("evaluation", sums))
    count = sums.pop("count")
    if not count:
        raise DatasetError("None of the samples to evaluate can be read.")
    return {name: total / count for name, total in sums.items()}


def _sums(
    program: EvaluationProgram, state: Any, batches: EvaluationBatches, capacity: int
) -> dict[str, float]:
    sums: dict[str, float] = {"count": 0.0}
    with Infeed(batches) as infeed:
        while (chunk := infeed.chunk(capacity, program.chunk_sharding)) is not None:
            # What is missing from the last chunk is zeros, which are not "valid".
            for name, value in program.run(state, chunk.data).items():
                sums[name] = sums.get(name, 0.0) + float(value)
            infeed.took(chunk.stop - chunk.start)
    return sums


def _added(each: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for sums in each for name in sums)
    return {name: sum(sums.get(name, 0.0) for sums in each) for name in names}
