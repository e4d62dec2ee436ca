"""Validation: the mean of each metric over every sample of a dataset."""

from typing import Any

import jax
import numpy as np

from millrace.data.source import DatasetError, Source
from millrace.data.stream import EvaluationBatches
from millrace.feeds.infeed import Infeed
from millrace.program.evaluate import EvaluationProgram

_STAGED_BYTES = 64 << 20


def evaluate(
    program: EvaluationProgram, state: Any, source: Source, batch_size: int
) -> dict[str, float]:
    """Return the mean of each metric over `source`, every readable sample counted once.

    Args:
        program: The compiled evaluation loop.
        state: A training state.
        source: The samples.
        batch_size: Samples per step over all replicas.
    """
    batches = EvaluationBatches(source, batch_size)
    size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(next(iter(batches))))
    capacity = min(len(batches), max(1, _STAGED_BYTES // size))
    sums: dict[str, float] = {}
    with Infeed(batches) as infeed:
        while (chunk := infeed.chunk(capacity, program.chunk_sharding)) is not None:
            # What is missing from the last chunk is zeros, which are not "valid".
            for name, value in program.run(state, chunk.data).items():
                sums[name] = sums.get(name, 0.0) + float(value)
            infeed.took(chunk.stop - chunk.start)
    count = sums.pop("count")
    assert count == batches.num_valid, f"{count} samples counted of {batches.num_valid}"
    if not count:
        raise DatasetError("None of the samples to evaluate can be read.")
    return {name: total / count for name, total in sums.items()}
